"""The store of responses: paths, bounds, and who is dropped first."""

from __future__ import annotations

from array import array

import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.sessions import SessionStore, StoredResponse


def turn(
    response_id: str, parent_id: str | None = None, text: str | None = "answer"
) -> StoredResponse:
    return StoredResponse(
        response_id=response_id,
        parent_id=parent_id,
        items=({"role": "user", "content": f"ask {response_id}"},),
        output_text=text,
        prompt_token_ids=array("I", [3, 4, 5]),
        output_token_ids=array("I", [1, 2]),
        cache_salt="",
        body=b"{}",
    )


def test_history_is_the_path_to_the_root() -> None:
    store = SessionStore(1 << 20)
    store.put(turn("a"))
    store.put(turn("b", "a"))
    store.put(turn("c", "a"))
    contents = [message["content"] for message in store.history("c")]
    assert contents == ["ask a", "answer", "ask c", "answer"]
    store.delete("a")
    with pytest.raises(RequestRefusedError) as caught:
        store.history("c")
    assert caught.value.code == "previous_response_not_found"


def test_a_turn_without_an_answer_adds_its_items_alone() -> None:
    store = SessionStore(1 << 20)
    store.put(turn("a", text=None))
    store.put(turn("b", "a"))
    contents = [message["content"] for message in store.history("b")]
    assert contents == ["ask a", "ask b", "answer"]


def test_long_prompts_count() -> None:
    short, long = turn("a"), turn("a")
    long.prompt_token_ids.extend(range(10_000))
    assert long.num_bytes - short.num_bytes >= 40_000


def test_bytes_are_bounded_and_the_least_used_go_first() -> None:
    store = SessionStore(100 * turn("x", text="y" * 5000).num_bytes)
    for number in range(99):
        store.put(turn(f"r{number}", text="y" * 5000))
    store.history("r0")  # in use again
    for number in range(99, 150):
        store.put(turn(f"r{number}", text="y" * 5000))
    assert "r0" in store
    assert "r1" not in store
    assert "r149" in store
    assert 0 < store.num_bytes <= 100 * turn("x", text="y" * 5000).num_bytes
    for number in range(150):
        if f"r{number}" in store:
            store.delete(f"r{number}")
    assert store.num_bytes == 0


def test_one_that_is_larger_than_the_store_is_not_kept() -> None:
    store = SessionStore(5000)
    store.put(turn("big", text="y" * 10_000))
    assert "big" not in store
    assert store.num_bytes == 0
