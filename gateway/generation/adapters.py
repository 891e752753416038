"""The adapters (LoRA) that this server has, by name: those of the engine's command line, changed by
what was loaded and unloaded since.

The changes last as long as the server. With Redis its gateways share them. A request carries its
adapter's path and digest, so a restarted engine needs no list, and a stream keeps the adapter that
it began with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Protocol

from penstock.engine.pooling.settings import Task
from penstock.engine.request import Adapter
from penstock.gateway.auth.callers import Caller
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.served_model import ServedModel

Changes = Mapping[str, Adapter | None]  # by name; None: unloaded
REFRESH_S = 0.5  # how long another gateway may miss a change


class AdapterChanges(Protocol):
    """Where gateways share changes.

    Attributes:
        is_shared: whether other gateways write there.

    Raises:
        StoreUnavailableError: it cannot be reached.
    """

    is_shared: bool

    async def read(self) -> Changes: ...

    async def write(self, name: str, adapter: Adapter | None) -> None: ...


class MemoryChanges:
    """Changes of the adapters of a single gateway, in its memory."""

    is_shared = False

    def __init__(self) -> None:
        self._changes: dict[str, Adapter | None] = {}

    async def read(self) -> Changes:
        return dict(self._changes)

    async def write(self, name: str, adapter: Adapter | None) -> None:
        self._changes[name] = adapter


class AdapterRegistry:
    """
    Args:
        is_on: the engine takes adapters (`--enable-lora`).
        changes: shared with the server's other gateways.
    """

    def __init__(
        self, engine: EnginePool, model: ServedModel, changes: AdapterChanges, *, is_on: bool
    ) -> None:
        self.is_on = is_on
        self._engine, self._model, self._shared = engine, model, changes
        self._given: tuple[Adapter, ...] = ()  # of the engine's command line
        self._changes: Changes = {}
        self._refreshing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.is_on and self._shared.is_shared:
            self._refreshing = asyncio.create_task(self._keep_fresh())

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def of(self, caller: Caller) -> dict[str, Adapter]:
        """The adapters that a caller may use, by name."""
        found = self._all()
        if caller.adapters is None:
            return found
        return {name: each for name, each in found.items() if name in caller.adapters}

    def known(self, name: str | None) -> Adapter | None:
        """The adapter of this name, if there is one."""
        return None if name is None else self._all().get(name)

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of a name that `require` has returned; None: the base model.

        Raises:
            RequestRefusedError: 404: it was unloaded meanwhile.
        """
        found = self.known(name)
        if found is None:
            self._model.require(name)
        return found

    async def require(self, name: str | None, caller: Caller, *, task: Task | None = None) -> str:
        """The name for the answer; a request without a model name gets the base model.

        Args:
            task: what it must be able to do.

        Raises:
            RequestRefusedError: 404: there is no such model for this caller.
            InvalidRequestError: the model does something else.
        """
        if name is not None and self.is_on and name not in self._model.names:
            if name not in self.of(caller):
                await self._refresh()  # another gateway may just have loaded it
            if name in self.of(caller):
                self._model.require(None, task)
                return name
            if self.known(name) is not None:  # of other callers: not one of any names
                raise self._model.not_found(name, tuple(self.of(caller)))
        return self._model.require(name, task, others=tuple(self.of(caller)))

    async def load(self, adapter: Adapter) -> None:
        """Give a name to an adapter, in place of the one that has it. Running streams keep theirs.

        Raises:
            StoreUnavailableError: other gateways cannot be told.
        """
        await self._shared.write(adapter.name, adapter)
        self._changes = {**self._changes, adapter.name: adapter}

    async def unload(self, name: str) -> None:
        """Take an adapter's name away, and end its streams, whichever gateway has them.

        Raises:
            StoreUnavailableError: other gateways cannot be told.
        """
        await self._shared.write(name, None)
        self._changes = {**self._changes, name: None}
        self._engine.unload_adapter(name)

    def _all(self) -> dict[str, Adapter]:
        if self._engine.info is not None:
            self._given = self._engine.info.adapters
        found: dict[str, Adapter | None] = {each.name: each for each in self._given}
        found.update(self._changes)
        return {name: adapter for name, adapter in found.items() if adapter is not None}

    async def _refresh(self) -> None:
        # While the store cannot be reached, what is known counts.
        with contextlib.suppress(RequestRefusedError):
            self._changes = await self._shared.read()

    async def _keep_fresh(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH_S)
