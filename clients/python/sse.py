"""Parses server-sent events from bytes in chunks of any size (WHATWG HTML, §9.2.6)."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from typing import NamedTuple

_LINE_END = re.compile(r"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    """One event; comments are not events."""

    event: str
    data: str


class SseParser:
    """Parses a stream's bytes. An incomplete block at the end is not an event."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8-sig")(errors="replace")
        self._pending = ""  # an incomplete line
        self._ended_with_cr = False  # a \n that follows belongs to the same line end
        self._event = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that end within `data`."""
        new = self._decoder.decode(data)
        if new and self._ended_with_cr:
            self._ended_with_cr = False
            new = new.removeprefix("\n")
        text = self._pending + new
        found: list[ServerSentEvent] = []
        start = 0
        for end in _LINE_END.finditer(text):
            self._ended_with_cr = end.group() == "\r" and end.end() == len(text)
            self._take(text[start : end.start()], found)
            start = end.end()
        self._pending = text[start:]
        return found

    def _take(self, line: str, found: list[ServerSentEvent]) -> None:
        if not line:
            if self._data:
                found.append(ServerSentEvent(self._event or "message", "\n".join(self._data)))
            self._event, self._data = "", []
            return
        name, _, value = line.partition(":")  # a comment's name is empty
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
