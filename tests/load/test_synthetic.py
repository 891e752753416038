"""The synthetic server over HTTP: real processes, real sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.load.launch import Started


async def lines(http: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    """The data of each event of a stream, JSON parsed where it is some."""
    text = (await http.post(path, json={"stream": True, **body})).raise_for_status().text
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) if data.startswith("{") else data for data in found]


@pytest.mark.exhaustive
async def test_the_events_are_those_of_our_server(http: httpx.AsyncClient, demo: Started) -> None:
    """Kind by kind and field by field, as far as the synthetic server tells."""
    ours: dict[str, list[Any]] = {}
    asked = [{"role": "user", "content": "hi"}]
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    bodies = {
        "/v1/responses": {"input": asked, "max_output_tokens": 6, "ignore_eos": True},
        "/v1/chat/completions": {"messages": asked, "max_tokens": 6, "ignore_eos": True, **usage},
        "/v1/completions": {"prompt": "hi", "max_tokens": 6, "ignore_eos": True, **usage},
    }
    async with httpx.AsyncClient(base_url=demo.base_url, timeout=60) as real:
        for path, body in bodies.items():
            ours[path] = await lines(real, path, body)
    for path, body in bodies.items():
        copied = await lines(http, path, body)
        assert _shape(copied) == _shape(ours[path]), path


def _shape(events: list[Any]) -> list[Any]:
    """Events without their values, equal ones that follow each other once."""
    shapes: list[Any] = []
    for event in events:
        shape = event
        if isinstance(event, dict):
            untold = ("response", "penstock")
            shape = {name: _nature(value) for name, value in event.items() if name not in untold}
            response = event.get("response", {})
            shape |= {f"response.{k}": _nature(response[k]) for k in ("status", "output", "usage")
                      if k in response}  # fmt: skip
            shape["kind"] = event.get("type")
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    return shapes


def _nature(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nature(item) for name, item in value.items() if name != "cache_write_tokens"}
    if isinstance(value, list):
        return [_nature(item) for item in value]
    return value if value in ("incomplete", "in_progress", "length") else type(value).__name__
