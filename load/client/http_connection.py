"""One HTTP/1.1 connection that posts, and hands on what comes back as it is read.

No coroutine runs per read: the event loop calls the parser, and the parser calls the reader. On
the two cores that a client shares with the server it measures, this matters. Not known here: what
a body says, and pools.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, cast

import httptools


class ResponseReader(Protocol):
    """Takes one response as it comes."""

    def head(self, status: int, content_type: str, now_s: float) -> None: ...

    def body(self, piece: bytes, now_s: float) -> None:
        """Part of the body. All that one read of the socket brings has one time."""

    def end(self, now_s: float) -> None:
        """The body is whole, or the connection was lost."""

    def malformed(self, detail: str, now_s: float) -> None:
        """It is not HTTP; the connection is closed."""


class HttpConnection(asyncio.Protocol):
    """A connection, for one request at a time.

    Attributes:
        is_reusable: it is open, and its last response was read to the end.
    """

    def __init__(self) -> None:
        self.is_reusable = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: ResponseReader | None = None
        self._content_type = ""
        self._now_s = 0.0

    def post(self, request: bytes, reader: ResponseReader) -> None:
        """Send a request, head and body."""
        assert self.is_reusable
        assert self._transport is not None, "not connected"
        self.is_reusable = False
        self._reader = reader
        self._content_type = ""
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once; the reader hears no more."""
        self.is_reusable = False
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by shape alone

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours
        except httptools.HttpParserError as error:
            reader = self._reader
            self.abort()
            if reader is not None:
                reader.malformed(f"not HTTP: {error}", self._now_s)

    def connection_lost(self, _: Exception | None) -> None:
        self.is_reusable = False
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.end(time.perf_counter())

    # -- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._reader is None:  # nobody asked
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._reader is not None:
            self._reader.head(self._parser.get_status_code(), self._content_type, self._now_s)

    def on_body(self, piece: bytes) -> None:
        if self._reader is not None:
            self._reader.body(piece, self._now_s)

    def on_message_complete(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self.is_reusable = self._parser.should_keep_alive()
            reader.end(self._now_s)


def request_of(path: str, headers: dict[str, str], body: bytes) -> bytes:
    """A POST of JSON, as bytes."""
    fields: dict[str, Any] = {
        **headers,
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
