"""The server's state: health, metrics, and the numbers that `/dashboard` shows."""
