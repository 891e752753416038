"""What tests of the synthetic server share: talking to it, and reading what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import websockets

from ..support.synthetic.server import SyntheticServer

FAST = {"ttft_ms": 5, "itl_ms": 1}
# One token, and nothing for eight minutes: no machine is so slow that it ends meanwhile.
ENDLESS = {"ttft_ms": 5, "itl_ms": 60_000, "tokens_per_event": 8}
CREATE = {"type": "response.create", "input": "x", "max_output_tokens": 5, "synthetic": FAST}
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


def connect(server: SyntheticServer) -> websockets.connect:
    return websockets.connect(server.base_url.replace("http", "ws") + "/v1/responses")


def text_of(num_tokens: int) -> str:
    return "".join(f" t{token}" for token in range(num_tokens))


async def lines(http: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    """The data of each event of a stream, JSON parsed where it is some."""
    found = []
    async with http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                with contextlib.suppress(json.JSONDecodeError):
                    data = json.loads(data)
                found.append(data)
    return found


async def events_of(http: httpx.AsyncClient, num_tokens: int, **wishes: Any) -> list[Any]:
    body = {"input": "hi", "max_output_tokens": num_tokens, "synthetic": {**FAST, **wishes}}
    return await lines(http, "/v1/responses", body)


async def messages(socket: websockets.ClientConnection, num_ends: int = 1) -> list[Any]:
    """What comes, up to so many terminal events."""
    found: list[Any] = []
    async with asyncio.timeout(30):
        while num_ends:
            found.append(json.loads(await socket.recv()))
            num_ends -= found[-1]["type"] in TERMINAL
    return found


def deltas(events: list[Any]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


async def resume(http: httpx.AsyncClient, response_id: str, *, after: int) -> list[Any]:
    query = f"?stream=true&starting_after={after}"
    text = (await http.get(f"/v1/responses/{response_id}{query}")).raise_for_status().text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
