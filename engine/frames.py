"""Frames on a byte stream: each is preceded by its length.

Known here: sizes. What is in a frame is `codec`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 28


def framed(frame: bytes) -> bytes:
    """A frame as it is written."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Cuts what one connection brings into frames."""

    def __init__(self) -> None:
        self._rest = b""  # of a frame that has not come whole

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole now; consume all of them before the next call.

        Raises:
            ValueError: this is no such stream; nothing that follows can be understood.
        """
        if self._rest:
            data = self._rest + data
        start = 0
        while (begin := start + _LENGTH.size) <= len(data):
            (size,) = _LENGTH.unpack_from(data, start)
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if begin + size > len(data):
                break
            start = begin + size
            yield data[begin:start]
        self._rest = data[start:]
