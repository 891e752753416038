"""The gateway's end of the wire: submits requests to the engine and hands out its streams.

A connection to the engine is one *life*: it begins with `Hello` and `EngineInfo`, and ends when the
connection is lost, the engine says `Failure`, is silent for too long, loses a frame, or somebody
calls `mark_dead`. Then the next is tried, so a restarted engine is found without anyone's help, and
goes on with the streams that are open (`open_streams`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import cast

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
)
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.open_streams import OpenStreams

MAX_ENGINE_LIVES = 5
ENGINE_WAIT_S = 60.0
_LOG = logging.getLogger(__name__)
_SHUTDOWN = "the server is shutting down"
_RETRY_S = 0.05  # while no engine listens
# What of the stats is over when an engine dies: all but its counters and the sizes of its pools.
_GAUGES = tuple(
    field.name
    for field in dataclasses.fields(EngineStats)
    if not field.name.endswith("_total") and field.name not in ("num_blocks", "num_host_blocks")
)


class EngineClient:
    """A gateway's link to one engine.

    Args:
        address: path of the Unix socket at which the engine listens; it may not be there yet.
        max_engine_lives: engines that may die with a request before it fails.
        engine_wait_s: how long the streams of an engine that died wait for the next.
    """

    def __init__(
        self,
        address: str,
        *,
        max_engine_lives: int = MAX_ENGINE_LIVES,
        engine_wait_s: float = ENGINE_WAIT_S,
    ) -> None:
        self.stats = EngineStats()
        self.info: EngineInfo | None = None  # None while no engine answers
        self._address = address
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._streams = OpenStreams(
            lambda message: self._outbox.put_nowait(message),
            max_engine_lives=max_engine_lives,
            engine_wait_s=engine_wait_s,
        )
        self._has_info = asyncio.Event()
        self._death: asyncio.Future[str] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_draining = False
        self._num_lives = 0
        self._engine_pid = 0  # of the last that answered
        self._num_silent_beats = 0
        self._num_steps = 0
        self._last_step_s: float | None = None  # of the engine, for whatever gateway; None: no work

    # -- for everybody ----------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.info is not None and not self._is_draining

    @property
    def is_lost(self) -> bool:
        """Whether an engine was here and is gone."""
        return self.info is None and self._num_lives > 0

    @property
    def since_step_s(self) -> float:
        """Seconds since the engine's last step ended, or its work began; 0 while it has none. It
        grows while a step is stuck, whether or not heartbeats go on."""
        return 0.0 if self._last_step_s is None else time.monotonic() - self._last_step_s

    def start(self) -> None:
        """Begin to connect; call it inside the event loop."""
        self._keeper = asyncio.create_task(self._keep_connected(), name="engine-client")

    async def drain(
        self, grace_s: float, *, hand_over: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Take no more requests; let streams end on their own for a while, then fail the rest,
        after `hand_over` had its chance with them."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._streams:  # noqa: ASYNC110  (once in a process's life)
                    await asyncio.sleep(0.05)
        if hand_over is not None:
            await hand_over()
        self._streams.fail_all(_SHUTDOWN)

    async def close(self) -> None:
        """Let go of the engine; streams still open fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    async def wait_ready(self) -> EngineInfo:
        """What the engine is, as soon as it says so."""
        while self.info is None:
            await self._has_info.wait()
        return self.info

    def require_info(self) -> EngineInfo:
        """What the engine is, for a request that comes in.

        Raises:
            EngineDeadError: no engine answers, or this gateway takes no more requests.
        """
        if self._is_draining:
            raise EngineDeadError(_SHUTDOWN)
        return self.info_for_running()

    def info_for_running(self) -> EngineInfo:
        """What the engine is, for a request that was let in: a drain gives it time.

        Raises:
            EngineDeadError: no engine answers.
        """
        if self.info is None:
            raise EngineDeadError("the engine is not available")
        return self.info

    def submit(self, request: Request, *, epoch: int = 1) -> EngineStream:
        """Queue a request for the engine. Its stream goes on when another engine takes over.

        Args:
            epoch: of the owner, where gateways take requests over from each other: the highest
                has the engine's.

        Raises:
            EngineDeadError: no engine answers.
        """
        self.info_for_running()
        if self._last_step_s is None:
            self._last_step_s = time.monotonic()
        return self._streams.open(request, epoch=epoch)

    def abort(self, stream: EngineStream) -> None:
        """Stop a request; nothing more comes out of its stream. A finished one is left alone."""
        self._streams.abort(stream)

    def abort_branch(self, stream: EngineStream, index: int) -> None:
        """Stop one branch of a request that goes on; what is on its way of it still comes."""
        self._streams.abort_branch(stream, index)

    def drop_prefix(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """Have the engine forget the cached KV of these tokens, as far as nobody else uses it.

        Without an engine there is nothing to forget.
        """
        if self.info is not None:
            self._outbox.put_nowait(DropPrefix(token_ids=tuple(token_ids), cache_salt=cache_salt))

    def mark_dead(self, reason: str) -> None:
        """Somebody knows that the engine is gone: its streams wait for the next."""
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)

    # -- one life after the other -----------------------------------------------------------

    async def _keep_connected(self) -> None:
        try:
            while True:
                socket = await self._connected()
                try:
                    reason = await self._live(socket)
                except Exception as error:  # a bug: tell, and try again
                    reason = f"{type(error).__name__}: {error}"
                    self._bury(reason)
                _LOG.error("the engine is gone: %s", reason)
                self._streams.tick()
                await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)
        finally:
            self.info = None
            self._streams.fail_all(_SHUTDOWN)

    async def _connected(self) -> EngineSocket:
        """As soon as an engine listens."""
        while True:
            with contextlib.suppress(OSError):
                return await EngineSocket.connect(self._address, self._on_frame)
            self._streams.tick()
            await asyncio.sleep(_RETRY_S)

    async def _live(self, socket: EngineSocket) -> str:
        """From hello to death; returns the cause."""
        self._death = asyncio.get_running_loop().create_future()
        self._num_silent_beats = self._num_steps = 0
        self._outbox = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._guarded(work))
            for work in (self._send(socket), self._beat(), self._watch(socket))
        ]
        try:
            reason = await self._death
            self._bury(reason)
            return reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not self._outbox.empty():  # aborts
                socket.write(encode(self._outbox.get_nowait()))
            socket.close()

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        # A bug in one of them must end the life, not leave a half-dead link.
        try:
            await work
        except Exception as error:
            _LOG.exception("the link to the engine broke")
            self.mark_dead(f"{type(error).__name__}: {error}")

    def _bury(self, reason: str) -> None:
        self.info = None
        self._has_info.clear()
        self._last_step_s = None
        self.stats = dataclasses.replace(self.stats, **dict.fromkeys(_GAUGES, 0))
        self._streams.lose_engine(reason)

    async def _send(self, socket: EngineSocket) -> None:
        while True:
            await socket.send(encode(await self._outbox.get()))

    async def _watch(self, socket: EngineSocket) -> None:
        """A killed engine's socket closes at once: no need to wait until it has been silent."""
        await socket.disconnected.wait()
        self.mark_dead("its connection closed")

    async def _beat(self) -> None:
        """Say hello until the engine answers, then show that we live and count its silence.

        Beats are counted, not seconds: after this event loop stood still, what the engine sent
        meanwhile is read before the next beat.
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
            _LOG.exception("the link to the engine broke")
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
            if self.info is None:  # else a second answer, to a hello that had to wait
                self._num_lives += 1
                self.info = message
                self._has_info.set()
                is_same, self._engine_pid = message.pid == self._engine_pid, message.pid
                self._streams.go_on(is_same=is_same)
        elif isinstance(message, Failure):
            self.mark_dead(message.message)

    def _on_step(self, step: Step) -> None:
        self._num_steps += 1
        if step.number != self._num_steps:
            self.mark_dead(f"frame {step.number} came where {self._num_steps} was due")
            return
        self.stats = step.stats or self.stats
        self._streams.deliver(step.outputs)
        # Heartbeats correct it: other gateways may have work there.
        self._last_step_s = time.monotonic() if self._streams else None


class EngineSocket(asyncio.Protocol):
    """Made by `connect`.

    Attributes:
        disconnected: set once the connection is lost; all that came before was handed over.
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
            address: path of the Unix socket at which the engine listens.
            on_frame: is called with every frame.

        Raises:
            OSError: nobody listens there.
        """
        loop = asyncio.get_running_loop()
        _, connected = await loop.create_unix_connection(lambda: cls(on_frame), address)
        return connected

    async def send(self, frame: bytes) -> None:
        """Returns as soon as there is room for the next."""
        self.write(frame)
        await self._has_room.wait()

    def write(self, frame: bytes) -> None:
        """Waits for nobody; `close` sends it still."""
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
        except ValueError:  # this is no engine
            self._transport.abort()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.disconnected.set()
