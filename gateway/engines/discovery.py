"""Keeps a gateway's pool up to date with the engines on other machines.

They are found by name (`--engine`), as a headless service in Kubernetes has one for all its pods,
and in Redis, where they register (`--discover`). While neither answers, what is known stays.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

from penstock.gateway.engines.engine_pool import EnginePool

LOOK_INTERVAL_S = 1.0
_LOG = logging.getLogger(__name__)
Find = Callable[[], Awaitable[Collection[str]]]


class Discovery:
    """
    Args:
        finds: each finds engines, as HOST:PORT, and raises an error where it cannot.
    """

    def __init__(self, client: EnginePool, finds: Sequence[Find]) -> None:
        self._client = client
        self._finds = finds
        self._found: list[Collection[str]] = [() for _ in finds]
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._finds:
            self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def look(self) -> None:
        """Look once."""
        found = await asyncio.gather(*(find() for find in self._finds), return_exceptions=True)
        for index, addresses in enumerate(found):
            if isinstance(addresses, BaseException):
                _LOG.debug("cannot look for engines: %s", addresses)
            else:
                self._found[index] = addresses
        self._client.follow({address for each in self._found for address in each})

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)


async def resolve(endpoint: str) -> Collection[str]:
    """The addresses that HOST:PORT stands for.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    host, _, port = endpoint.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }
