"""Minutes of mixed and hostile traffic, and a verdict: did every stream come right, did anything
leak."""
