"""What all HTTP endpoints share: reading a body within its limit, answering whoever is left, and
405 for a path that is served, but not with this method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.api.schema.parsing import parse_json
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.http.event_stream import wait_disconnect

_Result = TypeVar("_Result")
CLIENT_GONE = 499  # nginx's number; nobody receives it
# Several of 4 MB that are complete at the same time held the event loop up for 0.1 s when they were
# parsed one after the other: from one thread, the loop has its turn between them.
_LARGE_BODY_BYTES = 256 << 10
_LARGE_BODIES = ThreadPoolExecutor(1, thread_name_prefix="penstock-body")


def json_response(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


async def read_json(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestRefusedError: it is too large or no JSON object.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:  # no length was declared, or a wrong one
            raise _too_large(max_bytes)
    if num_bytes < _LARGE_BODY_BYTES:
        return parse_json(b"".join(chunks))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LARGE_BODIES, lambda: parse_json(b"".join(chunks)))


def _too_large(max_bytes: int) -> RequestRefusedError:
    return RequestRefusedError(
        f"the body is larger than {max_bytes} bytes", code="request_too_large", status=413
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `work`, which is cancelled when the client leaves (None)."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await worker if worker.done() else None
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class WrongMethod:
    """An ASGI application that refuses, and says what is allowed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._headers = {"Allow": ", ".join(allowed)}

    async def __call__(self, _: Scope, __: Receive, ___: Send) -> None:
        raise HTTPException(status_code=405, headers=self._headers)


def refusing_others(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The routes, and behind them for each of their paths one that takes every other method.

    Starlette's own router stops at the first of a path's routes, so its `Allow` names the methods
    of that one alone; and what is mounted at `/` would take whatever no route takes.
    """
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    others = [Route(path, WrongMethod(sorted(allowed))) for path, allowed in methods.items()]
    return [*routes, *others]
