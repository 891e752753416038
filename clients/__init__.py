"""Clients of a penstock server: the chat page (`browser`), and Python's with the terminal chat
(`python`), of which everything public can be imported from here:

    from penstock.clients import AsyncClient, Client

It is loaded when asked for: the gateway, which serves the page, needs none of it in memory.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .python import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        python = import_module(f"{__name__}.python")
        if name in python.__all__:
            return getattr(python, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
