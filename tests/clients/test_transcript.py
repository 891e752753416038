"""The turns of a conversation in the terminal."""

from __future__ import annotations

from penstock.clients.python.transcript import Transcript


def test_a_transcript_is_a_tree() -> None:
    told = Transcript()
    told.add("one", "1", response_id="a", parent=None)
    told.add("two", "2", response_id="b", parent=told.head)
    told.go_to(1)
    told.add("two again", "2'", response_id="c", parent=told.head)
    assert [turn.response_id for turn in told.path()] == ["a", "c"]
    told.go_to(0)
    assert told.path() == []
    assert list(told.outline()) == ["   1  one", "   2  two", "   3  two again (after 1)"]
