"""A connection to the engine on the event loop: frames are handed over as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from penstock.engine.frames import FrameReader, framed


class EngineSocket(asyncio.Protocol):
    """Made by `connect`.

    Attributes:
        disconnected: set once the connection is lost; all that came before was handed over.
    """

    def __init__(self, on_frame: Callable[[bytes], None]) -> None:
        self.disconnected = asyncio.Event()
        self._on_frame = on_frame
        self._frames = FrameReader()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def connect(cls, address: str, on_frame: Callable[[bytes], None]) -> EngineSocket:
        """Args:
            address: path of the Unix socket at which the engine listens.
            on_frame: is called with every frame.

        Raises:
            OSError: nobody listens there.
        """
        loop = asyncio.get_running_loop()
        _, connected = await loop.create_unix_connection(lambda: cls(on_frame), address)
        return connected

    async def send(self, frame: bytes) -> None:
        """Returns as soon as there is room for the next."""
        self.write(frame)
        await self._has_room.wait()

    def write(self, frame: bytes) -> None:
        """Waits for nobody; `close` sends it still."""
        self._transport.write(framed(frame))

    def close(self) -> None:
        self._transport.close()

    # -- called by the event loop -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except ValueError:  # this is no engine
            self._transport.abort()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.disconnected.set()
