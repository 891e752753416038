"""Shared by all HTTP endpoints: reading a JSON body within its size limit, cancelling work when the
client disconnects, and 426 for a WebSocket's path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.api.schema.parsing import parse_json
from penstock.gateway.errors import RequestRefusedError, refusal
from penstock.gateway.generation.paced_work import PacedWork, work_of
from penstock.gateway.http.content_encoding import codings_of, decoded
from penstock.gateway.http.event_stream import wait_disconnect

_Result = TypeVar("_Result")
_Kind = TypeVar("_Kind")
CLIENT_GONE = 499  # nginx's number; nobody receives it
# Parsing several 4 MB bodies in a row on the event loop blocked it for 0.1 s. One thread parses
# them instead, so the event loop gets its turn in between.
_LARGE_BODY_BYTES = 256 << 10
_LARGE_BODIES = ThreadPoolExecutor(1, thread_name_prefix="penstock-body")


def json_response(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


async def read_json(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Args:
        max_bytes: of the body as it is sent, and without its `Content-Encoding`.

    Raises:
        RequestRefusedError: the body is too large, not a JSON object, or its coding is not known.
    """
    encoding = request.headers.get("content-encoding")
    codings = [] if encoding is None else codings_of(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:  # the length was missing or wrong
            raise _too_large(max_bytes)
    if num_bytes < _LARGE_BODY_BYTES and not codings:
        return parse_json(b"".join(chunks))

    def parsed() -> dict[str, Any]:
        body = decoded(b"".join(chunks), codings, max_bytes)
        if body is None:
            raise _too_large(max_bytes)
        return parse_json(body)

    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, parsed)


async def parsed(
    work: PacedWork,
    kind: type[_Kind],
    body: dict[str, Any],
    parse: Callable[[type[_Kind], dict[str, Any]], _Kind],
) -> _Kind:
    """What `parse` makes of a body; off the event loop if it is large.

    Args:
        kind: of request.

    Raises:
        RequestRefusedError: as `parse`. 503: too many large ones are waiting.
    """
    return await work.run_if_large(partial(parse, kind, body), size=work_of(body))


async def read_fields(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body's JSON object, as by `read_json`, without the fields that are null."""
    body = await read_json(request, max_bytes=max_bytes)
    return {name: value for name, value in body.items() if value is not None}


def _too_large(max_bytes: int) -> RequestRefusedError:
    return RequestRefusedError(
        f"the body is larger than {max_bytes} bytes", code="request_too_large", status=413
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `work`; if the client disconnects, `work` is cancelled and the result None."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await worker if worker.done() else None
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class UpgradeRequired:
    """An ASGI application for a WebSocket's path that answers 426 to a plain request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = refusal(
            426,
            code="upgrade_required",
            message=f"{scope['path']} is a WebSocket, and the request has no Upgrade header; a "
            "proxy in between must pass on Upgrade and Connection",
        )
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        await replace(failure, headers=headers).response()(scope, receive, send)
