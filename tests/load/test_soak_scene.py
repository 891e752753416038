"""The slow line of a soak: all comes through, late, and the end of either side is passed on."""

from __future__ import annotations

import asyncio
import time

from penstock.load.client.records import Address
from penstock.load.soak.scene import slow_line

NUM_BYTES = 16_000


async def test_what_comes_back_is_slow_and_ends_are_passed_on() -> None:
    heard, has_left = [], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b"x" * NUM_BYTES)
        await reader.read()
        has_left.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with slow_line(Address.parse(f"http://127.0.0.1:{port}")) as slow_port:
            reader, writer = await asyncio.open_connection("127.0.0.1", slow_port)
            began_s = time.perf_counter()
            writer.write(b"give\n")
            assert await reader.readexactly(NUM_BYTES) == b"x" * NUM_BYTES
            assert time.perf_counter() - began_s > 0.3  # of half a second
            writer.close()
            async with asyncio.timeout(30):
                await has_left.wait()
    assert heard == [b"give\n"]
