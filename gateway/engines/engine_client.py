"""The client of the engine: submits requests and returns their streams.

A connection to the engine is one *life*. It begins with `Hello` and `EngineInfo`, and ends when the
connection is lost, the engine sends `Failure`, is silent for too long or loses a frame, or when
`mark_dead` is called. The client then connects again, so it finds a restarted engine by itself,
which continues the open streams (`open_streams`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import cast

import msgspec

from penstock.engine.errors import EngineDeadError
from penstock.engine.request import Request
from penstock.engine.transport.frames import FrameReader, decode, encode, framed
from penstock.engine.transport.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_SILENT_BEATS,
    SILENCE_LIMIT_S,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    UnloadAdapter,
)
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.open_streams import OpenStreams

MAX_ENGINE_LIVES = 5
ENGINE_WAIT_S = 60.0
_LOG = logging.getLogger(__name__)
_SHUTDOWN = "the server is shutting down"
_RETRY_S = 0.05  # while no engine listens
_FIND_AGAIN_S = 1.5  # how long after a loss new requests wait for the engine
# Stats that are reset when an engine dies: all but the counters and the sizes of its pools.
_GAUGES = tuple(
    field.name
    for field in msgspec.structs.fields(EngineStats)
    if not field.name.endswith("_total") and field.name not in ("num_blocks", "num_host_blocks")
)


class EngineClient:
    """A gateway's link to one engine.

    Args:
        address: path of the Unix socket on which the engine listens; it need not exist yet.
        max_engine_lives: how many engines may die with a request before it fails.
        engine_wait_s: how long the streams of a dead engine wait for the next one.
    """

    def __init__(
        self,
        address: str,
        *,
        max_engine_lives: int = MAX_ENGINE_LIVES,
        engine_wait_s: float = ENGINE_WAIT_S,
    ) -> None:
        self.stats = EngineStats()
        self.info: EngineInfo | None = None  # None while there is no engine
        self._address = address
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._streams = OpenStreams(
            lambda message: self._outbox.put_nowait(message),
            max_engine_lives=max_engine_lives,
            engine_wait_s=engine_wait_s,
        )
        self._engine_wait_s = engine_wait_s
        self._has_info = asyncio.Event()
        self._death: asyncio.Future[str] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_draining = False
        self._lost_at_s = time.monotonic()  # or there was no link yet
        self._num_lives = 0
        self._engine_pid = 0  # of the last engine that answered
        self._num_silent_beats = 0
        self._num_steps = 0
        self._last_step_s: float | None = None  # the engine's, for any gateway; None: no work

    # -- public -----------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.info is not None and not self._is_draining

    @property
    def is_lost(self) -> bool:
        """Whether there was an engine and it is gone."""
        return self.info is None and self._num_lives > 0

    @property
    def since_step_s(self) -> float:
        """Seconds since the engine's last step ended or its work began; 0 while it has no work. It
        grows while a step is stuck, even if heartbeats continue."""
        return 0.0 if self._last_step_s is None else time.monotonic() - self._last_step_s

    def start(self) -> None:
        """Start connecting. Must be called in the event loop."""
        self._keeper = asyncio.create_task(self._keep_connected(), name="engine-client")

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
        """Disconnect from the engine; open streams fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    async def wait_ready(self) -> EngineInfo:
        """The engine's info, as soon as there is an engine."""
        while self.info is None:
            await self._has_info.wait()
        return self.info

    async def require_info(self) -> EngineInfo:
        """The engine's info, for a new request, which waits a moment if the link was just lost: a
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
        """The engine's info, for a request that was already admitted: also during a drain.

        Raises:
            EngineDeadError: there is no engine.
        """
        if self.info is None:
            raise EngineDeadError("the engine is not available")
        return self.info

    def submit(self, request: Request, *, epoch: int = 1) -> EngineStream:
        """Queue a request for the engine. If the engine dies, the next one continues the stream.

        Args:
            epoch: of the owner, where gateways take over requests from each other: the engine obeys
                the highest.

        Raises:
            EngineDeadError: there is no engine.
        """
        self.info_for_running()
        if self._last_step_s is None:
            self._last_step_s = time.monotonic()
        return self._streams.open(request, epoch=epoch)

    def abort(self, stream: EngineStream) -> None:
        """Stop a request; its stream yields nothing more. Does nothing if it has finished."""
        self._streams.abort(stream)

    def abort_branch(self, stream: EngineStream, index: int) -> None:
        """Stop one branch; the request continues. Outputs in flight are still delivered."""
        self._streams.abort_branch(stream, index)

    def drop_prefix(
        self, token_ids: Sequence[int], cache_salt: str, *, adapter: str | None = None
    ) -> None:
        """Have the engine drop the cached KV of these tokens, except what other requests use.

        Without an engine there is nothing to drop.

        Args:
            adapter: the digest of the adapter that computed it.
        """
        if self.info is not None:
            dropped = DropPrefix(token_ids=tuple(token_ids), cache_salt=cache_salt, adapter=adapter)
            self._outbox.put_nowait(dropped)

    def unload_adapter(self, name: str) -> None:
        """Have the engine end all requests for the adapters of this name."""
        if self.info is not None:
            self._outbox.put_nowait(UnloadAdapter(name=name))

    def mark_dead(self, reason: str) -> None:
        """End the current life, because the engine is known to be gone."""
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)

    # -- lives ------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        try:
            while True:
                socket = await self._connected()
                try:
                    reason = await self._live(socket)
                except Exception as error:  # a bug: report it, and try again
                    reason = f"{type(error).__name__}: {error}"
                    self._end_life(reason)
                _LOG.error(
                    "lost the engine: %s; looking for the next one, for which %d open streams wait "
                    "at most %.0f s",
                    reason,
                    len(self._streams),
                    self._engine_wait_s,
                )
                self._streams.tick()
                await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)
        finally:
            self.info = None
            self._streams.fail_all(_SHUTDOWN)

    async def _connected(self) -> EngineSocket:
        """A connection, as soon as an engine listens."""
        while True:
            with contextlib.suppress(OSError):
                return await EngineSocket.connect(self._address, self._on_frame)
            self._streams.tick()
            await asyncio.sleep(_RETRY_S)

    async def _live(self, socket: EngineSocket) -> str:
        """One life, from hello to the end; returns why it ended."""
        self._death = asyncio.get_running_loop().create_future()
        self._num_silent_beats = self._num_steps = 0
        self._outbox = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._guarded(work))
            for work in (self._send(socket), self._beat(), self._watch(socket))
        ]
        try:
            reason = await self._death
            self._end_life(reason)
            return reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not self._outbox.empty():  # aborts
                socket.write(encode(self._outbox.get_nowait()))
            socket.close()

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        # A bug in one task must end the life instead of leaving a half-working link.
        try:
            await work
        except Exception as error:
            _LOG.exception("the link to the engine failed")
            self.mark_dead(f"{type(error).__name__}: {error}")

    def _end_life(self, reason: str) -> None:
        self.info = None
        self._lost_at_s = time.monotonic()
        self._has_info.clear()
        self._last_step_s = None
        self.stats = msgspec.structs.replace(self.stats, **dict.fromkeys(_GAUGES, 0))
        self._streams.lose_engine(reason)

    async def _send(self, socket: EngineSocket) -> None:
        while True:
            await socket.send(encode(await self._outbox.get()))

    async def _watch(self, socket: EngineSocket) -> None:
        """Ends the life when the socket closes: a killed engine's does at once."""
        await socket.disconnected.wait()
        self.mark_dead("its connection closed")

    async def _beat(self) -> None:
        """Send `Hello` until the engine answers, then heartbeats, and count its silent beats.

        Beats are counted instead of seconds: if this event loop was stopped for a while, it reads
        what the engine sent in that time before the next beat.
        """
        while True:
            self._outbox.put_nowait(Hello() if self.info is None else Heartbeat())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            self._streams.tick()
            self._num_silent_beats += self.info is not None
            if self._num_silent_beats > MAX_SILENT_BEATS:
                self.mark_dead(f"silent for {SILENCE_LIMIT_S:.0f} s")

    def _on_frame(self, frame: bytes) -> None:
        if self._death is None or self._death.done():
            return
        try:
            self._on_message(decode(frame))
        except Exception as error:
            _LOG.exception("the link to the engine failed")
            self.mark_dead(f"{type(error).__name__}: {error}")

    def _on_message(self, message: Message) -> None:
        self._num_silent_beats = 0
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Heartbeat):
            self.stats = message.stats or self.stats
            since_s = message.since_step_s
            self._last_step_s = None if since_s is None else time.monotonic() - since_s
        elif isinstance(message, EngineInfo):
            if self.info is None:  # otherwise it answers a second hello
                self._num_lives += 1
                self.info = message
                self._has_info.set()
                is_same, self._engine_pid = message.pid == self._engine_pid, message.pid
                self._streams.continue_all(is_same=is_same)
        elif isinstance(message, Failure):
            self.mark_dead(message.message)

    def _on_step(self, step: Step) -> None:
        self._num_steps += 1
        if step.number != self._num_steps:
            self.mark_dead(f"got frame {step.number} instead of {self._num_steps}")
            return
        self.stats = step.stats or self.stats
        self._streams.deliver(step.outputs)
        # Other gateways may have work in the engine; the next heartbeat corrects this.
        self._last_step_s = time.monotonic() if self._streams else None


class EngineSocket(asyncio.Protocol):
    """Made by `connect`.

    Attributes:
        disconnected: set once the connection is lost and all received frames were passed on.
    """

    def __init__(self, on_frame: Callable[[bytes], None]) -> None:
        self.disconnected = asyncio.Event()
        self._on_frame = on_frame
        self._frames = FrameReader()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def connect(cls, address: str, on_frame: Callable[[bytes], None]) -> EngineSocket:
        """Args:
            address: path of the Unix socket on which the engine listens.
            on_frame: called with every frame.

        Raises:
            OSError: nothing listens there.
        """
        loop = asyncio.get_running_loop()
        _, connected = await loop.create_unix_connection(lambda: cls(on_frame), address)
        return connected

    async def send(self, frame: bytes) -> None:
        """Send a frame; returns as soon as there is room for the next."""
        self.write(frame)
        await self._has_room.wait()

    def write(self, frame: bytes) -> None:
        """Send a frame without waiting; `close` still flushes it. If the engine has died, the frame
        is dropped: uvloop would raise an error that hides this."""
        if not self._transport.is_closing():
            self._transport.write(framed(frame))

    def close(self) -> None:
        self._transport.close()

    # -- called by the event loop -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except ValueError:  # not an engine's frames
            self._transport.abort()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.disconnected.set()
