"""The browser library in Node: the cases of `tests/clients/node/library.mjs`, against a real server
and a proxy before it that cuts every connection when the suite tells it to."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ..support.stream_server import stream_server
from ..support.toxic_proxy import ToxicProxy
from .processes import Served

SUITE = Path(__file__).parents[1] / "clients" / "node" / "library.mjs"
_REFUSES_S = 0.3  # after a cut

pytestmark = pytest.mark.node


@asynccontextmanager
async def _control(proxy: ToxicProxy) -> AsyncIterator[str]:
    """Where a POST to `/cut` resets all connections of the proxy, and has it refuse others for a
    while; one to `/silence` makes it swallow what the server sends, until a cut."""

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\r\n\r\n")
        if line.startswith(b"POST /silence"):
            proxy.downstream.is_black_hole = True
        else:
            proxy.downstream.is_black_hole = False
            proxy.refuse()
            proxy.reset_all()
            asyncio.get_running_loop().call_later(_REFUSES_S, proxy.accept)
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")

    async with stream_server(obey) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.exhaustive
async def test_the_library_in_node(demo_server: Served) -> None:
    node = shutil.which("node") or pytest.skip("node is not installed")
    address = urlsplit(demo_server.base_url)
    async with (
        ToxicProxy(address.hostname or "", address.port or 0) as proxy,
        _control(proxy) as control,
    ):
        process = await asyncio.create_subprocess_exec(
            node,
            "--test-reporter=tap",
            "--test",
            str(SUITE),
            env={
                "PENSTOCK_URL": demo_server.base_url,
                "PENSTOCK_CUT_URL": f"http://127.0.0.1:{proxy.port}",
                "PENSTOCK_CONTROL_URL": control,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await asyncio.wait_for(process.communicate(), timeout=280)
    assert process.returncode == 0, told.decode()
    assert b"# pass 23" in told
