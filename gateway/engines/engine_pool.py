"""The client of the engines: submits requests and returns their streams.

It has a link to each engine of the pool. A request goes to the engine that `routing` chooses. When
an engine dies, its streams continue in another one at once, and otherwise wait for the next
(`open_streams`). When an engine drains, its streams leave it for another one, or end there.

Engines are of one pool if their KV is the same: model, weights, types and block size. Others are
connected to, but get no request while the pool has an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import operator
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import reduce

import msgspec

from penstock.engine.errors import EngineDeadError
from penstock.engine.protocol.messages import (
    DropPrefix,
    EngineInfo,
    EngineStats,
    Message,
    UnloadAdapter,
)
from penstock.engine.request import ImageInput, Request, RequestOutput
from penstock.engine.settings.declaration import default_of
from penstock.gateway.config import GatewayConfig, KVTransfer, Routing
from penstock.gateway.engines.engine_link import EngineLink, Tls, is_remote
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.kv_transfer import Handover
from penstock.gateway.engines.open_streams import OpenStreams
from penstock.gateway.engines.routing import Router

MAX_ENGINE_DEATHS = 5
_RETURN_S = 10.0  # in which 95 % of sessions come back after a tool call
ENGINE_WAIT_S: float = default_of(GatewayConfig, "engine_wait_s")
_LOG = logging.getLogger(__name__)
_SHUTDOWN = "the server is shutting down"
_FIND_AGAIN_S = 1.5  # how long after a loss new requests wait for the engine
# Links are often lost together, as when this process was stopped: the streams of the first must
# not move to an engine whose loss is noticed next.
_MOVE_S = 0.02


class EnginePool:
    """A gateway's links to its engines.

    Args:
        addresses: the paths of the Unix sockets on which they listen; they need not exist yet.
        kv_transfer: whether the KV of streams that leave an engine is transferred.
        tls: for engines on other machines.
        max_engine_deaths: how many engines may die with a request before it fails.
        engine_wait_s: how long streams wait for an engine while there is none.

    Attributes:
        info: of an engine that takes requests; None: there is none.
        pool: names what the engines have in common, the weights among it: the same after a restart;
            empty before there was one.
        links: to the engines, in the order in which they were added.
    """

    def __init__(
        self,
        *addresses: str,
        max_engine_deaths: int = MAX_ENGINE_DEATHS,
        engine_wait_s: float = ENGINE_WAIT_S,
        routing: Routing = "prefix",
        kv_transfer: KVTransfer = "auto",
        tls: Tls | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.pool = b""
        self.links: list[EngineLink] = []
        self._tls = tls
        self._router = Router(routing)
        self._kv_transfer = kv_transfer
        self._usable: list[EngineLink] = []
        self._streams = OpenStreams(
            self._choose, max_engine_deaths=max_engine_deaths, engine_wait_s=engine_wait_s
        )
        self._engine_wait_s = engine_wait_s
        self._has_info = asyncio.Event()
        self._is_started = self._is_draining = False
        self._lost_at_s = time.monotonic()  # or there was no link yet
        self._longest_absence_s: float | None = None  # of those that have ended
        self._leaving: set[asyncio.Task[None]] = set()  # links that close
        self._moving: set[asyncio.Task[None]] = set()  # KV
        for index, address in enumerate(addresses):
            self._add(str(index), address)

    # -- public -----------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.info is not None and not self._is_draining

    @property
    def is_lost(self) -> bool:
        """Whether there was an engine and there is none now."""
        return self.info is None and any(link.num_connections for link in self.links)

    @property
    def back_in_s(self) -> float | None:
        """Seconds until there is an engine again, if that takes as long as the longest time before
        did; 0 if it takes longer. None: there is one, or there was none yet."""
        if self.info is not None or self._longest_absence_s is None:
            return None
        return max(0.0, self._lost_at_s + self._longest_absence_s - time.monotonic())

    @property
    def stats(self) -> EngineStats:
        """The newest numbers, added up over the engines; but of what waits, as much for each engine
        as the least of them has. That is what a new request meets, whatever another one says."""
        if len(self.links) == 1:
            return self.links[0].stats
        total = total_stats(link.stats for link in self.links)
        if len(self._usable) < 2:
            return total
        least = min((link.stats for link in self._usable), key=lambda each: each.num_tokens_waiting)
        return msgspec.structs.replace(
            total,
            num_requests_waiting=len(self._usable) * least.num_requests_waiting,
            num_tokens_waiting=len(self._usable) * least.num_tokens_waiting,
        )

    @property
    def num_engines(self) -> int:
        """Engines that take requests; at least 1."""
        return len(self._usable) or 1

    @property
    def since_step_s(self) -> float:
        """Seconds since the engine's last step ended or its work began; 0 while it has no work. It
        grows while a step is stuck, even if heartbeats continue. The longest of the engines'."""
        return max((link.since_step_s for link in self.links), default=0.0)

    def start(self) -> None:
        """Start connecting. Must be called in the event loop."""
        self._is_started = True
        for link in self.links:
            link.start()

    def follow(self, addresses: Collection[str]) -> None:
        """Connect to the engines on other machines at these addresses (HOST:PORT). Engines there
        that are no longer among them are given up once they do not answer."""
        known = {link.address: link for link in self.links}
        for address in addresses:
            # A path would be connected to without TLS.
            if address not in known and is_remote(address):
                self._add(address, address)
        for address in known.keys() - set(addresses):
            if is_remote(address) and known[address].info is None:
                self._give_up(known[address])

    async def drain(
        self, grace_s: float, *, hand_over: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Accept no more requests; let streams end by themselves for `grace_s`, then call
        `hand_over` and fail the rest."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._streams:  # noqa: ASYNC110  (once in a process's life)
                    await asyncio.sleep(0.05)
        if hand_over is not None:
            await hand_over()
        self._streams.fail_all(_SHUTDOWN)

    async def close(self) -> None:
        """Disconnect from the engines; open streams fail."""
        self._is_started = False
        for task in self._moving:
            task.cancel()
        await asyncio.gather(*self._moving, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links), *self._leaving)
        self.info = None
        self._usable = []
        self._streams.fail_all(_SHUTDOWN)

    async def wait_ready(self) -> EngineInfo:
        """An engine's info, as soon as there is an engine."""
        while self.info is None:
            await self._has_info.wait()
        return self.info

    async def require_info(self) -> EngineInfo:
        """An engine's info, for a new request, which waits a moment if the link was just lost: a
        gateway that was stopped for a while finds its engine again within a second.

        Raises:
            EngineDeadError: there is no engine, or this gateway accepts no more requests.
        """
        if self.info is None and not self._is_draining:
            left_s = self._lost_at_s + _FIND_AGAIN_S - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self.wait_ready()
        if self._is_draining:
            raise EngineDeadError(_SHUTDOWN)
        return self.info_for_running()

    def info_for_running(self) -> EngineInfo:
        """An engine's info, for a request that was already admitted: also during a drain.

        Raises:
            EngineDeadError: there is no engine.
        """
        if self.info is None:
            raise EngineDeadError("the engine is not available")
        return self.info

    def submit(self, request: Request, *, epoch: int = 1) -> EngineStream:
        """Queue a request for an engine. If the engine dies, another one continues the stream.

        Args:
            epoch: of the owner, where gateways take over requests from each other: the engine obeys
                the highest.

        Raises:
            EngineDeadError: there is no engine.
        """
        self.info_for_running()
        return self._streams.open(request, epoch=epoch)

    def abort(self, stream: EngineStream) -> None:
        """Stop a request; its stream yields nothing more. Does nothing if it has finished."""
        self._streams.abort(stream)

    def abort_branch(self, stream: EngineStream, index: int) -> None:
        """Stop one branch; the request continues. Outputs in flight are still delivered."""
        self._streams.abort_branch(stream, index)

    def hold(self, stream: EngineStream) -> None:
        """Have the KV of a stream that has ended in a tool call kept for a while."""
        self._streams.hold(stream, _RETURN_S)

    def drop_prefix(
        self,
        token_ids: Sequence[int],
        cache_salt: str,
        *,
        adapter: str | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> None:
        """Have the engines drop the cached KV of these tokens, except what other requests use.

        Without an engine there is nothing to drop.

        Args:
            adapter: the digest of the adapter that computed it.
            images: those of the tokens, without their files.
        """
        self._tell_all(
            DropPrefix(
                token_ids=tuple(token_ids), cache_salt=cache_salt, adapter=adapter, images=images
            )
        )

    def unload_adapter(self, name: str) -> None:
        """Have the engines end all requests for the adapters of this name."""
        self._tell_all(UnloadAdapter(name=name))

    def disconnect(self, reason: str) -> None:
        """End the current connections, because the engines are known to be gone."""
        for link in self.links:
            link.disconnect(reason)

    def _tell_all(self, message: Message) -> None:
        for link in self.links:
            if link.info is not None:
                link.post(message)

    # -- the pool ---------------------------------------------------------------------------

    def _add(self, name: str, address: str) -> None:
        link = EngineLink(name, address, self, tls=self._tls)
        self.links.append(link)
        if self._is_started:
            link.start()

    def _give_up(self, link: EngineLink) -> None:
        self.links.remove(link)
        self._streams.forget(link)
        _start(link.close(), self._leaving)
        _LOG.info("engine %s has left the pool", link.name)

    def _choose(self, stream: EngineStream) -> EngineLink | None:
        return self._router.choose(self._usable, stream)

    def _refresh(self) -> None:
        """Find the engines that take requests: those whose KV is the first one's."""
        live = [link for link in self.links if link.is_usable]
        roots = {_root(link) for link in self._usable if link.is_usable}
        if not roots and live:
            roots = {_root(live[0])}
        self._usable = [link for link in live if _root(link) in roots]
        self.info = self._usable[0].info if self._usable else None
        if len(self._usable) > 1 and self._router.needs_keys:
            for link in self._usable:
                link.want_keys()
        if self.info is None:
            self._has_info.clear()
        else:
            self.pool = _pool_of(self.info)
            self._has_info.set()

    # -- told by the links ------------------------------------------------------------------

    def engine_found(self, link: EngineLink, *, is_same: bool) -> None:
        was_absent = self.info is None
        self._refresh()
        if was_absent and self.info is not None and not is_same:
            absence_s = time.monotonic() - self._lost_at_s
            self._longest_absence_s = max(self._longest_absence_s or 0.0, absence_s)
        if link not in self._usable:
            text = "engine %s gets no requests: its model, weights, types or block size differ"
            _LOG.warning(text, link.name)
        if is_same:
            self._streams.forgive(link)
        self._streams.continue_all()

    def engine_draining(self, link: EngineLink) -> None:
        self._refresh()
        if not self._usable:
            return
        left = self._streams.leave(link)
        _LOG.info("engine %s drains; %d open streams leave it", link.name, len(left))
        moving: dict[EngineStream, tuple[EngineLink, float]] = {}
        if self._kv_transfer != "never" and link.info is not None and link.info.kv_root:
            # Those that engines may have died of enter one at a time, and bring nothing.
            for stream in left:
                target = None if stream.num_strikes else self._choose(stream)
                if target is not None:
                    moving[stream] = target, stream.prompt_cost
                    target.load.reserve(stream.prompt_cost)
        self._streams.continue_all(besides=moving)
        if moving:
            _start(self._hand_over(link, moving), self._moving)

    async def _hand_over(
        self, link: EngineLink, moving: dict[EngineStream, tuple[EngineLink, float]]
    ) -> None:
        """Move streams from an engine that drains, with their KV where that is quicker.

        Args:
            moving: where to, and what that engine's load counts for them meanwhile.
        """

        def resume(stream: EngineStream) -> None:
            target, reserved = moving.pop(stream)
            target.load.reserve(-reserved)
            self._streams.resume(stream, target if target in self._usable else None)

        handover = Handover(link, self._kv_transfer, is_waiting=self._streams.is_waiting)
        try:
            await handover.run({stream: target for stream, (target, _) in moving.items()}, resume)
        finally:
            for stream in list(moving):
                resume(stream)

    def engine_lost(self, link: EngineLink, reason: str, *, is_at_fault: bool) -> None:
        self._refresh()
        if self.info is None:
            self._lost_at_s = time.monotonic()
        num_lost = self._streams.lose_engine(link, reason, is_at_fault=is_at_fault)
        if not self._usable:
            _LOG.error(
                "lost the engine: %s; looking for the next one, for which %d open streams wait "
                "at most %.0f s",
                reason,
                len(self._streams),
                self._engine_wait_s,
            )
            return
        if link.is_draining and not num_lost:
            _LOG.info("engine %s has drained", link.name)
        else:
            text = "lost engine %s: %s; %d open streams continue in another one"
            _LOG.error(text, link.name, reason, num_lost)
        asyncio.get_running_loop().call_later(_MOVE_S, self._continue_lost)

    def _continue_lost(self) -> None:
        if self._usable:
            self._streams.continue_all()

    def deliver(self, outputs: Sequence[RequestOutput], tokens: Mapping[str, int]) -> None:
        self._streams.deliver(outputs, tokens)

    def tick(self) -> None:
        self._streams.tick()


def total_stats(each: Iterable[EngineStats]) -> EngineStats:
    """The numbers of several engines, added up."""
    return reduce(_added, each, EngineStats())


def _added(left: EngineStats, right: EngineStats) -> EngineStats:
    sums = {
        name: operator.add(getattr(left, name), getattr(right, name))
        for name in EngineStats.__struct_fields__
        if name != "num_accepted_tokens_per_pos_total"
    }
    by_pos = [left.num_accepted_tokens_per_pos_total, right.num_accepted_tokens_per_pos_total]
    most = max(map(len, by_pos))
    padded = [(*each, *[0] * (most - len(each))) for each in by_pos]
    sums["num_accepted_tokens_per_pos_total"] = tuple(map(sum, zip(*padded, strict=True)))
    return msgspec.structs.replace(left, **sums)


def _start(work: Coroutine[None, None, None], running: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)


def _pool_of(info: EngineInfo) -> bytes:
    return hashlib.sha256(info.cache_root + f" {info.max_model_len}".encode()).digest()


def _root(link: EngineLink) -> tuple[bytes, int]:
    """What engines of one pool have in common."""
    assert link.info is not None
    return link.info.cache_root, link.info.max_model_len
