"""Server-sent events out of bytes.

Data in, data out, after the WHATWG specification. Names and ids of events are left aside: every
dialect that is read here says in the data what an event is. Not known here: sockets, JSON.
"""

from __future__ import annotations


class EventStreamParser:
    """Takes a stream in pieces, cut anywhere, and gives the data of each event that is whole."""

    __slots__ = ("_is_after_cr", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()  # of an event that is not whole yet; lines end with \n
        self._is_after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes. What a stream's end cuts off is no event."""
        if b"\r" in piece or self._is_after_cr:
            piece = self._with_plain_ends(piece)
        rest = self._rest
        if not rest and piece.endswith(b"\n\n"):  # the usual case: whole events
            return _data_of(piece[:-2])
        begin = max(len(rest) - 1, 0)  # the last byte may be half of an event's end
        rest += piece
        end = rest.rfind(b"\n\n", begin)
        if end < 0:
            return []
        whole = bytes(rest[:end])
        del rest[: end + 2]
        return _data_of(whole)

    def _with_plain_ends(self, piece: bytes) -> bytes:
        """A line may end with \\r, \\n or both, and the two may come in different pieces."""
        if self._is_after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._is_after_cr = False
        if piece:
            self._is_after_cr = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(events: bytes) -> list[bytes]:
    found = []
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: ") and b"\n" not in event:
            found.append(event[6:])
            continue
        lines = [line.partition(b":") for line in event.split(b"\n")]
        data = [value.removeprefix(b" ") for name, _, value in lines if name == b"data"]
        if data:
            found.append(b"\n".join(data))
    return found
