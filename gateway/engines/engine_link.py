"""The link to one engine, over all its connections.

A connection begins with `Hello` and `EngineInfo`, and ends when it is lost, the engine sends
`Failure`, is silent for too long or loses a frame, or when `disconnect` is called. The link then
connects again, so it finds a restarted engine by itself.

An engine that says what cannot be (`engine.protocol.checks`) is at fault: its connection ends, and
it is left alone for a while, each time twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from penstock.engine.protocol.checks import PeerFaultError, check_stats, check_step
from penstock.engine.protocol.frames import FrameReader, decode, encode, framed
from penstock.engine.protocol.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_SILENT_BEATS,
    SHORT_KEY_BYTES,
    SILENCE_LIMIT_S,
    BlocksStored,
    CachedKeys,
    Draining,
    EngineInfo,
    EngineStats,
    Failure,
    FetchBlocks,
    Heartbeat,
    Hello,
    KVBlocks,
    Message,
    Step,
    WantKeys,
)
from penstock.engine.request import RequestOutput
from penstock.gateway.engines.routing import EngineLoad, KeySet

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.02  # while no engine listens
_RETRY_REMOTE_S = 0.5
_SNAPSHOT_S = 2.0
_CONNECT_S = 3.0  # to another machine, with the handshake
_SHUN_S, _MAX_SHUN_S = 1.0, 60.0  # how long an engine at fault is left alone: at first, at most
# Stats that are reset when an engine dies: all but the counters and the sizes of its pools.
_GAUGES = tuple(
    field.name
    for field in msgspec.structs.fields(EngineStats)
    if not field.name.endswith("_total") and field.name not in ("num_blocks", "num_host_blocks")
)


class Tls(NamedTuple):
    """How engines on other machines are connected to.

    Attributes:
        context: the one for the next connection.
        server_name: what their certificates must name; None: the host of their address.
    """

    context: Callable[[], ssl.SSLContext]
    server_name: str | None = None


def is_remote(address: str) -> bool:
    """Whether it is HOST:PORT, not the path of a Unix socket."""
    return "/" not in address and ":" in address


class LinkOwner(Protocol):
    """Who is told what happens on a link."""

    def engine_found(self, link: EngineLink, *, is_same: bool) -> None:
        """A connection has begun. `is_same`: with the engine that was lost, which had not died."""

    def engine_draining(self, link: EngineLink) -> None:
        """The engine is about to end, and takes no more requests."""

    def engine_lost(self, link: EngineLink, reason: str, *, is_at_fault: bool) -> None:
        """A connection has ended. `is_at_fault`: what the engine said cannot be."""

    def deliver(self, outputs: Sequence[RequestOutput], tokens: Mapping[str, int]) -> None:
        """An iteration's outputs (see `Step`)."""

    def tick(self) -> None:
        """Called regularly, with an engine and without."""


class EngineLink:
    """
    Args:
        name: of the engine, for people.
        address: path of the Unix socket on which the engine listens, or HOST:PORT of one on
            another machine; it need not exist yet.
        tls: for another machine.

    Attributes:
        info: None while there is no engine.
        is_draining: the engine is about to end.
        load: what it has to compute, and which prefixes it has, for `routing`.
        num_connections: that were made so far.
    """

    def __init__(
        self, name: str, address: str, owner: LinkOwner, *, tls: Tls | None = None
    ) -> None:
        self._tls = tls
        self.name = name
        self.address = address
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.is_draining = False
        self.load = EngineLoad()
        self.num_connections = 0
        self._owner = owner
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._death: asyncio.Future[str] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._engine_pid = 0  # of the last engine that answered
        self._num_silent_beats = 0
        self._num_steps = 0
        self._last_step_s: float | None = None  # the engine's, for any gateway; None: no work
        self._wants_keys = False
        self._asked_at_s = 0.0
        self._last_fault = ""
        self._is_at_fault = False
        self._shun_s = _SHUN_S
        # By number: what was asked, and the answer.
        self._answers: dict[
            int, tuple[FetchBlocks | KVBlocks, asyncio.Future[KVBlocks | BlocksStored]]
        ] = {}
        self._num_keys: int | None = None  # of the newest `CachedKeys`; None: a snapshot is due

    # -- public -----------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        return self.info is not None and not self.is_draining

    @property
    def since_step_s(self) -> float:
        """Seconds since the engine's last step ended or its work began; 0 without work."""
        return 0.0 if self._last_step_s is None else time.monotonic() - self._last_step_s

    def start(self) -> None:
        """Start connecting. Must be called in the event loop."""
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"engine-{self.name}")

    async def close(self) -> None:
        """Disconnect from the engine."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    def post(self, message: Message) -> None:
        """Queue a message for the engine of the present connection."""
        self._outbox.put_nowait(message)

    async def ask(self, message: FetchBlocks | KVBlocks) -> KVBlocks | BlocksStored:
        """The engine's answer.

        Args:
            message: its number is that of no other question under way.

        Raises:
            ConnectionError: the connection ended meanwhile.
        """
        if self.info is None:
            raise ConnectionError(f"engine {self.name} is gone")
        answer: asyncio.Future[KVBlocks | BlocksStored]
        answer = asyncio.get_running_loop().create_future()
        self._answers[message.number] = message, answer
        try:
            self.post(message)
            return await answer
        finally:
            self._answers.pop(message.number, None)

    @property
    def life(self) -> str:
        """Names the engine's process, whose KV cache ends with it."""
        return f"{self.name} {self.num_connections}"

    def note_work(self) -> None:
        """The engine is about to get work."""
        if self._last_step_s is None:
            self._last_step_s = time.monotonic()

    def want_keys(self) -> None:
        """Have the engine publish the keys of its cached blocks, now and after each connect."""
        if not self._wants_keys:
            self._wants_keys = True
            self._ask_for_keys()

    def disconnect(self, reason: str) -> None:
        """End the current connection, because the engine is known to be gone."""
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)

    # -- connections ------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        while True:
            socket = await self._connected()
            began_s, self._is_at_fault = time.monotonic(), False
            num_before = self.num_connections
            try:
                reason = await self._live(socket)
            except Exception as error:  # a bug: report it, and try again
                reason = f"{type(error).__name__}: {error}"
                self._end_life(reason)
            self._owner.tick()
            if self._is_at_fault:
                await self._shun(time.monotonic() - began_s)
            elif self.num_connections > num_before:
                await asyncio.sleep(_RETRY_S)  # the next one may be there at once
            else:
                await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)

    async def _shun(self, lived_s: float) -> None:
        """Leave an engine alone that was at fault."""
        if lived_s > _MAX_SHUN_S:
            self._shun_s = _SHUN_S
        until_s = time.monotonic() + self._shun_s
        self._shun_s = min(2 * self._shun_s, _MAX_SHUN_S)
        while time.monotonic() < until_s:
            self._owner.tick()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)

    async def _connected(self) -> EngineSocket:
        """A connection, as soon as an engine listens."""
        while True:
            try:
                return await EngineSocket.connect(self.address, self._on_frame, tls=self._tls)
            except ssl.SSLError as error:
                if str(error) != self._last_fault:  # it is tried again and again
                    self._last_fault = str(error)
                    _LOG.error("engine %s is not trusted: %s", self.name, error)
            except (OSError, ValueError):  # nothing listens there, or it is no address
                pass
            self._owner.tick()
            await asyncio.sleep(_RETRY_REMOTE_S if is_remote(self.address) else _RETRY_S)

    async def _live(self, socket: EngineSocket) -> str:
        """One connection, from hello to the end; returns why it ended."""
        self._death = asyncio.get_running_loop().create_future()
        self._num_silent_beats = self._num_steps = 0
        self._num_keys = None
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
        # A bug in one task must end the connection instead of leaving a half-working link.
        try:
            await work
        except Exception as error:
            _LOG.exception("the link to the engine failed")
            self.disconnect(f"{type(error).__name__}: {error}")

    def _end_life(self, reason: str) -> None:
        if self.info is None and reason == self._last_fault:
            return  # an engine that answers no hello is tried again and again
        self._last_fault = reason if self.info is None else ""
        self.info = None
        self._last_step_s = None
        self.load.forget()
        for _, answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"engine {self.name}: {reason}"))
        self.stats = msgspec.structs.replace(self.stats, **dict.fromkeys(_GAUGES, 0))
        self._owner.engine_lost(self, reason, is_at_fault=self._is_at_fault)
        self.is_draining = False

    async def _send(self, socket: EngineSocket) -> None:
        while True:
            await socket.send(encode(await self._outbox.get()))

    async def _watch(self, socket: EngineSocket) -> None:
        """Ends the connection when the socket closes: a killed engine's does at once."""
        await socket.disconnected.wait()
        self.disconnect("its connection closed")

    async def _beat(self) -> None:
        """Send `Hello` until the engine answers, then heartbeats, and count its silent beats.

        Beats are counted instead of seconds: if this event loop was stopped for a while, it reads
        what the engine sent in that time before the next beat.
        """
        while True:
            self._outbox.put_nowait(Hello() if self.info is None else Heartbeat())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            self._owner.tick()
            self._num_silent_beats += self.info is not None
            if self._num_silent_beats > MAX_SILENT_BEATS:
                self.disconnect(f"silent for {SILENCE_LIMIT_S:.0f} s")

    # -- messages ---------------------------------------------------------------------------

    def _on_frame(self, frame: bytes) -> None:
        if self._death is None or self._death.done():
            return
        try:
            self._on_message(_decoded(frame))
        except PeerFaultError as fault:
            self._is_at_fault = True
            self.disconnect(f"it is at fault: {fault}")
        except Exception as error:
            _LOG.exception("the link to the engine failed")
            self.disconnect(f"{type(error).__name__}: {error}")

    def _on_message(self, message: Message) -> None:
        self._num_silent_beats = 0
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Heartbeat):
            self._on_stats(message.stats)
            since_s = message.since_step_s
            self._last_step_s = None if since_s is None else time.monotonic() - since_s
        elif isinstance(message, CachedKeys):
            self._on_keys(message)
        elif isinstance(message, KVBlocks | BlocksStored):
            self._on_answer(message)
        elif isinstance(message, EngineInfo):
            if self.info is None:  # otherwise it answers a second hello
                self.num_connections += 1
                self.info = message
                is_same, self._engine_pid = message.pid == self._engine_pid, message.pid
                if self._wants_keys:
                    self._ask_for_keys()
                self._owner.engine_found(self, is_same=is_same)
        elif isinstance(message, Draining):
            if self.is_usable:
                self.is_draining = True
                self._owner.engine_draining(self)
        elif isinstance(message, Failure):
            self.disconnect(message.message)

    def _on_step(self, step: Step) -> None:
        self._num_steps += 1
        if step.number != self._num_steps:
            self.disconnect(f"got frame {step.number} instead of {self._num_steps}")
            return
        self._on_stats(step.stats)
        if self.info is not None:
            check_step(step, vocab_size=self.info.vocab_size)
        self._owner.deliver(step.outputs, step.tokens)
        # Other gateways may have work in the engine; the next heartbeat corrects this.
        self._last_step_s = time.monotonic() if self.load.num_streams else None

    def _on_stats(self, stats: EngineStats | None) -> None:
        if stats is not None and self.info is not None:
            check_stats(stats, self.info)
            self.stats = stats

    def _on_answer(self, message: KVBlocks | BlocksStored) -> None:
        asked, answer = self._answers.get(message.number, (None, None))
        if answer is None or answer.done():
            return
        is_fitting = (
            isinstance(asked, FetchBlocks)
            and isinstance(message, KVBlocks)
            and [block.key for block in message.blocks] == list(asked.keys[: len(message.blocks)])
        ) or (
            isinstance(asked, KVBlocks)
            and isinstance(message, BlocksStored)
            and message.num_blocks <= len(asked.blocks)
        )
        if is_fitting:  # otherwise it is late, to an earlier question of this number
            answer.set_result(message)

    def _on_keys(self, message: CachedKeys) -> None:
        """Messages between a lost one and the snapshot that makes up for it are of no use."""
        if message.is_snapshot:
            info = self.info
            self.load.keys = KeySet(0 if info is None else info.num_blocks + info.num_host_blocks)
        elif self._num_keys is None:
            if time.monotonic() - self._asked_at_s > _SNAPSHOT_S:
                self._ask_for_keys()  # the snapshot was lost too
            return
        elif message.number != self._num_keys + 1:
            self._ask_for_keys()
            return
        if len(message.added) % SHORT_KEY_BYTES or len(message.removed) % SHORT_KEY_BYTES:
            raise PeerFaultError("it sent a part of a key")
        self._num_keys = message.number
        self.load.keys.update(added=message.added, removed=message.removed)

    def _ask_for_keys(self) -> None:
        self._num_keys = None
        self._asked_at_s = time.monotonic()
        if self.info is not None:
            self.post(WantKeys())


def _decoded(frame: bytes) -> Message:
    try:
        return decode(frame)
    except ValueError as error:
        raise PeerFaultError(str(error)) from error


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
    async def connect(
        cls, address: str, on_frame: Callable[[bytes], None], *, tls: Tls | None = None
    ) -> EngineSocket:
        """Args:
            address: as in `EngineLink`.
            on_frame: called with every frame.

        Raises:
            OSError: nothing listens there, or it is not an engine of ours (ssl.SSLError).
        """
        loop = asyncio.get_running_loop()
        if not is_remote(address):
            _, connected = await loop.create_unix_connection(lambda: cls(on_frame), address)
            return connected
        assert tls is not None, "checked with the settings"
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        async with asyncio.timeout(_CONNECT_S):
            _, connected = await loop.create_connection(
                lambda: cls(on_frame), host, int(port),
                ssl=tls.context(), server_hostname=tls.server_name or host,
            )  # fmt: skip
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
