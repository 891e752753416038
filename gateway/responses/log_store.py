"""The contract of a store of response logs, and the one in this process's memory.

`redis_log_store` keeps the same for many gateways: there a response has an owner, the gateway that
runs it, and another one carries it on if the owner dies.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.responses.log import ResponseLog
from penstock.gateway.responses.record import DeltaEntry, ResponseHeader

DEFAULT_TTL_S = 3600.0
_LOG_BYTES = 4096  # a log's objects, whatever it says
_ENTRY_BYTES = 256
_TOKEN_BYTES = 40
CarryOn = Callable[[ResponseLog], None]


class LogExistsError(Exception):
    """Two gateways, or one twice, began the same: the first runs it."""


class LogStore(Protocol):
    """Response logs by id."""

    async def start(self, carry_on: CarryOn) -> None:
        """Begin to work.

        Args:
            carry_on: is given the log of a response that this gateway owns from now on because
                its owner is gone; all entries stored so far are in it, and it has no end.
        """
        ...

    async def create(self, header: ResponseHeader) -> ResponseLog:
        """The log of a new response that this gateway owns.

        Raises:
            LogExistsError: there is one of that id.
            StoreUnavailableError: nothing can be stored now.
        """
        ...

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        """A response's log, running here or elsewhere, or ended.

        Raises:
            RequestRefusedError: 404 `response_expired`: there is none (any more), or it is
                another tenant's.
        """
        ...

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Have its owner stop a response (`ResponseLog.on_cancel`); an ended one is left alone.
        Raises as `find`."""
        ...

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget an ended log; one that is not there is no error."""
        ...

    async def hand_over(self) -> None:
        """This gateway goes: whoever can carries its responses on at once."""
        ...

    async def close(self) -> None: ...


class MemoryLogStore:
    """Logs of this process, bounded in bytes and age: of those that ended, the oldest go first.

    Args:
        max_bytes: of ended logs, as estimated.
        ttl_s: how long after its end a log can be read.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._logs: dict[str, ResponseLog] = {}
        self._ended: OrderedDict[str, tuple[float, int]] = OrderedDict()  # (end, bytes)
        self.num_bytes = 0

    async def start(self, carry_on: CarryOn) -> None:
        """Nobody else's responses can come here."""

    async def create(self, header: ResponseHeader) -> ResponseLog:
        self._drop_old()
        if header.response_id in self._logs:
            raise LogExistsError(header.response_id)
        log = self._logs[header.response_id] = ResponseLog(header, storage=self)
        return log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        self._drop_old()
        log = self._logs.get(response_id)
        if log is None or log.header.tenant != tenant:
            raise response_expired(response_id)
        return log

    async def cancel(self, tenant: str, response_id: str) -> None:
        (await self.find(tenant, response_id)).cancel()

    async def delete(self, tenant: str, response_id: str) -> None:
        log = self._logs.get(response_id)
        if log is not None and log.header.tenant == tenant and log.is_ended:
            self._drop(response_id)

    async def hand_over(self) -> None:
        """There is nobody to take them."""

    async def close(self) -> None:
        """Memory goes with the process."""

    def appended(self, log: ResponseLog) -> None:
        log.publish(len(log.entries))
        if log.is_ended:
            num_bytes = _num_bytes(log)
            self._ended[log.header.response_id] = (self._clock(), num_bytes)
            self.num_bytes += num_bytes
            self._drop_old()

    def _drop_old(self) -> None:
        horizon = self._clock() - self._ttl_s
        while self._ended:
            response_id, (ended, _) = next(iter(self._ended.items()))
            if self.num_bytes <= self._max_bytes and ended > horizon:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        _, num_bytes = self._ended.pop(response_id)
        self.num_bytes -= num_bytes
        del self._logs[response_id]


def response_expired(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"no stream of a response {response_id!r} is kept here (any more)",
        code="response_expired",
        param="response_id",
        status=404,
    )


def _num_bytes(log: ResponseLog) -> int:
    texts = sum(len(entry.text) for entry in log.entries if isinstance(entry, DeltaEntry))
    num_tokens = len(log.header.request.prompt_token_ids) + len(log.token_ids)
    items = sum(len(str(item)) for item in log.header.input_items)
    return (
        _LOG_BYTES + 2 * texts + items + _TOKEN_BYTES * num_tokens + _ENTRY_BYTES * len(log.entries)
    )
