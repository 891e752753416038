"""405 for a path that is served, but not with this method.

Starlette's own router stops at the first of a path's routes, so its `Allow` names the methods of
that one alone; and what is mounted at `/` would take whatever no route takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send


class WrongMethod:
    """An ASGI application that refuses, and says what is allowed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._headers = {"Allow": ", ".join(allowed)}

    async def __call__(self, _: Scope, __: Receive, ___: Send) -> None:
        raise HTTPException(status_code=405, headers=self._headers)


def refusing_others(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The routes, and behind them for each of their paths one that takes every other method."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    others = [Route(path, WrongMethod(sorted(allowed))) for path, allowed in methods.items()]
    return [*routes, *others]
