"""Prompts of 4 MB at a real server: the memory that they needed is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from .processes import END_S, lengthen, serve, wait_until

NUM_CLIENTS = 6
TEXT = "Once upon a time. " * (4_000_000 // 18)
KEPT_BYTES = 50 << 20


async def _post_all(base_url: str, body: dict[str, Any]) -> list[int]:
    async with httpx.AsyncClient(base_url=base_url, timeout=END_S) as http:
        posts = [http.post("/v1/completions", json=body) for _ in range(NUM_CLIENTS)]
        return [response.status_code for response in await asyncio.gather(*posts)]


@pytest.mark.exhaustive
def test_memory_comes_back(tmp_path: Path) -> None:
    """Six are tokenised, as they are cut to what fits; and six are refused by their length."""
    arguments = (*lengthen(tmp_path), "--max-prompt-bytes", "8MiB")
    body = {"prompt": TEXT, "max_tokens": 1}
    with serve(*arguments, log=tmp_path / "log") as served:
        gateway = served.child("penstock-gateway")
        cut = {**body, "truncate_prompt_tokens": 16}
        small = {**cut, "prompt": "Hello"}
        assert asyncio.run(_post_all(served.base_url, small)) == [200] * NUM_CLIENTS
        before = gateway.memory_info().rss
        assert asyncio.run(_post_all(served.base_url, cut)) == [200] * NUM_CLIENTS
        assert asyncio.run(_post_all(served.base_url, body)) == [400] * NUM_CLIENTS
        wait_until(lambda: gateway.memory_info().rss < before + KEPT_BYTES)
