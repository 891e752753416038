"""The contract of a store of response logs, and its implementation in this process's memory.

`disk_store` keeps them on this machine's disk. `redis_store` implements the contract for many
gateways: there a response has an owner, the gateway that runs it, and another gateway takes it over
if the owner dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from penstock.engine.settings.declaration import default_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.codec import decode_log, encode_log
from penstock.gateway.storage.response_log.ended_logs import EndedLogs
from penstock.gateway.storage.response_log.log import (
    IN_MEMORY,
    InMemory,
    ResponseLog,
    Storage,
    response_expired,
)
from penstock.gateway.storage.response_log.record import LogHeader
from penstock.gateway.storage.response_log.replica import Commands, Role
from penstock.gateway.storage.tenant_shares import TenantShares

DEFAULT_TTL_S: float = default_of(GatewayConfig, "response_log_ttl_s")


class LogExistsError(Exception):
    """The response was started twice; the first one runs."""


class LogStore(Protocol):
    """Response logs by id.

    Attributes:
        takeovers: logs of responses whose gateway is gone and that this one runs from now on
            (`ResponseLog.run`); they have all entries stored so far, and no end.
    """

    takeovers: asyncio.Queue[ResponseLog]

    async def start(
        self, *, can_run: Callable[[], bool] = lambda: True, pool: Callable[[], bytes] = bytes
    ) -> None:
        """Start the store.

        Args:
            can_run: whether this gateway could run a response now. If not, it leaves responses to
                other gateways unless none takes them over.
            pool: the engines that run this gateway's responses (`Outage.pool`).
        """
        ...

    async def create(self, header: LogHeader) -> ResponseLog:
        """The log of a new response, which this gateway runs.

        Raises:
            LogExistsError: there already is a log of that id.
            StoreUnavailableError: nothing can be stored now.
        """
        ...

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        """A response's log; the response may run here or elsewhere, or have ended.

        Raises:
            RequestRefusedError: 404 `response_expired`: there is no such log, or no longer, or it
                is another tenant's.
        """
        ...

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Have the gateway that runs a response stop it (`Runner.cancel`) unless it has ended.
        Raises as `find`."""
        ...

    async def steer(self, tenant: str, response_id: str, steer_id: str, text: str) -> None:
        """Have the gateway that runs a response queue a steer (`Runner.steer`), as soon as it
        hears of it. Raises as `find`.

        Raises:
            RequestRefusedError: it runs here, and takes no more steers.
        """
        ...

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete an ended log, if it exists."""
        ...

    async def hand_over(self) -> None:
        """This gateway is stopping: let others take over its responses at once."""
        ...

    async def let_readers_end(self, limit_s: float) -> None:
        """After `hand_over`: wait for this gateway's readers of responses that other gateways run.
        Those that are left after `limit_s`, or for which there is no other gateway, get 503
        `response_moved`, and so do later ones."""
        ...

    async def close(self) -> None: ...


class MemoryLogStore(InMemory):
    """Logs of this process.

    An ended log is kept as bytes (`codec`), a tenth of the size of its objects, and is decoded
    while it is read.

    Args: see `EndedLogs`.

    Attributes:
        running: ids of the responses that run.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.takeovers: asyncio.Queue[ResponseLog] = asyncio.Queue()
        self._running: dict[str, ResponseLog] = {}
        self.running: Collection[str] = self._running.keys()
        self._data: dict[str, bytes] = {}  # of ended logs
        self._ended = EndedLogs(
            max_bytes, ttl_s=ttl_s, shares=shares, clock=clock, forget=self._data.__delitem__
        )

    @property
    def num_bytes(self) -> int:
        return self._ended.num_bytes

    async def start(
        self, *, can_run: Callable[[], bool] = lambda: True, pool: Callable[[], bytes] = bytes
    ) -> None:
        """There are no other gateways to take responses over from."""

    async def create(self, header: LogHeader) -> ResponseLog:
        self._ended.drop_old()
        if header.response_id in self._running or header.response_id in self._ended:
            raise LogExistsError(header.response_id)
        log = self._running[header.response_id] = ResponseLog(header, storage=self)
        return log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        self._ended.drop_old()
        running = self._running.get(response_id)
        if running is not None and running.header.tenant == tenant:
            return running
        if self._ended.has(tenant, response_id):
            return self._unpacked(response_id)
        raise response_expired(response_id)

    def _unpacked(self, response_id: str) -> ResponseLog:
        """The decoded log, shared by all of its current readers."""
        log = self._ended.being_read.get(response_id)
        if log is None:
            log = self._ended.being_read[response_id] = unpacked(self._data[response_id])
        return log

    async def cancel(self, tenant: str, response_id: str) -> None:
        (await self.find(tenant, response_id)).cancel()

    async def steer(self, tenant: str, response_id: str, steer_id: str, text: str) -> None:
        (await self.find(tenant, response_id)).steer(steer_id, text)

    async def delete(self, tenant: str, response_id: str) -> None:
        if self._ended.has(tenant, response_id):
            self._ended.remove(response_id)
            del self._data[response_id]

    async def hand_over(self) -> None:
        """There are no other gateways."""

    async def let_readers_end(self, limit_s: float) -> None:
        """Every response has ended here."""

    async def close(self) -> None:
        """There is nothing to close."""

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        super().carry_out(log, commands)
        if commands & do.RELEASE:
            self._keep(log)

    def _keep(self, log: ResponseLog) -> None:
        header = log.header
        response_id = header.response_id
        data = self._data[response_id] = encode_log(header, log.entries)
        del self._running[response_id]
        self._ended.being_read[response_id] = log
        self._ended.add(header.tenant, response_id, len(data))


def unpacked(data: bytes, *, storage: Storage = IN_MEMORY) -> ResponseLog:
    """The log that `encode_log` encoded. Raises: UnreadableEntryError."""
    header, entries = decode_log(data)
    log = ResponseLog(header, storage=storage, role=Role.FOLLOWED)
    log.replica.load(entries)
    return log
