"""The synthetic server as an ASGI application: its HTTP endpoints, and what they share with
WebSocket.

Raw ASGI, so that little stands between a token's time and its write.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl

import orjson

from .asked import Asked, Endpoint, RefusedError, parse_json, read
from .chunks import Chunks
from .events import Events
from .outlets import (
    EventStreamOutlet,
    Exchange,
    Receive,
    Scope,
    Send,
    unless_gone,
)
from .plan import Fault, StreamPlan
from .player import Player, Readings
from .settings import SyntheticSettings

_POSTS = {
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/responses": Endpoint.RESPONSES,
}
_RESPONSES = "/v1/responses/"


class Answers:
    """What the endpoints share: the settings, the draws, and who reads what."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self.settings = settings
        self.readings = Readings()
        self._fault = Fault.parse(settings.fault)
        self._rng = random.Random(settings.seed)
        self._leaked: list[bytearray] = []

    def plan(
        self, endpoint: Endpoint, body: Mapping[str, Any], *, began_us: int | None = None
    ) -> tuple[StreamPlan, Asked]:
        """An answer to a request that came at `began_us` of the monotonic clock, or now.

        Raises:
            RefusedError: the request makes no sense, or its turn to be refused came.
        """
        asked = read(endpoint, body, self.settings)
        if self._rng.random() < self.settings.refuse_share:
            status = self.settings.refuse_status
            raise RefusedError("refused as ordered", code="ordered_refusal", status=status)
        if self.settings.leak_bytes:
            self._leaked.append(bytearray(b"x" * self.settings.leak_bytes))
        own = asked.settings
        draw = self._rng.getrandbits(32)
        plan = StreamPlan(
            began_us=began_us or time.monotonic_ns() // 1000,
            created_s=int(time.time()),
            num_tokens=asked.num_tokens or own.default_tokens,
            prompt_tokens=asked.prompt_tokens,
            cached_tokens=asked.cached_tokens,
            ttft_us=round(own.ttft_ms * 1000),
            itl_us=round(own.itl_ms * 1000),
            ttft_jitter_us=round(own.ttft_jitter_ms * 1000),
            itl_jitter_us=round(own.itl_jitter_ms * 1000),
            seed=(draw + own.seed) % (1 << 32),
            tokens_per_event=own.tokens_per_event,
            is_limited=asked.num_tokens is not None,
        )
        return plan, asked

    def fault_for(self, asked: Asked) -> Fault | None:
        """The fault of a new stream: the request's own, or the server's for its share."""
        if asked.fault is not None or self._fault is None:
            return asked.fault
        return self._fault if self._rng.random() < self.settings.fault_share else None

    def find(self, response_id: str) -> StreamPlan:
        """
        Raises:
            RefusedError: there is no such response.
        """
        plan = StreamPlan.from_id(response_id)
        if plan is None:
            raise RefusedError(
                f"no response {response_id!r} here", code="response_not_found", status=404
            )
        return plan

    def state(self, plan: StreamPlan) -> tuple[int, str]:
        """How many events of a response have come, and its status."""
        cancelled_s = self.readings.cancelled_s(plan.response_id())
        num_due = plan.num_due(min(time.monotonic(), cancelled_s))
        if num_due == plan.num_events:
            return num_due, "incomplete" if plan.is_limited else "completed"
        return num_due, "in_progress" if time.monotonic() < cancelled_s else "cancelled"


class HttpEndpoints:
    """Everything but WebSocket."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._settings = answers.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._route(scope, receive, send)
        except RefusedError as refusal:
            await _json(send, refusal.body(), status=refusal.status)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in _POSTS:
            body = parse_json(await self._body(scope, receive))
            await self._create(_POSTS[path], body, Exchange(scope, receive, send))
        elif method == "POST" and path.startswith(_RESPONSES) and path.endswith("/cancel"):
            await self._cancel(path.removeprefix(_RESPONSES).removesuffix("/cancel"), send)
        elif method == "GET" and path.startswith(_RESPONSES):
            await self._retrieve(path.removeprefix(_RESPONSES), Exchange(scope, receive, send))
        elif method == "GET" and path == "/v1/models":
            card = {"id": self._settings.model, "object": "model", "owned_by": "penstock"}
            card["max_model_len"] = self._settings.max_model_len  # type: ignore[assignment]
            await _json(send, {"object": "list", "data": [card]})
        elif method == "GET" and path in ("/health", "/ready"):
            await _json(send, {"status": "ok"})
        elif method == "GET" and path == "/metrics":
            await _answer(send, self._metrics().encode(), content_type=b"text/plain; version=0.0.4")
        else:
            raise RefusedError(f"no {method} {path} here", code="not_found", status=404)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body, is_more = bytearray(), int(declared) <= limit
        while is_more:
            message = await receive()
            body += message.get("body", b"")
            is_more = message.get("more_body", False) and len(body) <= limit
        if max(int(declared), len(body)) > limit:
            raise RefusedError(
                f"the body is larger than {limit} bytes", code="request_too_large", status=413
            )
        return bytes(body)

    async def _create(
        self, endpoint: Endpoint, body: Mapping[str, Any], exchange: Exchange
    ) -> None:
        began_us = exchange.scope["state"]["received_us"]
        plan, asked = self._answers.plan(endpoint, body, began_us=began_us)
        frames: Chunks | Events = Chunks(plan, asked)
        if endpoint is Endpoint.RESPONSES:
            frames = Events(plan, self._settings.model)
        if asked.is_stream:
            fault = self._answers.fault_for(asked)
            await self._stream(plan, frames, exchange, fault=fault)
            return
        await unless_gone(exchange.receive, self._whole(plan, frames, exchange.send))

    async def _whole(self, plan: StreamPlan, frames: Chunks | Events, send: Send) -> None:
        with self._answers.readings.open(plan.response_id()) as reading:
            await reading.until(plan.due_s(plan.num_events))
        await _json(send, frames.whole(*self._answers.state(plan)))

    async def _stream(
        self,
        plan: StreamPlan,
        frames: Chunks | Events,
        exchange: Exchange,
        *,
        fault: Fault | None = None,
        after: int = -1,
    ) -> None:
        outlet = EventStreamOutlet(exchange.scope, exchange.send)
        readings = self._answers.readings
        player = Player(plan, frames, outlet, readings=readings, fault=fault)

        async def stream() -> None:
            await outlet.begin()
            with readings.open(plan.response_id()) as reading:
                await player.play(reading, after=after)
            await outlet.end()

        await unless_gone(exchange.receive, stream())

    async def _retrieve(self, response_id: str, exchange: Exchange) -> None:
        plan = self._answers.find(response_id)
        frames = Events(plan, self._settings.model)
        query = dict(parse_qsl(exchange.scope["query_string"].decode()))
        if query.get("stream") != "true":
            await _json(exchange.send, frames.whole(*self._answers.state(plan)))
            return
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal():
            raise RefusedError(
                "starting_after must be a number", code="invalid_value", param="starting_after"
            )
        await self._stream(plan, frames, exchange, after=int(after))

    async def _cancel(self, response_id: str, send: Send) -> None:
        plan = self._answers.find(response_id)
        self._answers.readings.cancel(response_id)
        await _json(send, Events(plan, self._settings.model).whole(*self._answers.state(plan)))

    def _metrics(self) -> str:
        """Those that tell an idle server from a busy one, and how late events were."""
        lateness = self._answers.readings.lateness
        values = {
            "penstock:num_requests_running": self._answers.readings.num_open,
            "penstock:num_requests_waiting": 0,
            "penstock:kv_cache_usage_perc": 0,
            **{f"synthetic:late_{name}": value for name, value in asdict(lateness).items()},
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())


async def _json(send: Send, content: Any, *, status: int = 200) -> None:
    await _answer(send, orjson.dumps(content), content_type=b"application/json", status=status)


async def _answer(send: Send, body: bytes, *, content_type: bytes, status: int = 200) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
