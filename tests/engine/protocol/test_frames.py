"""Frames come out as they went in, wherever the stream was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.protocol.frames import FrameReader, framed


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 200), min_size=1))
def test_frames_survive_any_cut(frames: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(framed, frames))
    reader = FrameReader()
    seen: list[bytes] = []
    start = turn = 0
    while start < len(stream):
        size = sizes[turn % len(sizes)]
        seen += reader.feed(stream[start : start + size])
        start, turn = start + size, turn + 1
    assert seen == frames


def test_what_is_no_such_stream_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="a frame of 1195725856 bytes"):
        list(FrameReader().feed(b"GET / HTTP/1.1"))
