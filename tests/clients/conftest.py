"""What the tests of the clients share: real servers."""

from .real_server import keyed_server, real_server

__all__ = ["keyed_server", "real_server"]
