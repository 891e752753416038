"""Clients of a penstock server: the chat page (`browser`) and the terminal chat (`python`)."""
