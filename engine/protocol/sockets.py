"""The engine's end of the transport: a Unix socket with a connection for each gateway, and for
gateways on other machines a TCP socket with mutual TLS (`tls`).

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
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engine.errors import InvalidRequestError
from penstock.engine.protocol.checks import check_submit
from penstock.engine.protocol.frames import FrameReader, decode, encode, framed, submitted_id
from penstock.engine.protocol.handshakes import Handshake, Handshakes, address_of
from penstock.engine.protocol.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_SILENT_BEATS,
    PROTOCOL_VERSION,
    SILENCE_LIMIT_S,
    Abort,
    BlocksStored,
    CachedKeys,
    Draining,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    FetchBlocks,
    Heartbeat,
    Hello,
    Hold,
    KVBlocks,
    Message,
    Submit,
    UnloadAdapter,
    WantKeys,
    step_of,
)
from penstock.engine.protocol.tls import TlsConnection, begin_handshake
from penstock.engine.request import RequestOutput, refusal

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.005  # while frames wait
_READ_BYTES = 1 << 18
SEND_BUFFER_BYTES = 1 << 22  # in the kernel, as far as it allows
_HANDSHAKE_BEATS = 3  # in which a handshake must end
_FEW_OUTPUTS = 16  # at most, for the step loop to write a frame itself


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway was declared dead: its sequences must be aborted."""


@dataclass(slots=True, eq=False)
class _Gateway:
    number: int
    connection: socket.socket | TlsConnection
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
_Request = Submit | Abort | Hold | DropPrefix | UnloadAdapter | WantKeys | FetchBlocks | KVBlocks
Inbound = tuple[GatewayId, _Request | GatewayGone]


class Transport(threading.Thread):
    """
    Args:
        address: the path of a Unix socket to listen at; a leftover one is replaced.
        remote: a TCP socket that listens for gateways on other machines, and what the next
            connection is secured with.
    """

    def __init__(
        self,
        address: str,
        info: EngineInfo,
        *,
        remote: tuple[socket.socket, Callable[[], ssl.SSLContext]] | None = None,
    ) -> None:
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
        self._is_closing = self._is_draining = False
        self._failure: str | None = None
        self._listener = _listen(address)
        self._woken, self._waker = socket.socketpair()  # wakes the thread
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._remote = remote
        self._handshakes = Handshakes()
        self._num_given_up = 0  # handshakes, since the last beat
        if remote is not None:
            remote[0].setblocking(False)
            self._selector.register(remote[0], selectors.EVENT_READ)

    @property
    def num_unread(self) -> int:
        """Messages that `receive` has not given yet."""
        return self._inbox.qsize()

    @property
    def num_connections(self) -> int:
        """Connections of gateways, and of peers that have yet to show that they are gateways."""
        return len(self._gateways) + len(self._handshakes)

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

    def publish(self, gateway_id: GatewayId, keys: CachedKeys) -> None:
        """Send keys of cached blocks; they are dropped if the gateway has not read earlier ones."""
        with self._lock:
            gateway = self._gateways.get(gateway_id)
            if gateway is not None and not gateway.pending:
                self._post(gateway, keys)
        self._wake()

    def answer(self, gateway_id: GatewayId, message: KVBlocks | BlocksStored) -> None:
        """Send the answer to a question of a gateway's."""
        with self._lock:
            gateway = self._gateways.get(gateway_id)
            if gateway is not None:
                self._post(gateway, message)
        self._wake()

    def drain(self) -> bool:
        """Tell the gateways that the engine is about to end, and refuse new ones; whether there
        are any."""
        with self._lock:
            self._is_draining = True
            for gateway in self._gateways.values():
                self._post(gateway, Draining())
            has_any = bool(self._gateways)
        self._wake()
        return has_any

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
            if self._remote is not None:
                self._remote[0].close()
            for handshake in self._handshakes:
                handshake.connection.close()
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
                elif self._remote is not None and key.fileobj is self._remote[0]:
                    self._accept_remote(*self._remote)
                elif isinstance(key.data, Handshake):
                    self._shake_hands(key.data)
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
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._welcome(accepted)

    def _accept_remote(
        self, listener: socket.socket, context: Callable[[], ssl.SSLContext]
    ) -> None:
        try:
            accepted, (host, *_) = listener.accept()
            connection = begin_handshake(accepted, context())
        except OSError as error:
            _LOG.warning("a gateway could not connect: %s", error)
            return
        handshake = Handshake(connection, address_of(host))
        given_up = self._handshakes.add(handshake)
        if given_up is not None:
            self._num_given_up += 1
            self._close(given_up)
        self._selector.register(connection, selectors.EVENT_READ, handshake)

    def _shake_hands(self, handshake: Handshake) -> None:
        """Go on with a handshake. Nothing is read from a peer, and nothing sent to it, before its
        certificate is accepted."""
        if handshake not in self._handshakes:
            return  # given up since the selector named it
        connection = handshake.connection
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ, handshake)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE, handshake)
        except OSError as error:
            self._refuse(handshake, str(error))
        else:
            self._selector.unregister(connection)
            self._handshakes.finish(handshake)
            self._welcome(TlsConnection(connection))

    def _refuse(self, handshake: Handshake, reason: str) -> None:
        _LOG.warning("refused a peer that is no gateway of ours: %s", reason)
        self._handshakes.remove(handshake)
        self._close(handshake)

    def _close(self, handshake: Handshake) -> None:
        self._selector.unregister(handshake.connection)
        handshake.connection.close()

    def _welcome(self, connection: socket.socket | TlsConnection) -> None:
        gateway = _Gateway(next(self._numbers), connection)
        with self._lock:
            self._gateways[gateway.number] = gateway
        self._selector.register(connection, selectors.EVENT_READ, gateway)

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
            if isinstance(message, Submit) and gateway.has_said_hello:
                check_submit(message, vocab_size=self._info.vocab_size)
        except (ValueError, IndexError, InvalidRequestError) as error:
            self._refuse_frame(gateway, frame, error)
            return
        gateway.num_silent_beats = 0
        if isinstance(message, Hello):
            gateway.has_said_hello = True
            if message.protocol_version != PROTOCOL_VERSION:
                answer: Message = Failure(message=_version_text(message.protocol_version))
            elif self._is_draining:
                answer = Failure(message="the engine is about to end")
            else:
                answer = self._info
            self._post_now(gateway, answer)
        elif not gateway.has_said_hello:
            self._post_now(gateway, Failure(message="unknown gateway: say hello first"))
        elif isinstance(message, _Request):
            self._inbox.put((gateway.number, message))

    def _refuse_frame(self, gateway: _Gateway, frame: bytes, error: Exception) -> None:
        """Answer a request that cannot be, so that nobody waits for it; ignore anything else."""
        request_id = submitted_id(frame) if gateway.has_said_hello else None
        if request_id is None:
            _LOG.warning("ignored an invalid frame: %s", error)
            return
        _LOG.warning("gateway %d sent an impossible request: %s", gateway.number, error)
        if not isinstance(error, InvalidRequestError):
            error = InvalidRequestError(str(error))
        with self._lock:
            self._outbox.append((gateway.number, (refusal(request_id, error),)))

    def _beat(self) -> None:
        self._next_heartbeat_s = time.monotonic() + HEARTBEAT_INTERVAL_S
        if self._num_given_up:
            _LOG.warning("gave up %d unfinished handshakes for newer ones", self._num_given_up)
            self._num_given_up = 0
        for handshake in self._handshakes:
            handshake.num_beats += 1
            if handshake.num_beats > _HANDSHAKE_BEATS:
                self._refuse(handshake, "its handshake does not end")
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
        self._post(gateway, step_of(gateway.num_steps, outputs, stats))
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
