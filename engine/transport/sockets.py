"""The engine's end of the transport: a Unix socket with a connection for each gateway.

A thread reads, sends heartbeats while a long step computes, and retries frames that did not fit
into a gateway's socket buffer. It hands messages to the step loop through a queue. The step loop
writes small frames to the socket itself: waking the thread costs more than the write, on cores that
the model needs. Neither ever blocks on a gateway.

A gateway is declared dead when its connection closes, when it has been silent for
`SILENCE_LIMIT_S`, or when it read no frame for as long: frames are never dropped silently. The
limit is counted in heartbeats, not seconds, so a suspended machine loses no gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engine.request import RequestOutput
from penstock.engine.transport.frames import FrameReader, decode, encode, framed
from penstock.engine.transport.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_SILENT_BEATS,
    PROTOCOL_VERSION,
    SILENCE_LIMIT_S,
    Abort,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
    UnloadAdapter,
)

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.005  # while frames wait
_READ_BYTES = 1 << 18
_SEND_BUFFER_BYTES = 1 << 22  # in the kernel, as far as it allows
_FEW_OUTPUTS = 16  # at most, for the step loop to write a frame itself


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway was declared dead: its sequences must be aborted."""


@dataclass(slots=True, eq=False)
class _Gateway:
    number: int
    connection: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)
    has_said_hello: bool = False
    num_steps: int = 0
    stats: EngineStats | None = None  # the last ones sent in a step's frame
    pending: deque[memoryview] = field(default_factory=deque)
    # Our heartbeats since its last message, and since it last read something.
    num_silent_beats: int = 0
    num_stuck_beats: int = 0


class TransportBrokenError(Exception):
    """The transport's thread failed (a bug): the engine gets no more messages and must end."""


GatewayId = int  # of a connection; never used again
Inbound = tuple[GatewayId, Submit | Abort | DropPrefix | UnloadAdapter | GatewayGone]


class Transport(threading.Thread):
    """Listens at `address`, the path of a Unix socket; replaces a leftover one."""

    def __init__(self, address: str, info: EngineInfo) -> None:
        super().__init__(name="penstock-transport", daemon=True)
        self.stats = EngineStats()  # replaced by the step loop, read here
        # When the last step ended, or work began; None while there is none. Set by the step loop.
        self.last_step_s: float | None = None
        self._info = info
        self._inbox: queue.SimpleQueue[Inbound | TransportBrokenError | None] = queue.SimpleQueue()
        # Both threads send; the lock guards the gateways, their pending frames, and the outbox.
        self._lock = threading.Lock()
        self._gateways: dict[GatewayId, _Gateway] = {}
        self._outbox: deque[tuple[GatewayId, tuple[RequestOutput, ...]]] = deque()
        self._numbers = itertools.count(1)
        self._next_heartbeat_s = 0.0
        self._is_closing = False
        self._failure: str | None = None
        self._listener = _listen(address)
        self._woken, self._waker = socket.socketpair()  # wakes the thread
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    # -- called by the step loop ------------------------------------------------------------

    def receive(self, *, timeout_s: float | None) -> Iterator[Inbound]:
        """All messages received; waits up to `timeout_s` (None: for ever) for the first."""
        if timeout_s == 0.0 and self._inbox.empty():
            return  # the common case between steps
        try:
            item = self._inbox.get(block=timeout_s != 0.0, timeout=timeout_s or None)
            while item is not None:
                if isinstance(item, TransportBrokenError):
                    raise item
                yield item
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def interrupt(self) -> None:
        """Make a waiting `receive` return; safe in a signal handler."""
        self._inbox.put(None)

    def send(self, gateway_id: GatewayId, outputs: tuple[RequestOutput, ...]) -> None:
        """Send one frame with all of a gateway's outputs of this iteration."""
        with self._lock:
            if len(outputs) <= _FEW_OUTPUTS and not self._outbox:
                if self._send_step(gateway_id, outputs):
                    return
            else:
                self._outbox.append((gateway_id, outputs))
        self._wake()

    def close(self, failure: str | None = None) -> None:
        """Send the gateways the failure, if there is one, and end the thread."""
        self._failure = failure
        self._is_closing = True
        self._wake()
        self.join(timeout=2.0)
        self._waker.close()

    def _wake(self) -> None:
        # An error means that the buffer is full of wake-ups, or that the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # -- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _LOG.exception("the transport's thread failed")
            self._inbox.put(TransportBrokenError(f"{type(error).__name__}: {error}"))
        finally:
            self._listener.close()
            self._woken.close()
            with self._lock:
                for gateway in self._gateways.values():
                    gateway.connection.close()
                self._gateways.clear()
            self._selector.close()

    def _serve(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self._woken:
                    self._woken.recv(_READ_BYTES)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            with self._lock:
                self._send_outbox()
                self._retry_pending()
            if time.monotonic() >= self._next_heartbeat_s:
                self._beat()
        self._say_goodbye()

    def _timeout_s(self) -> float:
        if any(gateway.pending for gateway in self._gateways.values()):
            return _RETRY_S
        return max(0.0, self._next_heartbeat_s - time.monotonic())

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # it has disconnected, or we have too many open files
            _LOG.warning("a gateway could not connect: %s", error)
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        gateway = _Gateway(next(self._numbers), accepted)
        with self._lock:
            self._gateways[gateway.number] = gateway
        self._selector.register(accepted, selectors.EVENT_READ, gateway)

    def _read(self, gateway: _Gateway) -> None:
        try:
            data = gateway.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(gateway, "its connection closed", level=logging.DEBUG)
            return
        try:
            for frame in gateway.frames.feed(data):
                self._handle_frame(gateway, frame)
        except ValueError as error:
            self._disconnect(gateway, str(error))

    def _handle_frame(self, gateway: _Gateway, frame: bytes) -> None:
        try:
            message = decode(frame)
        except (ValueError, IndexError) as error:
            _LOG.warning("ignored an invalid frame: %s", error)
            return
        gateway.num_silent_beats = 0
        if isinstance(message, Hello):
            gateway.has_said_hello = True
            is_ours = message.protocol_version == PROTOCOL_VERSION
            text = _version_text(message.protocol_version)
            self._post_now(gateway, self._info if is_ours else Failure(message=text))
        elif not gateway.has_said_hello:
            self._post_now(gateway, Failure(message="unknown gateway: say hello first"))
        elif isinstance(message, Submit | Abort | DropPrefix | UnloadAdapter):
            self._inbox.put((gateway.number, message))

    def _beat(self) -> None:
        self._next_heartbeat_s = time.monotonic() + HEARTBEAT_INTERVAL_S
        for gateway in list(self._gateways.values()):
            gateway.num_silent_beats += 1
            gateway.num_stuck_beats += bool(gateway.pending)
            if gateway.num_silent_beats > MAX_SILENT_BEATS:
                self._disconnect(gateway, f"silent for {SILENCE_LIMIT_S:.0f} s")
            elif gateway.num_stuck_beats > MAX_SILENT_BEATS:
                self._disconnect(gateway, f"read no frame for {SILENCE_LIMIT_S:.0f} s")
            elif gateway.has_said_hello:
                last_step_s = self.last_step_s
                since_s = None if last_step_s is None else time.monotonic() - last_step_s
                with self._lock:  # so that older stats cannot follow those of a step
                    self._post(gateway, Heartbeat(stats=self.stats, since_step_s=since_s))

    def _post_now(self, gateway: _Gateway, message: Message) -> None:
        with self._lock:
            self._post(gateway, message)

    def _disconnect(self, gateway: _Gateway, reason: str, *, level: int = logging.WARNING) -> None:
        _LOG.log(level, "gateway %d is gone: %s", gateway.number, reason)
        self._selector.unregister(gateway.connection)
        with self._lock:
            del self._gateways[gateway.number]
            gateway.connection.close()
        self._inbox.put((gateway.number, GatewayGone()))

    def _say_goodbye(self) -> None:
        with self._lock:
            self._send_outbox()
            if self._failure is not None:
                for gateway in self._gateways.values():
                    self._post(gateway, Failure(message=self._failure))

    # -- under the lock ---------------------------------------------------------------------

    def _send_outbox(self) -> None:
        while self._outbox:
            self._send_step(*self._outbox.popleft())

    def _send_step(self, gateway_id: GatewayId, outputs: tuple[RequestOutput, ...]) -> bool:
        """Send or queue a frame; whether nothing is left to send."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            return True
        gateway.num_steps += 1
        stats = self.stats if self.stats is not gateway.stats else None
        gateway.stats = stats or gateway.stats
        self._post(gateway, Step(number=gateway.num_steps, outputs=outputs, stats=stats))
        return not gateway.pending

    def _post(self, gateway: _Gateway, message: Message) -> None:
        gateway.pending.append(memoryview(framed(encode(message))))
        if len(gateway.pending) == 1:
            self._drain(gateway)

    def _drain(self, gateway: _Gateway) -> None:
        while gateway.pending:
            first = gateway.pending[0]
            try:
                num_sent = gateway.connection.send(first)
            except BlockingIOError:
                return
            except OSError:  # disconnected; the next read will notice
                gateway.pending.clear()
                return
            gateway.num_stuck_beats = 0
            if num_sent < len(first):
                gateway.pending[0] = first[num_sent:]
            else:
                gateway.pending.popleft()

    def _retry_pending(self) -> None:
        for gateway in self._gateways.values():
            self._drain(gateway)


def _listen(address: str) -> socket.socket:
    Path(address).unlink(missing_ok=True)  # left by an engine that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    return listener


def _version_text(theirs: int) -> str:
    return (
        f"protocol version {theirs} does not match the engine's {PROTOCOL_VERSION}: "
        "upgrade both together"
    )
