"""Who asks: the tenant behind an API key, and what it may do.

`auth` finds it and leaves it in the ASGI scope; everybody else only reads it here.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

_SCOPE_KEY = "penstock.caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A tenant.

    Attributes:
        tenant: whose conversations, responses and prefix cache these are.
    """

    tenant: str = "default"


ANYBODY = Caller()


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of an HTTP request or a WebSocket."""
    caller: Caller = scope.get(_SCOPE_KEY, ANYBODY)
    return caller


def set_caller(scope: MutableMapping[str, Any], caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller
