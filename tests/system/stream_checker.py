"""A client that reads one response to its end, over as many connections as it takes, and checks it.

    no gap, no repeat      every event's number is the one after the last
    one terminal event     nothing comes after it, and no connection is needed after it
    one text               the deltas together are the text of the terminal event

A connection that is lost, or that ends without the terminal event, is followed by another that
resumes: on the same server, or on another one of the same Redis. Not known here: who kills what.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import websockets

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
_AGAIN_S = 0.05
_CONNECT_S = 60.0
_LOST = (httpx.TransportError, websockets.WebSocketException, OSError, TimeoutError)

Event = dict[str, Any]


class NotThereError(Exception):
    """The server does not serve now: 503, as while an engine or Redis is away."""


class ExpiredError(Exception):
    """The server keeps no log of the response (any more)."""


@dataclass(kw_only=True)
class CheckedStream:
    """One response and its reader.

    Attributes:
        body: of the request to `/v1/responses`.
        begins_at: base URL of the server that is asked.
        resumes_at: of the one that is asked to go on.
        transport: `sse` or `websocket`.
        leaves_after: so many events on one connection the client leaves by itself, and resumes;
            0: never.
        silence_s: a connection that brings nothing for so long is left for another; None: never.
        give_up_s: of silence, connections that fail included.
        events: all, in order.
        times_s: when each came, on `time.monotonic()`.
        num_connections: that brought events, or were to.
        losses: why connections were lost that had begun: an exception each.
    """

    body: dict[str, Any]
    begins_at: str
    resumes_at: str
    transport: str
    leaves_after: int = 0
    silence_s: float | None = None
    give_up_s: float = 90.0
    events: list[Event] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_connections: int = 0
    losses: list[Exception] = field(default_factory=list)

    @property
    def response_id(self) -> str | None:
        return self.events[0]["response"]["id"] if self.events else None

    @property
    def is_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in TERMINAL

    @property
    def text(self) -> str:
        return self._said("output_text")

    @property
    def thought(self) -> str:
        return self._said("reasoning_text")

    def _said(self, kind: str) -> str:
        name = f"response.{kind}.delta"
        return "".join(event["delta"] for event in self.events if event["type"] == name)

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on what happened meanwhile."""
        response = self.events[-1]["response"]
        usage = dict(response["usage"] or {})
        usage.pop("input_tokens_details", None)  # depends on who came before
        return {
            "thought": self.thought,
            "text": self.text,
            "status": response["status"],
            "why": response["incomplete_details"],
            "error": response["error"],
            "usage": usage,
        }

    @property
    def longest_pause_s(self) -> float:
        return max((later - earlier for earlier, later in pairwise(self.times_s)), default=0.0)

    async def read(self) -> CheckedStream:
        """To its end.

        Raises:
            ExpiredError: it cannot be resumed.
            TimeoutError: nobody serves it.
        """
        heard_s, reading = time.monotonic(), self._sse if self.transport == "sse" else self._socket
        while not self.is_ended:
            known, server = len(self.events), self.resumes_at if self.events else self.begins_at
            self.num_connections += 1
            try:
                async with aclosing(reading(server)) as events:
                    async for event in events:
                        self._take(event)
                        if len(self.events) - known == self.leaves_after and not self.is_ended:
                            break
            except (NotThereError, *_LOST) as error:
                if self.events:
                    self.losses.append(error)
                if time.monotonic() - heard_s > self.give_up_s:
                    raise TimeoutError(f"nothing for {self.give_up_s:g} s") from error
                await asyncio.sleep(_AGAIN_S)
            if len(self.events) > known:
                heard_s = time.monotonic()
        self._check_text()
        return self

    def _take(self, event: Event) -> None:
        assert not self.is_ended, f"{event} after the terminal event of {self.response_id}"
        number = event["sequence_number"]
        assert number == len(self.events), (
            f"{self.response_id} over {self.transport}: {number} came after "
            f"{len(self.events) - 1}, on connection {self.num_connections}"
        )
        self.events.append(event)
        self.times_s.append(time.monotonic())

    def _check_text(self) -> None:
        whole = {"message": "", "reasoning": ""}
        for item in self.events[-1]["response"]["output"]:
            whole[item["type"]] += item["content"][0]["text"]
        told = {"message": self.text, "reasoning": self.thought}
        assert whole == told, f"{self.response_id}: the deltas are not the text"

    async def _sse(self, server: str) -> AsyncGenerator[Event, None]:
        connect_s = self.silence_s or _CONNECT_S
        path = "/v1/responses"
        timeout = httpx.Timeout(self.silence_s or self.give_up_s, connect=connect_s)
        async with httpx.AsyncClient(base_url=server, timeout=timeout) as client:
            if self.response_id is None:
                request = client.stream("POST", path, json={**self.body, "stream": True})
            else:
                query = {"stream": "true", "starting_after": str(len(self.events) - 1)}
                request = client.stream("GET", f"{path}/{self.response_id}", params=query)
            async with request as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refused(response.status_code, response.json()["error"])
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if event["type"] == "error":
                            raise _refused(503, event)
                        yield event

    async def _socket(self, server: str) -> AsyncGenerator[Event, None]:
        address = server.replace("http", "ws", 1) + "/v1/responses"
        open_s, recv_s = self.silence_s or _CONNECT_S, self.silence_s or self.give_up_s
        options: dict[str, Any] = {"open_timeout": open_s, "close_timeout": 0.5}
        async with websockets.connect(address, **options) as socket:
            if self.response_id is None:
                message = {"type": "response.create", **self.body}
            else:
                after, response_id = len(self.events) - 1, self.response_id
                message = {"type": "penstock.resume", "starting_after": after}
                message["response_id"] = response_id
            await socket.send(json.dumps(message))
            while not self.is_ended:
                event = json.loads(await asyncio.wait_for(socket.recv(), recv_s))
                if event["type"] == "penstock.recovered":
                    if not event["recovered"]:
                        raise _refused(503, event["error"])
                elif event["type"] == "error":
                    raise _refused(event["status"], event["error"])
                else:
                    yield event


def _refused(status: int, error: Event) -> Exception:
    if error["code"] == "response_expired":
        return ExpiredError(error["message"])
    return NotThereError(error) if status == 503 else AssertionError(error)


async def replay(server: str, response_id: str) -> list[Event]:
    """All events of a response, as a server tells them now.

    Raises:
        ExpiredError: it keeps no log of it.
    """
    query = {"stream": "true"}
    async with httpx.AsyncClient(base_url=server, timeout=120) as client:
        response = await client.get(f"/v1/responses/{response_id}", params=query)
    if response.status_code != 200:
        raise _refused(response.status_code, response.json()["error"])
    lines = response.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    if events and events[-1]["type"] == "error":
        raise _refused(503, events[-1])
    return events
