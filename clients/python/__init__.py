"""Python clients. What they do not know: the server's code; they speak its public protocol."""
