"""404 and 405 that say what is there: the path that was probably meant, or the methods of a path.

POST /chat/completions   404   did you mean /v1/chat/completions?
POST /v1/models          405   it allows GET, HEAD
WebSocket /v1/realtime   404   /v1/responses and /v1/stats are WebSockets
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute, compile_path
from starlette.types import Receive, Scope, Send

from penstock.gateway.api.shared.operations import operations_of
from penstock.gateway.errors import refusal
from penstock.gateway.telemetry.access_log import ANY_PATH

_MAX_GUESSED_CHARS = 100  # comparing longer paths with all others would take milliseconds
# Others', of which a guess would mislead.
_NOT_BUILT = {
    ("POST", "/v1/messages/batches"): "this server has no batches; send each message by itself",
}


def handle_wrong_path(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in the API's error format."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    headers = dict(error.headers or {})
    explanation = str(error.detail)
    if missing := _NOT_BUILT.get((request.method, path)):
        status, headers, explanation = 404, {}, missing
    elif status == 404:
        meant = _meant(path, _templates(request.app.routes))
        explanation = f"there is no such path; {meant or 'GET /openapi.json lists all there are'}"
    elif status == 405:
        explanation = f"the method is not allowed; this path allows {headers.get('Allow', 'none')}"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = f"{request.method} {path}: {explanation}"
    response = refusal(status, code=code, message=message).response()
    response.headers.update(headers)
    return response


def _templates(routes: Iterable[BaseRoute]) -> list[str]:
    """The paths of all operations and WebSockets, as Starlette writes them."""
    routes = list(routes)
    sockets = [each.path for each in routes if isinstance(each, WebSocketRoute)]
    return [*(each.path for each in operations_of(routes)), *(s for s in sockets if s != ANY_PATH)]


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return compile_path(template)[0]


def _meant(path: str, templates: Sequence[str]) -> str:
    """A question with the path that was probably meant; empty if none is similar."""
    if len(path) > _MAX_GUESSED_CHARS:
        return ""
    known = [_pattern(template) for template in templates]
    path = path.rstrip("/")
    # A base URL without /v1, with /v1 twice, or with a proxy's prefix.
    ends = [path[match.start() :] for match in re.finditer("/", path)]
    guesses = [guess for end in ends for guess in (f"/v1{end}", end) if guess != path]
    found = next((guess for guess in guesses if any(each.match(guess) for each in known)), None)
    if found is None:
        close = get_close_matches(path, templates, 1, 0.8)
        found = close[0].replace(":path}", "}") if close else None
    return "" if found is None else f"did you mean {found}?"


class NoSuchSocket:
    """An ASGI application that refuses the handshake of a WebSocket which is not there.

    Args:
        paths: of those that are.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"{scope['path']} is not a WebSocket here; {' and '.join(self._paths)} are"
        await refusal(404, code="not_found", message=message).response()(scope, receive, send)


class WrongMethod:
    """An ASGI application that answers 405 and lists the allowed methods."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._headers = {"Allow": ", ".join(allowed)}

    async def __call__(self, _: Scope, __: Receive, ___: Send) -> None:
        raise HTTPException(status_code=405, headers=self._headers)


def refusing_others(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The routes, followed by one for each path that refuses every other method.

    Starlette's router stops at a path's first route, so its `Allow` would name that route's methods
    only; and the application mounted at `/` would receive the unmatched requests.
    """
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    others = [Route(path, WrongMethod(sorted(allowed))) for path, allowed in methods.items()]
    return [*routes, *others]
