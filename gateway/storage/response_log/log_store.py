"""The contract of a store of response logs, and its implementation in this process's memory.

`redis_store` implements it for many gateways: there a response has an owner, the gateway that runs
it, and another gateway takes it over if the owner dies.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from penstock.engine.settings.declaration import default_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.response_log.codec import decode_log, encode_log
from penstock.gateway.storage.response_log.log import InMemory, ResponseLog
from penstock.gateway.storage.response_log.record import ResponseHeader
from penstock.gateway.storage.tenant_shares import TenantShares

DEFAULT_TTL_S: float = default_of(GatewayConfig, "response_log_ttl_s")
_LOG_BYTES = 512  # an ended log's objects and dictionary slots, without its content
TakeOver = Callable[[ResponseLog], None]


class LogExistsError(Exception):
    """The response was started twice; the first one runs."""


class LogStore(Protocol):
    """Response logs by id."""

    async def start(
        self, take_over: TakeOver, *, can_run: Callable[[], bool] = lambda: True
    ) -> None:
        """Start the store.

        Args:
            take_over: called with the log of a response whose owner is gone and that this gateway
                owns from now on; it has all entries stored so far, and no end.
            can_run: whether this gateway could run a response now. If not, it leaves responses to
                other gateways unless none takes them over.
        """
        ...

    async def create(self, header: ResponseHeader) -> ResponseLog:
        """The log of a new response, owned by this gateway.

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
        """Have the owner stop a response (`LogOwner.cancel`) unless it has ended. Raises as
        `find`."""
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


@dataclass(frozen=True, slots=True)
class _EndedLog:
    tenant: str
    ended_s: float
    data: bytes

    @property
    def num_bytes(self) -> int:
        return _LOG_BYTES + len(self.data)


class MemoryLogStore(InMemory):
    """Logs of this process, bounded in bytes and age: the oldest ended logs are dropped first, of
    the tenant that `tenant_shares` names.

    An ended log is kept as bytes (`codec`), a tenth of the size of its objects, and is decoded
    while it is read.

    Args:
        max_bytes: of ended logs.
        ttl_s: how long after its end a log can be read.
        shares: of the tenants in all stores of this process; None: there is only this store.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf = (shares or TenantShares()).shelf(max_bytes, drop=self._drop)
        self._ttl_s = ttl_s
        self._clock = clock
        self._running: dict[str, ResponseLog] = {}
        self._ended: OrderedDict[str, _EndedLog] = OrderedDict()
        self._being_read: WeakValueDictionary[str, ResponseLog] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    async def start(
        self, take_over: TakeOver, *, can_run: Callable[[], bool] = lambda: True
    ) -> None:
        """There are no other gateways to take responses over from."""

    async def create(self, header: ResponseHeader) -> ResponseLog:
        self._drop_old()
        if header.response_id in self._running or header.response_id in self._ended:
            raise LogExistsError(header.response_id)
        log = self._running[header.response_id] = ResponseLog(header, storage=self)
        return log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        self._drop_old()
        running = self._running.get(response_id)
        if running is not None and running.header.tenant == tenant:
            return running
        ended = self._ended.get(response_id)
        if ended is not None and ended.tenant == tenant:
            return self._unpacked(response_id, ended)
        raise response_expired(response_id)

    def _unpacked(self, response_id: str, ended: _EndedLog) -> ResponseLog:
        """The decoded log, shared by all of its current readers."""
        log = self._being_read.get(response_id)
        if log is None:
            header, entries = decode_log(ended.data)
            log = self._being_read[response_id] = ResponseLog(header)
            log.entries = entries
            log.publish(len(entries))
        return log

    async def cancel(self, tenant: str, response_id: str) -> None:
        (await self.find(tenant, response_id)).cancel()

    async def delete(self, tenant: str, response_id: str) -> None:
        ended = self._ended.get(response_id)
        if ended is not None and ended.tenant == tenant:
            self._drop(response_id)

    async def hand_over(self) -> None:
        """There are no other gateways."""

    async def let_readers_end(self, limit_s: float) -> None:
        """Every response has ended here."""

    async def close(self) -> None:
        """There is nothing to close."""

    def appended(self, log: ResponseLog) -> None:
        super().appended(log)
        if log.is_ended:
            self._keep(log)

    def _keep(self, log: ResponseLog) -> None:
        header = log.header
        ended = _EndedLog(header.tenant, self._clock(), encode_log(header, log.entries))
        del self._running[header.response_id]
        self._ended[header.response_id] = ended
        self._being_read[header.response_id] = log
        self._shelf.put(header.tenant, header.response_id, ended.num_bytes)
        self._drop_old()

    def _drop_old(self) -> None:
        horizon = self._clock() - self._ttl_s
        while self._ended:
            response_id, oldest = next(iter(self._ended.items()))
            if oldest.ended_s > horizon:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._shelf.remove(self._ended.pop(response_id).tenant, response_id)
        self._being_read.pop(response_id, None)


def response_expired(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"the stream of response {response_id!r} is not available or has expired",
        code="response_expired",
        param="response_id",
        status=404,
    )
