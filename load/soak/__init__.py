"""Minutes of mixed and hostile traffic, and a verdict on streams, leaks and refusals."""
