"""The GPU bench."""
