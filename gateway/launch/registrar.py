"""Registers an engine in Redis as long as it answers: a process beside it.

Run by the supervisor of `penstock engine` as `python -m penstock.gateway.launch.registrar`. It has
a link to the engine as a gateway has, renews the engine's lease once a second, and takes the record
back when the engine drains or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.process.launch import Status, run_child
from penstock.engine.process.logs import configure_logging
from penstock.engine.request import RequestOutput
from penstock.gateway.engines.engine_link import EngineLink
from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.engines import EngineRecord, RedisEngines
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

_RENEW_S = 1.0
_LOG = logging.getLogger(__name__)


class Registrar:
    """
    Args:
        model: the first of its names in the API.
        advertised: the address for gateways.
    """

    def __init__(
        self, engines: RedisEngines, *, model: str, engine_address: str, advertised: str
    ) -> None:
        self._engines = engines
        self._model = model
        self._advertised = advertised
        self._link = EngineLink("here", engine_address, self)
        self._changed = asyncio.Event()
        self._is_registered = False

    async def run(self, stopped: asyncio.Event) -> None:
        """Until stopped."""
        self._link.start()
        try:
            while not stopped.is_set():
                await self._renew()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _RENEW_S)
        finally:
            await self._withdraw()
            await self._link.close()

    def wake(self) -> None:
        self._changed.set()

    async def _renew(self) -> None:
        info, stats = self._link.info, self._link.stats
        if info is None or not self._link.is_usable:
            await self._withdraw()
            return
        record = EngineRecord(
            address=self._advertised,
            model=self._model,
            cache_root=hashlib.sha256(info.cache_root).digest(),
            block_size=info.block_size,
            num_requests=stats.num_requests_running + stats.num_requests_waiting,
            num_tokens_waiting=stats.num_tokens_waiting,
            queue_s=stats.drain_s(stats.num_tokens_waiting),
            adapters=tuple(each.name for each in info.adapters),
        )
        # The link complains; gateways that know the engine keep it meanwhile.
        with contextlib.suppress(StoreUnavailableError, UnreadableDataError):
            await self._engines.register(record)
            self._is_registered = True

    async def _withdraw(self) -> None:
        if self._is_registered:
            with contextlib.suppress(StoreUnavailableError, UnreadableDataError):
                await self._engines.withdraw(self._advertised)
                self._is_registered = False

    # -- told by the link -------------------------------------------------------------------

    def engine_found(self, link: EngineLink, *, is_same: bool) -> None:  # noqa: ARG002
        self.wake()

    def engine_draining(self, link: EngineLink) -> None:  # noqa: ARG002
        self.wake()

    def engine_lost(self, *_: object, **__: object) -> None:
        self.wake()

    def deliver(self, outputs: Sequence[RequestOutput], tokens: Mapping[str, int]) -> None:
        """It submits nothing."""

    def tick(self) -> None:
        """It waits for nothing."""


def serve(config: Mapping[str, Any], status: Status) -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    configure_logging(config["log_level"], config["log_format"])
    address = RedisAddress.parse(config["redis_url"])
    asyncio.run(_serve(config, address, status))


async def _serve(config: Mapping[str, Any], address: RedisAddress, status: Status) -> None:
    engines = RedisEngines(RedisLink(address), config["model"])
    registrar = Registrar(
        engines,
        model=config["model"],
        engine_address=config["engine_address"],
        advertised=config["advertised"],
    )
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        registrar.wake()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    status.ready()
    await registrar.run(stopped)
    await engines.close()


if __name__ == "__main__":
    sys.exit(run_child("penstock-registrar", serve))
