"""The engine's process: start, signs of life and end, log lines, and sandboxes for untrusted work."""
