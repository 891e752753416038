"""The log of a response: its entries while it grows, and the stores that keep it."""
