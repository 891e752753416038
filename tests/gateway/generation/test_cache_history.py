"""Comparisons of a prompt with an earlier one: what is kept, whose it is, what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.engine.request import Adapter, Request, SamplingParams
from penstock.gateway.generation.cache_history import (
    NO_PREDECESSOR,
    REASONS,
    CacheHistory,
    Comparison,
    Predecessor,
    predecessor,
    shape_of,
)

BLOCK = 4
MESSAGES = [
    {"role": "system", "content": "It is Friday, 27 Nov 2026, 10:15. Be kind."},
    {"role": "user", "content": "hello", "name": None},
]
LONG = tuple(range(100, 130))  # 7 whole blocks


def request(name: str, token_ids: Sequence[int] = LONG, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=1)
    known = {"tenant": "acme", "sampling_params": params}
    return Request(request_id=name, prompt_token_ids=tuple(token_ids), **known | fields)


class Told:
    """One history, and what was counted."""

    def __init__(self, **bounds: int) -> None:
        self.history = CacheHistory(**bounds)
        self.counted: list[tuple[str, int]] = []

    def made(
        self,
        asked: Request,
        before: Predecessor = NO_PREDECESSOR,
        *,
        num_cached: int = 0,
        engine: str = "a 1",
        text: str = "",
        messages: Sequence[Mapping[str, Any]] = MESSAGES,
        **parts: Any,
    ) -> dict[str, Any] | None:
        known = {"tools": None, "template": None, "parameters": {}}
        shape = shape_of(text, messages=messages, **known | parts)
        return Comparison(
            self.history,
            shape,
            before,
            block_size=BLOCK,
            prefill_tokens_per_s=lambda: 100.0,
            count=lambda reason, num: self.counted.append((reason, num)),
        ).made(asked, num_cached=num_cached, num_host_cached=num_cached // 2, engine=engine)


def test_all_was_found() -> None:
    told = Told()
    assert told.made(request("a")) is None
    assert told.made(request("b", (*LONG, 1, 2)), predecessor("a"), num_cached=28) == {
        "predecessor": "a",
        "reason": "hit",
        "cached_tokens": {"device": 14, "host": 14},
        "reusable_tokens": 28,
        "missed_tokens": 0,
        "message": None,
        "field": None,
        "seconds_lost": 0.0,
        "dropped": {},
    }
    assert told.counted == [("hit", 0)]


CHANGED = (1, *LONG[1:])  # from the first token on


@pytest.mark.parametrize(
    ("token_ids", "fields", "parts", "reason", "field"),
    [
        (LONG, {"adapter": Adapter(name="x", path="/x", digest="d")}, {}, "adapter", "model"),
        (LONG, {"cache_salt": "pepper"}, {}, "parameter", "cache_salt"),
        (LONG, {}, {"engine": "a 2"}, "other_engine", None),
        (LONG, {}, {}, "evicted", None),
        (CHANGED, {}, {"template": "x"}, "template", "chat_template"),
        (CHANGED, {}, {"tools": [{"name": "f"}]}, "tools", "tools"),
        (CHANGED, {}, {"parameters": {"effort": 1}}, "parameter", "effort"),
        (CHANGED, {}, {"text": "Today is 2026-11-27."}, "date", "chat_template"),
        (CHANGED, {}, {"text": "thoughts are gone"}, "template", "chat_template"),
    ],
)
def test_reasons(
    token_ids: Sequence[int],
    fields: dict[str, Any],
    parts: dict[str, Any],
    reason: str,
    field: str | None,
) -> None:
    told = Told()
    told.made(request("a"), text="Today is 2026-11-26.")
    parts = {"text": "Today is 2026-11-26.", **parts}
    cache = told.made(request("b", token_ids, **fields), predecessor("a"), **parts)
    assert cache is not None
    assert (cache["reason"], cache["field"], cache["message"]) == (reason, field, None)
    assert cache["missed_tokens"] == 28
    assert cache["seconds_lost"] == 0.28
    assert reason in REASONS


@pytest.mark.parametrize(
    ("number", "change", "reason", "field"),
    [
        (0, {"content": "It is Saturday, 28 Nov 2026, 9:01. Be kind."}, "date", "content"),
        (0, {"content": "It is Friday, 27 Nov 2026, 10:15. Be short."}, "system", "content"),
        (1, {"content": "goodbye"}, "messages", "content"),
        (1, {"name": "Ada"}, "messages", "name"),
        (1, {"role": "assistant"}, "messages", "role"),
    ],
)
def test_the_first_message_that_differs(
    number: int, change: dict[str, Any], reason: str, field: str
) -> None:
    told = Told()
    told.made(request("a"))
    messages = [{**each, **change} if at == number else each for at, each in enumerate(MESSAGES)]
    cache = told.made(request("b", CHANGED), predecessor("a"), messages=messages)
    assert cache is not None
    assert (cache["reason"], cache["message"], cache["field"]) == (reason, number, field)


def test_a_short_prompt_has_nothing_to_reuse() -> None:
    told = Told()
    told.made(request("a", (1, 2, 3)))
    cache = told.made(request("b", (1, 2, 3, 4, 5)), predecessor("a"))
    assert cache is not None
    assert (cache["reason"], cache["missed_tokens"]) == ("too_short", 0)


def test_series_lead_to_their_newest_request() -> None:
    told = Told()
    for name in ("a", "b"):
        told.made(request(name), predecessor(prompt_cache_key="k"))
    told.made(request("c"), predecessor(conversation_id="k"))
    cache = told.made(request("d"), predecessor(prompt_cache_key="k", conversation_id="other"))
    assert cache is not None
    assert cache["predecessor"] == "b"


def test_nobody_finds_what_is_another_tenants() -> None:
    told = Told()
    told.made(request("a"), predecessor(prompt_cache_key="k"))
    cache = told.made(request("b", tenant="other"), predecessor("a"))
    assert cache is not None
    assert (cache["reason"], cache["predecessor"]) == ("not_found", None)
    by_key = predecessor(prompt_cache_key="k")
    assert told.made(request("c", tenant="third"), by_key) is None


def test_each_tenant_has_a_bound_and_all_have_one() -> None:
    told = Told(max_tenant_bytes=10_000, max_bytes=25_000)
    for tenant in ("a", "b", "c", "d"):
        for number in range(100):
            asked = request(f"{tenant}{number}", tenant=tenant)
            told.made(asked, predecessor(prompt_cache_key=f"k{number}"))
    assert told.history.num_bytes <= 25_000
    for tenant, is_known in (("a", False), ("d", True)):
        newest = told.history.find(tenant, predecessor(f"{tenant}99"))
        assert (newest is not None) == is_known
        assert told.history.find(tenant, predecessor(f"{tenant}0")) is None
        assert told.history.find(tenant, predecessor(prompt_cache_key="k0")) is None


def test_what_is_turned_off_says_so_to_who_asks() -> None:
    def made(before: Predecessor) -> dict[str, Any] | None:
        comparison = Comparison(
            None, None, before, block_size=4, prefill_tokens_per_s=lambda: 0.0, count=print
        )
        return comparison.made(request("a"), num_cached=0, num_host_cached=0, engine="")

    assert made(predecessor(previous_id="x")) is None
    told = made(predecessor("x"))
    assert told is not None
    assert told["reason"] == "unavailable"
