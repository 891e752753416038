"""What all HTTP endpoints share: reading a body within its limit, and answering whoever is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.schemas import parse_json
from penstock.gateway.sse import wait_disconnect

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
