"""The chat page at `/`: static files of `penstock.clients.browser` under a strict policy."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_DIRECTORY = Path(__file__).parents[2] / "clients" / "browser"
_SERVED = frozenset({"", ".html", ".css", ".js", ".svg"})  # not the notes and screenshots
_METHODS = ("GET", "HEAD")
_HOST = re.compile(r"[A-Za-z0-9.\-\[\]:]+")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'{sockets}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class ChatPage:
    """An ASGI application for the files in a directory."""

    def __init__(self, directory: Path = PAGE_DIRECTORY) -> None:
        self._static = StaticFiles(directory=directory, html=True)
        self._files = GZipMiddleware(self._static)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _METHODS:
            if not self._has(scope):
                raise HTTPException(status_code=404)
            raise HTTPException(status_code=405, headers={"Allow": ", ".join(_METHODS)})
        policy = _policy(Headers(scope=scope).get("host", ""))

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = policy
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cache-Control"] = "no-cache"  # revalidated, so an upgrade shows at once
            await send(message)

        if PurePosixPath(scope["path"]).suffix not in _SERVED:
            raise HTTPException(status_code=404)
        await self._files(scope, receive, send_guarded)

    def _has(self, scope: Scope) -> bool:
        path = self._static.get_path(scope)
        return PurePosixPath(path).suffix in _SERVED and (
            path == "." or self._static.lookup_path(path)[1] is not None
        )


def _policy(host: str) -> str:
    # Not every browser lets 'self' include this server's WebSockets.
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return _POLICY.format(sockets=sockets)
