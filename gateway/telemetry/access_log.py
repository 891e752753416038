"""The outermost ASGI middleware: gives every request an id and reports the request at its end.

    request → x-request-id → … → answer with x-request-id → metrics, a line in the log, a span

The line contains the route instead of the path, and never a header, a body or a key. The only text
of a caller in it is the request id, whose characters are restricted. A file of the chat page is
named by its path. Unexpected exceptions of an endpoint are answered here, so that their answer has
the id too.
"""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.errors import FAILURE, REQUEST_ID, failure_of
from penstock.gateway.telemetry.metrics import Metrics
from penstock.gateway.telemetry.request_record import (
    CURRENT_REQUEST,
    REQUEST_ID_HEADER,
    RequestRecord,
    request_id_of,
)

_LOG = logging.getLogger("penstock.access")
PROBES = frozenset(
    {"/health", "/live", "/ready", "/metrics", "/ping", "/load"}
)  # polled: logged at debug level
ANY_PATH = "/{path:path}"  # the template of a WebSocket that is not there
_PAGE_ROUTE = "/"  # the template of the mount with the page's files
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


class RequestLog:
    """ASGI middleware.

    Args:
        routes: templates of paths (`route_templates`).
        on_end: called with the record of every request that ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        routes: Mapping[int, str],
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        record = self._begin(scope)
        token = CURRENT_REQUEST.set(record)
        try:
            await self._serve(record, receive, send)
        finally:
            self._end(record)
            CURRENT_REQUEST.reset(token)

    def _begin(self, scope: Scope) -> RequestRecord:
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER)
        request_id = request_id_of(None if sent is None else sent.encode("latin-1"))
        record = RequestRecord(request_id=request_id, scope={**scope, REQUEST_ID: request_id})
        if scope["path"] not in PROBES:
            record.on_refusal = self._metrics.count_refused
        return record

    async def _serve(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        id_headers = record.id_headers

        def send_with_id(message: Message) -> Any:  # not a coroutine, for speed: tokens pass here
            kind = message["type"]
            if kind in _STARTS:
                record.status = message.get("status", 101)
                if (failure := message.get(FAILURE)) is not None:
                    record.note_failure(failure)
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            elif kind == "websocket.close" and record.status is None:
                record.status = 403
            return send(message)

        try:
            await self._app(record.scope, receive, send_with_id)
        except Exception as error:
            if record.scope["type"] != "http" or record.status is not None:
                raise
            await failure_of(error).response()(record.scope, receive, send_with_id)

    def _end(self, record: RequestRecord) -> None:
        record.duration_s = time.perf_counter() - record.began_s
        route = self._routes.get(id(record.scope.get("endpoint")))
        is_unknown = route in (_PAGE_ROUTE, ANY_PATH) and record.status == 404
        record.route = None if is_unknown else route
        self._metrics.count_request(record)
        level = logging.DEBUG if _is_routine(record) else logging.INFO
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "%s", _text(record), extra=_fields(record))
        if self._on_end is not None:
            self._on_end(record)


def _is_routine(record: RequestRecord) -> bool:
    """Whether it is a probe, or one of the chat page's dozens of files."""
    return _is_file(record) or record.route in PROBES


def _is_file(record: RequestRecord) -> bool:
    """Whether a file of the chat page was found."""
    return record.route == _PAGE_ROUTE and record.status is not None and record.status < 400


def _route(record: RequestRecord) -> str | None:
    """What the line names: the route, or the normalised path of a file."""
    if not _is_file(record):
        return record.route
    return posixpath.normpath("/" + str(record.scope["path"]).lstrip("/"))


def route_templates(routes: Iterable[BaseRoute], prefix: str = "") -> dict[int, str]:
    """The template of each endpoint's path, by `id(endpoint)`: not all endpoints are hashable."""
    found: dict[int, str] = {}
    for route in routes:
        if isinstance(route, Mount) and route.routes:
            found |= route_templates(route.routes, prefix + route.path)
        elif isinstance(route, Mount):
            found[id(route.app)] = prefix + (route.path or "/")
        elif isinstance(route, Route | WebSocketRoute):
            found[id(route.endpoint)] = prefix + route.path
    return found


def tag_log_lines() -> None:
    """Add request id and tenant to log lines that a request causes (`--log-format json`)."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_tag)


def _tag(line: logging.LogRecord) -> bool:
    record = CURRENT_REQUEST.get()
    if record is not None and not hasattr(line, "request_id"):
        line.request_id, line.tenant = record.request_id, record.tenant
    return True


def _fields(record: RequestRecord) -> dict[str, Any]:
    """The line's JSON fields; those of generations only if there was one."""
    fields = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "method": record.method,
        "route": _route(record),
        "status": record.status,
        "duration_s": round(record.duration_s, 6),
    }
    if record.error is not None:
        fields["error"] = record.error
    if record.model is not None:
        fields["input_tokens"] = record.input_tokens
        fields["output_tokens"] = record.output_tokens
    if record.first_token_s is not None:
        fields["time_to_first_token_s"] = round(record.first_token_s, 6)
    return fields


def _text(record: RequestRecord) -> str:
    where = f"{record.method} {_route(record) or 'unknown path'}"
    text = f"{where} {record.status or 'left'} in {record.duration_s:.3f} s"
    if record.first_token_s is not None:
        tokens = f"{record.input_tokens} + {record.output_tokens} tokens"
        text += f", {tokens}, the first after {record.first_token_s:.3f} s"
    if record.error is not None:
        text += f", {record.error}"
    return f"{text} [{record.request_id}]"
