"""What the requests of each API key have used, by day."""
