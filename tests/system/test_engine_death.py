"""A step that does not end: the engine is ended, and each stream is what it would have been, to the
token."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from . import stuck_engine
from .processes import Served, metrics, serve, wait_until

pytestmark = pytest.mark.process_kills

_BACK_S = 90.0  # a start on a machine that does much else
_COMMON = {
    "model": "demo",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 120,
    "min_tokens": 100,
}
_CHAT = {**_COMMON, "messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
_SEEDED = {
    "temperature": 0.9,
    "seed": 7,
    "top_p": 0.95,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
}
_ROWS = {
    "type": "array",
    "items": {"type": ["integer", "string", "null"], "maxLength": 9},
    "minItems": 36,
    "maxItems": 36,
}
_TABLE = {"type": "json_schema", "json_schema": {"name": "table", "schema": _ROWS}}
_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": ("chat/completions", {**_CHAT, "temperature": 0, "logprobs": True}),
    "seeded chat": ("chat/completions", {**_CHAT, **_SEEDED, "logprobs": True, "top_logprobs": 2}),
    "chat with n": ("chat/completions", {**_CHAT, **_SEEDED, "n": 2}),
    "JSON with n": (
        "chat/completions",
        {**_CHAT, **_SEEDED, "n": 2, "response_format": _TABLE, "max_tokens": 500},
    ),
    "completion": (
        "completions",
        {**_COMMON, **_SEEDED, "prompt": "Once upon a time", "logit_bias": {"300": 1.5}},
    ),
}


@dataclass
class Choice:
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Stream:
    choices: dict[int, Choice] = field(default_factory=dict)
    usages: list[dict[str, Any]] = field(default_factory=list)
    num_chunks: int = 0

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.num_chunks += 1
        for piece in chunk["choices"]:
            choice = self.choices.setdefault(piece["index"], Choice())
            delta = piece.get("delta") or {"content": piece.get("text")}
            choice.text += delta.get("content") or ""
            logprobs = (piece.get("logprobs") or {}).get("content") or []
            choice.tokens += [entry["token"] for entry in logprobs]
            if piece["finish_reason"] is not None:
                choice.finish_reasons.append(piece["finish_reason"])
        if chunk.get("usage") is not None:
            chunk["usage"].pop("prompt_tokens_details", None)  # depends on who came before
            self.usages.append(chunk["usage"])


async def _read(
    client: httpx.AsyncClient, name: str, on_chunk: Callable[[Stream], None] = lambda _: None
) -> Stream:
    path, body = _BODIES[name]
    stream = Stream()
    async with client.stream("POST", f"/v1/{path}", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [""]
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line)
                if line != "data: [DONE]":
                    stream.take(json.loads(line.removeprefix("data: ")))
                    on_chunk(stream)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return stream


def _contents(stream: Stream) -> tuple[Any, ...]:
    return {index: stream.choices[index] for index in sorted(stream.choices)}, stream.usages


async def _disturbed(
    client: httpx.AsyncClient, cut: int, strike: Callable[[], object]
) -> dict[str, Stream]:
    """All streams at once; the engine is struck when the first has got `cut` chunks."""
    num_strikes = 0

    def look(stream: Stream) -> None:
        nonlocal num_strikes
        if stream.num_chunks == cut and not num_strikes:
            num_strikes += 1
            strike()

    streams = await asyncio.gather(*(_read(client, name, look) for name in _BODIES))
    assert num_strikes == 1
    return dict(zip(_BODIES, streams, strict=True))


def _engine(served: Served) -> psutil.Process:
    return served.child("penstock-engine")


def _num_back(served: Served) -> int:
    return served.log.read_text().count("the engine is back")


@dataclass
class Seen:
    """What the endpoints said, from before the engine was struck until it was back."""

    statuses: set[tuple[str, int]] = field(default_factory=set)
    engine_up: set[float] = field(default_factory=set)
    longest_s: float = 0.0

    async def look(self, client: httpx.AsyncClient) -> None:
        names = ("engine_up", "engine_seconds_since_last_step")
        while True:
            for path in ("/health", "/ready"):
                self.statuses.add((path, (await client.get(path)).status_code))
            is_up, since_s = await metrics(client, *names)
            self.engine_up.add(is_up)
            self.longest_s = max(self.longest_s, since_s)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("hang", "timeout_s"),
    [
        (stuck_engine.WAITS, 3),
        (stuck_engine.HOLDS_LOCK, 5),  # the supervisor notices that no sooner
    ],
)
@pytest.mark.exhaustive
async def test_an_engine_whose_step_does_not_end_is_ended_and_streams_go_on(
    hang: str, timeout_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stuck_engine.FOLDER, str(tmp_path))
    command = (sys.executable, "-m", stuck_engine.__name__)
    flags = ("--dtype", "float32", "--step-timeout-s", f"{timeout_s}")
    with serve(*flags, log=tmp_path / "log", command=command) as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=_BACK_S) as client:
            expected = {name: _contents(await _read(client, name)) for name in _BODIES}
            for choices, usages in expected.values():
                assert all(len(choice.finish_reasons) == 1 for choice in choices.values())
                assert len(usages) == 1
                assert usages[0]["completion_tokens"] >= 100 * len(choices)
            engine, seen = _engine(served), Seen()
            looking = asyncio.create_task(seen.look(client))
            streams = await _disturbed(client, 20, (tmp_path / hang).touch)
            assert {name: _contents(stream) for name, stream in streams.items()} == expected
            # Had the engine all tokens before the client had read 20 chunks, this step hangs.
            assert _contents(await _read(client, "completion")) == expected["completion"]
            looking.cancel()
        await asyncio.to_thread(wait_until, lambda: _num_back(served) == 1)
        assert not engine.is_running()
        assert _engine(served).pid != engine.pid
        assert {("/health", 503), ("/ready", 503)} <= seen.statuses
        assert seen.engine_up == {0, 1}
        assert seen.longest_s > 1
        log = served.log.read_text()
        assert f"in {stuck_engine.HANGS[hang].__name__}" in log, "the stack of who hangs"
        if hang == stuck_engine.HOLDS_LOCK:
            assert f"the engine has given no sign of life for {timeout_s} s" in log
            assert "penstock: the engine died (SIGKILL); restarting\n" in log
        else:
            assert f"no step has ended for {timeout_s} s while requests run" in log
            assert "CPU pool: job " in log
            assert "penstock: the engine died (exit code 70: a step did not end); restart" in log
