"""Streams that do not end by themselves: a test reads as far as it wants, while it disturbs them.
Then it has the same streams begin again, undisturbed: they must begin alike, to the token.

    async with EndlessStreams(url, 12) as streams:
        await streams.grow(20)
        ...                         # kill something
        await streams.grow(20)
    await streams.check()

However slow the machine or this process is, none has ended before it was disturbed.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

import httpx

from .processes import END_S, ENDLESS_TOKENS


class EndlessStreams:
    """
    Args:
        base_url: of a server with a model by `processes.lengthen`, in fp32.
        more: of each prompt.
    """

    def __init__(self, base_url: str, num_streams: int, *, more: str = "") -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_streams)]
        self._base_url = base_url
        self._more = more
        self._reading: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> EndlessStreams:
        self._reading = [
            asyncio.create_task(self._read(number, ENDLESS_TOKENS, tokens))
            for number, tokens in enumerate(self.tokens)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def grow(self, num_tokens: int) -> None:
        """Return when each has got so many more."""
        goals = [len(tokens) + num_tokens for tokens in self.tokens]
        async with asyncio.timeout(END_S):
            while any(len(tokens) < goal for tokens, goal in zip(self.tokens, goals, strict=True)):
                for task in self._reading:
                    if task.done():
                        task.result()
                        raise AssertionError("a stream has ended")
                await asyncio.sleep(0.005)

    async def check(self) -> None:
        """Each was what it is when nothing happens."""
        expected: list[list[int]] = [[] for _ in self.tokens]
        await asyncio.gather(
            *(
                self._read(number, len(tokens), expected[number])
                for number, tokens in enumerate(self.tokens)
            )
        )
        assert self.tokens == expected

    async def _read(self, number: int, max_tokens: int, tokens: list[int]) -> None:
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": f"Tell me story {number} about a fox.{self._more}",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.9,
            "seed": number,
            "stream": True,
            "return_token_ids": True,
        }
        async with (
            httpx.AsyncClient(base_url=self._base_url, timeout=END_S) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        tokens += choice.get("token_ids") or ()
