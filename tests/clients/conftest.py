"""What the tests of the clients share: packages of third-party clients."""

from .packages import codex, langchain, node_modules

__all__ = ["codex", "langchain", "node_modules"]
