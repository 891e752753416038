"""The step: plan a batch, submit it to the device, process the result of an earlier one.

    handle = executor.submit(scheduler.schedule())
    ...
    scheduler.update(batch, handle.result())

Joins policy and device, which never import each other; `Executor` is the interface. Up to
`max_steps_in_flight` batches are on the device at once; with one, a step is plan, compute, update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks.lasting_pool import Taken
from penstock.engine.blocks.prefix_cache import CachedBlock
from penstock.engine.config import LoraConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import Quarantine
from penstock.engine.preparation.preparation_queue import PreparationQueue
from penstock.engine.preparation.resources import (
    AdapterResources,
    Adapters,
    GrammarResources,
    Grammars,
    ImageResources,
    Images,
    VocabularyResources,
)
from penstock.engine.request import ImageInput, Request, RequestOutput
from penstock.engine.scheduling import Scheduler


class Handle(Protocol):
    """A step that was submitted."""

    def result(self) -> BatchResult:
        """Wait for the step and return what it sampled; raises what the step raised."""
        ...


class BlockBytes(Protocol):
    """Whole KV blocks as bytes, between steps.

    Attributes:
        num_block_bytes: of a block; 0 if there is no such access.
    """

    num_block_bytes: int

    def read(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> list[bytes]:
        """The bytes of blocks, those on the device first, as all steps so far leave them."""
        ...

    def write(self, host_id: int, data: bytes) -> None:
        """Replace a host block's bytes, for all steps from now on."""
        ...


class Executor(Protocol):
    """The device or devices: runs batches in the order they are submitted.

    Attributes:
        wake: called, in another thread, when no step can run any more.
    """

    wake: Callable[[], None]

    def submit(self, batch: Batch) -> Handle:
        """Hand a batch over; it may still be running on return."""
        ...

    def check(self) -> None:
        """Raise `EngineDeadError` if no step can run any more."""
        ...

    def num_parts_done(self) -> int:
        """Parts of all steps that are done, as far as the device counts them; thread-safe."""
        ...

    def describe(self) -> str:
        """The device's state in words, for the log when a step hangs."""
        ...

    @property
    def grammars(self) -> Grammars:
        """The grammars that its sequences may have."""
        ...

    @property
    def adapters(self) -> Adapters:
        """The adapters that its sequences may have."""
        ...

    @property
    def block_bytes(self) -> BlockBytes:
        """Access to blocks for other engines."""
        ...

    def close(self) -> None:
        """Release the device. Nothing may be submitted afterwards."""
        ...


class EngineCore:
    """Requests in, outputs out, one iteration at a time.

    Args:
        quarantine: of adapters whose reading has ended engines.
        images: encodes the images of prompts; None: the model takes none.
        max_image_bytes: of their features that are kept.

    Attributes:
        grammars, adapters, images: what requests may need.
        preparation: where they wait for it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        max_steps_in_flight: int = 1,
        lora: LoraConfig | None = None,
        quarantine: Quarantine | None = None,
        images: Images | None = None,
        max_image_bytes: int = 0,
    ) -> None:
        lora = lora or LoraConfig()
        self.scheduler = scheduler
        self.grammars = GrammarResources(executor.grammars)
        self.adapters = AdapterResources(
            executor.adapters,
            max_loras=lora.num_at_once,
            max_cpu_loras=lora.max_cpu_loras or lora.num_at_once,
            quarantine=quarantine,
        )
        self.images = ImageResources(images, max_bytes=max_image_bytes)
        vocabulary = VocabularyResources(executor.grammars)
        kinds = (self.grammars, vocabulary, self.adapters, self.images)
        self.preparation = PreparationQueue(kinds, scheduler)
        self._executor = executor
        self._max_steps_in_flight = max_steps_in_flight
        self._records = scheduler.blocks.tiers.records
        self._in_flight: deque[tuple[Batch, Handle, Taken]] = deque()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have this called, in another thread, when a step has something to do or to say though no
        request has come: what it waits for has been loaded, or a rank has ended."""
        self.preparation.wake = self._executor.wake = wake

    def add(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. What it
        needs is loaded beside the steps; its outputs say if that cannot be used."""
        needs = self.preparation.needs(request)
        if needs:
            self.scheduler.check(request)
            self.preparation.add(request, needs)
        else:
            self.scheduler.add(request)

    def unload_adapter(self, name: str) -> None:
        """End all requests for the adapters of this name."""
        self.preparation.end(
            lambda request: request.adapter is not None and request.adapter.name == name,
            InvalidRequestError(f"the adapter {name!r} was unloaded", param="model"),
        )

    def abort(self, request_id: str, *, index: int | None = None) -> None:
        """Drop a request, or one of its samples. Its blocks are free at once; unknown ids are
        ignored."""
        if not self.preparation.abort(request_id, index=index):
            self.scheduler.abort(request_id, index=index)

    def has_request(self, request_id: str) -> bool:
        return self.preparation.has_request(request_id) or self.scheduler.has_request(request_id)

    def hold(self, request_id: str, return_s: float) -> None:
        """Keep for a while what a request left that has ended (`Scheduler.hold`)."""
        self.scheduler.hold(request_id, return_s)

    def drop_prefix(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> int:
        """Forget the cached KV of these tokens, except blocks that are in use, and the outputs kept
        for drafts; the number of blocks forgotten.

        Args:
            adapter: the digest of the adapter that computed them.
            images: those of the tokens.
        """
        self.scheduler.drafting.drop_prefix(token_ids, cache_salt=cache_salt)
        return self.scheduler.blocks.drop_prefix(
            token_ids, cache_salt=cache_salt, adapter=adapter, images=images
        )

    def read_blocks(self, keys: Sequence[bytes]) -> list[tuple[CachedBlock, bytes]]:
        """Cached full blocks and their bytes, up to the first key that is not cached."""
        blocks = self.scheduler.blocks.find_blocks(keys)
        on_device = [each.device_id for each in blocks if each.device_id is not None]
        on_host = [each for each in blocks if each.device_id is None]
        host_ids = [each.host_id for each in on_host if each.host_id is not None]
        data = self._executor.block_bytes.read(on_device, host_ids)
        from_device, from_host = iter(data[: len(on_device)]), iter(data[len(on_device) :])
        return [
            (each, next(from_host if each.device_id is None else from_device)) for each in blocks
        ]

    def store_block(self, parent: bytes, tokens: bytes, key: bytes, data: bytes) -> bool:
        """Keep another engine's full block in the host tier, for those who look for its prefix;
        False if there is no room.

        Args:
            parent, tokens, key: as in `CachedBlock`.

        Raises:
            ValueError: it is not a block of this engine's.
        """
        block_bytes = self._executor.block_bytes
        if len(data) != block_bytes.num_block_bytes:
            expected = f"{block_bytes.num_block_bytes:,} bytes"
            raise ValueError(f"a block has {len(data):,} bytes instead of {expected}")
        host_id = self.scheduler.blocks.insert_remote_block(parent, tokens, key)
        if host_id is not None and host_id >= 0:
            block_bytes.write(host_id, data)
        return host_id is not None

    def has_work(self) -> bool:
        if self._in_flight or self.scheduler.has_work():
            return True
        return self.preparation.has_work

    def wait(self) -> bool:
        """Wait until there is something to do, for those that have nothing else to wait for;
        whether any request is left."""
        while not self.has_work():
            if not len(self.preparation):
                return False
            self.preparation.wait()
        return True

    def step(self) -> list[RequestOutput]:
        """Keep the device busy and return the outputs of the oldest step in flight."""
        self._executor.check()
        refused = self.preparation.admit() if self.preparation.has_work else []
        while len(self._in_flight) < self._max_steps_in_flight:
            batch = self.scheduler.schedule()
            if not (batch.scheduled or batch.left_seq_ids or batch.moves):
                break  # every sequence waits for a step in flight
            published = [] if self._records is None else self._records.take()
            self._in_flight.append((batch, self._executor.submit(batch), published))
        if not self._in_flight:
            return refused
        batch, handle, published = self._in_flight.popleft()
        outputs = self.scheduler.update(batch, handle.result())
        if published and self._records is not None:
            self._records.record(published)  # not before the update, which drops invalid ones
        return refused + outputs

    def num_parts_done(self) -> int:
        """Parts of all steps that are done, as far as the device counts them; thread-safe."""
        return self._executor.num_parts_done()

    def describe(self) -> str:
        """The device's state in words, for the log when a step hangs."""
        return self._executor.describe()

    def close(self) -> None:
        self._in_flight.clear()
        self.preparation.close()
        self._executor.close()
