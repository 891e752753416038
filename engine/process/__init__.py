"""The engine's process: start, signs of life, end, log lines, and sandboxes for untrusted work."""
