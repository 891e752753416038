"""Transfers KV when streams leave an engine that drains: from its memory through this gateway to
the host tier of the engine that continues them, which then finds it as any cached prefix.

    gateway ── FetchBlocks ──► old engine ── KVBlocks ──► gateway ── KVBlocks ──► new engine

It is sent where that is quicker than to compute it: chunks to send × the measured seconds of a
chunk, against tokens ÷ the new engine's measured prefill rate. The first chunk is sent to measure
the link. Whatever fails, the stream continues and the missing part is computed.

A stream's chunks are sent in order, with at most `_WINDOW` under way, so little waits in front of
other messages; a step of the new engine is held up by no more than that many chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.protocol.messages import (
    BlocksStored,
    FetchBlocks,
    KVBlocks,
    Message,
)
from penstock.gateway.config import KVTransfer
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.routing import BlockKeys, Engine, short_key

_CHUNK_BYTES = 256 << 10
_WINDOW = 16
_ANSWER_S = 2.0  # for an engine's answer; afterwards nothing more is sent
_MAX_S = 10.0  # for all streams of an engine
_WEIGHT = 0.2  # of a new measurement in the running mean
_LOG = logging.getLogger(__name__)


class Link(Engine, Protocol):
    """The link to an engine."""

    @property
    def name(self) -> str: ...

    def post(self, message: Message) -> None: ...

    async def ask(self, message: FetchBlocks | KVBlocks) -> KVBlocks | BlocksStored:
        """The engine's answer; raises ConnectionError if the link is lost meanwhile."""
        ...


@dataclass(slots=True, eq=False)
class _Move:
    """A stream that moves, and the blocks that are to be sent.

    Attributes:
        is_sharing: others bring some of its blocks.
        chunks: those of its blocks that were sent; each says whether it arrived.
    """

    stream: EngineStream
    target: Link
    keys: Sequence[bytes]
    is_sharing: bool = False
    chunks: list[asyncio.Task[bool]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether a chunk did not arrive, so that those after it are of no use."""
        return any(chunk.done() and not chunk.result() for chunk in self.chunks)


class Handover:
    """The transfer of one engine's streams.

    Args:
        source: the engine that drains.
        is_waiting: whether a stream still waits for an engine.
    """

    def __init__(
        self, source: Link, mode: KVTransfer, *, is_waiting: Callable[[EngineStream], bool]
    ) -> None:
        self._source, self._mode, self._is_waiting = source, mode, is_waiting
        self._numbers = itertools.count(1)
        self._room = asyncio.Semaphore(_WINDOW)
        self._chunks: list[asyncio.Task[bool]] = []
        self._chunk_s: float | None = None  # measured
        self._end_s = time.monotonic() + _MAX_S
        self._is_over = False
        self._num_blocks = 0
        self._planned: dict[Link, set[bytes]] = {}  # keys, by target

    async def run(
        self, moving: Mapping[EngineStream, Link], resume: Callable[[EngineStream], None]
    ) -> None:
        """Move streams.

        Args:
            moving: the engine of each.
            resume: called for each when it should continue there.
        """
        begun_s = time.monotonic()
        finishing = []
        try:
            # Short ones first: they wait for nobody.
            for stream in sorted(moving, key=_num_tokens):
                move = self._plan(stream, moving[stream])
                await self._send(move)
                awaited = self._chunks if move.is_sharing else move.chunks
                if any(not chunk.done() for chunk in awaited):
                    finishing.append(asyncio.create_task(_finish(tuple(awaited), stream, resume)))
                else:
                    resume(stream)
            await asyncio.gather(*finishing)
        finally:
            for task in (*finishing, *self._chunks):
                task.cancel()
            self._source.post(FetchBlocks(number=0))  # it may end
        _LOG.info(
            "%d KV blocks went along from engine %s in %.2f s",
            self._num_blocks,
            self._source.name,
            time.monotonic() - begun_s,
        )

    def _plan(self, stream: EngineStream, target: Link) -> _Move:
        """The full blocks of a stream that the target lacks, and has room for."""
        source_info, info = self._source.info, target.info
        request, params = stream.request, stream.request.sampling_params
        if (
            info is None
            or source_info is None
            or info.kv_root != source_info.kv_root
            # These use no cached prefix.
            or params.prompt_logprobs is not None
            or request.pooling is not None
        ):
            return _Move(stream, target, ())
        keys = BlockKeys(info, stream).full()
        if params.num_branches > 1 or params.beam_search is not None:
            # It is computed again from its prompt on.
            keys = keys[: len(request.prompt_token_ids) // info.block_size]
        planned, known = self._planned.setdefault(target, set()), target.load.keys
        missing = [key for key in keys if key not in planned and short_key(key) not in known]
        num_free = target.stats.num_host_blocks - target.stats.num_host_blocks_kept - len(planned)
        missing = missing[: max(0, num_free)]
        is_sharing = not planned.isdisjoint(keys)
        planned.update(missing)
        return _Move(stream, target, missing, is_sharing)

    async def _send(self, move: _Move) -> None:
        """Send a stream's blocks, as long as that pays."""
        info = move.target.info
        if info is None:
            return
        size = max(1, _CHUNK_BYTES // max(1, info.num_block_bytes))
        for start in range(0, len(move.keys), size):
            await self._room.acquire()
            if not self._is_worth(move, len(move.keys) - start, size):
                self._room.release()
                return
            keys = move.keys[start : start + size]
            move.chunks.append(asyncio.create_task(self._pass_on(keys, move.target)))
            self._chunks.append(move.chunks[-1])
            if self._chunk_s is None:
                await move.chunks[-1]

    def _is_worth(self, move: _Move, num_blocks: int, chunk_size: int) -> bool:
        """Whether to send so many blocks, and not have them computed."""
        if self._is_over or time.monotonic() >= self._end_s or move.has_failed:
            return False
        if not self._is_waiting(move.stream):
            return False
        if self._mode == "always":
            return True
        info = move.target.info
        rate = move.target.stats.prefill_tokens_per_s or self._source.stats.prefill_tokens_per_s
        if info is None or not rate:
            return False
        if self._chunk_s is None:
            return True
        chunks_s = self._chunk_s * max(1.0, num_blocks / chunk_size / _WINDOW)
        return chunks_s < num_blocks * info.block_size / rate

    async def _pass_on(self, keys: Sequence[bytes], target: Link) -> bool:
        """One chunk; whether the target has all of its blocks now."""
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_S):
                fetched = await self._source.ask(
                    FetchBlocks(number=next(self._numbers), keys=tuple(keys))
                )
                assert isinstance(fetched, KVBlocks)
                if not fetched.blocks:
                    return False
                stored = await target.ask(fetched)
                assert isinstance(stored, BlocksStored)
        except (ConnectionError, TimeoutError) as error:
            self._is_over = True
            _LOG.warning("KV of engine %s stays behind: %s", self._source.name, error or "slow")
            return False
        finally:
            self._room.release()
        self._num_blocks += stored.num_blocks
        if stored.num_blocks == len(fetched.blocks) == len(keys):
            seconds = time.monotonic() - begun_s
            known = self._chunk_s
            self._chunk_s = seconds if known is None else known + _WEIGHT * (seconds - known)
            return True
        if stored.num_blocks < len(fetched.blocks):  # refused, or there is no room
            self._is_over = True
        return False


def _num_tokens(stream: EngineStream) -> int:
    return len(stream.request.prompt_token_ids) + len(stream.token_ids[0])


async def _finish(
    chunks: Collection[asyncio.Task[bool]],
    stream: EngineStream,
    resume: Callable[[EngineStream], None],
) -> None:
    await asyncio.gather(*chunks)
    resume(stream)
