"""The chat page at `/`: static files of `penstock.clients.browser` under a strict policy."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_DIRECTORY = Path(__file__).parents[1] / "clients" / "browser"
_POLICY = (
    "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


class ChatPage:
    """An ASGI application for the files in a directory."""

    def __init__(self, directory: Path = PAGE_DIRECTORY) -> None:
        self._files = StaticFiles(directory=directory, html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})  # before accepting: 403
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cache-Control"] = "no-cache"  # asks again, so an upgrade shows at once
            await send(message)

        await self._files(scope, receive, send_guarded)
