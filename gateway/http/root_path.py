"""`--root-path`: the path under which a proxy offers the server, as `/llm` in `/llm/v1/models`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware, outside all others: a request's path begins after `root_path`, whether or
    not the proxy has removed that."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
            raw = scope.get("raw_path") or b""
            scope["raw_path"] = raw.removeprefix(self._root_path.encode()) or b"/"
        await self._app(scope, receive, send)
