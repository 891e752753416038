"""A real Redis that is far away: a TCP proxy that passes on every byte, some time later."""

from __future__ import annotations

import asyncio
import contextlib


class DelayingProxy:
    """Use it as an async context manager.

    Args:
        delay_s: of each direction, and of connecting.
    """

    def __init__(self, port: int, *, delay_s: float) -> None:
        self.port = 0
        self.delay_s = delay_s
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> DelayingProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        copying: list[asyncio.Task[None]] = []
        try:
            await asyncio.sleep(2 * self.delay_s)  # of the handshake
            there, upstream = await asyncio.open_connection("127.0.0.1", self._to)
            ends.append(upstream)
            copying = [
                asyncio.create_task(self._copy(*pair))
                for pair in ((reader, upstream), (there, writer))
            ]
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in copying:
                each.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
            for end in ends:
                end.close()
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each piece at its own time, so that the distance costs no bandwidth."""
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(self.delay_s, _write, writer, data)
        await asyncio.sleep(self.delay_s)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
