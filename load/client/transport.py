"""The seam between a workload and the wire."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from penstock.load.client.records import Call, StreamRecord


class Transport(Protocol):
    """Sends calls to one server and fills in what came back."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send it and read to the end.

        Whatever goes wrong is noted as a fault of the record; nothing is raised but
        cancellation, which closes the connection (that is how a client walks away).
        """
        ...
