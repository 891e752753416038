"""Writes what a source yields to a connection, without a task that wakes for every item.

source ──► encode ──► RawWriter.write      by callbacks, while the connection has room
             └─ task: waits for room, and for the end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from penstock.gateway.http.raw_writer import RawWriter
from penstock.gateway.sources import Source

_T = TypeVar("_T")


async def pump(
    source: Source[_T], encode: Callable[[list[_T]], Iterable[bytes]], out: RawWriter
) -> None:
    """Write a source to its end.

    Args:
        encode: items that are taken together → payloads, each for one `write`.

    Raises:
        Exception: what the source, `encode` or `out` raises.
    """
    pumping = _Pump(source, encode, out)
    while not await pumping.run():
        await out.drained()


class _Pump(Generic[_T]):
    __slots__ = ("_encode", "_is_over", "_out", "_source")

    def __init__(
        self, source: Source[_T], encode: Callable[[list[_T]], Iterable[bytes]], out: RawWriter
    ) -> None:
        self._source = source
        self._encode = encode
        self._out = out
        self._is_over: asyncio.Future[bool] | None = None  # while it runs

    async def run(self) -> bool:
        """Write until the source is over (True) or the connection has no room (False)."""
        self._is_over = asyncio.get_running_loop().create_future()
        self._write()
        try:
            return await self._is_over
        finally:
            self._is_over = None  # an exception in it refers back to this object

    def _write(self) -> None:
        if self._is_over is None or self._is_over.done():
            return  # the reader has left, or waits for room
        source, write = self._source, self._out.write
        try:
            has_room = True
            while True:
                if items := source.take():
                    for payload in self._encode(items):
                        has_room = write(payload)
                if source.is_over or not has_room:
                    break
                if source.when_ready(self._write):
                    return
        except Exception as error:  # belongs to the reader, not to the code that called
            self._is_over.set_exception(error)
            return
        self._is_over.set_result(source.is_over)
