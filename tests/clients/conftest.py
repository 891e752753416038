"""What the tests of the clients share: real servers, and packages of third-party clients."""

from .packages import codex, langchain, node_modules
from .real_server import keyed_server, real_server

__all__ = ["codex", "keyed_server", "langchain", "node_modules", "real_server"]
