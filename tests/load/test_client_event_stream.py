"""The parser of server-sent events, fed in every way that a network can."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.load.client.sse import EventStreamParser


def _parse(*pieces: bytes) -> list[bytes]:
    parser = EventStreamParser()
    return [data for piece in pieces for data in parser.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: one\n\n", [b"one"]),
        (b"data:one\n\n", [b"one"]),
        (b"data:  one\n\n", [b" one"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
        (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
        (b"data: one\n\r\ndata: two\r\n\n", [b"one", b"two"]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b": ping\n\n: ping\n\ndata: one\n\n", [b"one"]),
        (b": note\ndata: one\n\n", [b"one"]),
        (b"event: named\nid: 7\nretry: 10\ndata: one\n\n", [b"one"]),
        (b"event: no data\n\n", []),
        (b"\n\n\ndata: one\n\n\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data\n\ndata:\n\n", [b"", b""]),
        (b"datas: one\n\n", []),
        (b"data: cut off\n", []),
        (b"data: one\n\ndata: cut off", [b"one"]),
        ("data: ½ … 🙂\n\n".encode(), ["½ … 🙂".encode()]),
    ],
)
def test_a_stream_gives_its_events_however_it_is_cut(stream: bytes, events: list[bytes]) -> None:
    assert _parse(stream) == events
    assert _parse(*(stream[at : at + 1] for at in range(len(stream)))) == events
    for at in range(len(stream)):
        assert _parse(stream[:at], stream[at:]) == events


_LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
_LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])))
_COMMENTS = st.lists(st.just(": ping"), max_size=2)


@given(
    events=st.lists(st.tuples(_COMMENTS, _LINES)),
    end=_LINE_ENDS,
    cuts=st.lists(st.integers(0, 400)),
)
def test_events_come_back_as_they_were_written(
    events: list[tuple[list[str], list[str]]], end: str, cuts: list[int]
) -> None:
    blocks = [[*comments, *(f"data: {line}" for line in lines)] for comments, lines in events]
    stream = "".join(line + end for block in blocks for line in [*block, ""]).encode()
    edges = [0, *sorted(cuts), len(stream)]
    pieces = [stream[begin:stop] for begin, stop in itertools.pairwise(edges)]
    assert _parse(*pieces) == ["\n".join(lines).encode() for _, lines in events if lines]
