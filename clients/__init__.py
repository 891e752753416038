"""Clients of a penstock server: the chat page (`browser`), and the Python client with the terminal
chat (`python`), whose public names can be imported from here:

    from penstock.clients import AsyncClient, Client

They are loaded on first use: the gateway, which serves the page, does not need the Python client.
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
