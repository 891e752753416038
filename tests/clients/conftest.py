"""What the tests of the clients share: packages of third-party clients."""

from .packages import claude_code, codex, langchain, node_modules

__all__ = ["claude_code", "codex", "langchain", "node_modules"]
