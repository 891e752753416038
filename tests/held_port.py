"""A port that nobody else is given."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A port that nobody else is given, and on which nobody listens yet: bound, which keeps out all
    but whoever asks for this very port and may share it (SO_REUSEADDR), as servers do."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def number_of(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port
