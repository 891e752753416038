"""The engine's end of the wire: a thread of its own that owns the ZeroMQ socket.

The step loop hands outputs over and takes messages in through two queues and never touches the
socket, so it never blocks on a gateway, and heartbeats go out while a long step computes.

A gateway is dead when its connection is gone, when it has been silent for `SILENCE_LIMIT_S`, or
when frames for it could not be sent for as long: nothing is dropped silently.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from penstock.engine.codec import decode, encode
from penstock.engine.messages import (
    HEARTBEAT_INTERVAL_S,
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
)
from penstock.engine.request import RequestOutput

_LOG = logging.getLogger(__name__)
_SEND_QUEUE_FRAMES = 256  # in ZeroMQ, before frames wait in `_Gateway.pending`
_RETRY_S = 0.005  # while frames wait


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway was declared dead: its sequences are to be aborted."""


@dataclass(slots=True)
class _Gateway:
    last_heard_s: float
    num_steps: int = 0
    stats: EngineStats | None = None  # the last that a step's frame carried
    pending: deque[bytes] = field(default_factory=deque)
    pending_since_s: float = 0.0


class WireBrokenError(Exception):
    """The wire's thread has ended by a bug of ours: the engine is deaf and must not live on."""


Inbound = tuple[bytes, Submit | Abort | DropPrefix | GatewayGone]


class Wire(threading.Thread):
    """Owns the ROUTER socket bound at `address`."""

    def __init__(self, address: str, info: EngineInfo) -> None:
        super().__init__(name="penstock-wire", daemon=True)
        self.stats = EngineStats()  # replaced by the step loop, read here
        self._info = info
        self._inbox: queue.SimpleQueue[Inbound | WireBrokenError | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[bytes, tuple[RequestOutput, ...]]] = deque()
        self._gateways: dict[bytes, _Gateway] = {}
        self._next_heartbeat_s = 0.0
        self._is_closing = False
        self._failure: str | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, _SEND_QUEUE_FRAMES)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.bind(address)
        # Wakes the thread out of its poll; each end is used by one thread alone.
        self._wake_in = context.socket(zmq.PAIR)
        self._wake_in.bind(f"inproc://wake-{id(self)}")
        self._wake_out = context.socket(zmq.PAIR)
        self._wake_out.connect(f"inproc://wake-{id(self)}")

    # -- called by the step loop ------------------------------------------------------------

    def receive(self, *, timeout_s: float | None) -> Iterator[Inbound]:
        """Everything that came in; waits for the first up to `timeout_s` (None: for ever)."""
        if timeout_s == 0.0 and self._inbox.empty():
            return  # as between most steps
        try:
            item = self._inbox.get(block=timeout_s != 0.0, timeout=timeout_s or None)
            while item is not None:
                if isinstance(item, WireBrokenError):
                    raise item
                yield item
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def interrupt(self) -> None:
        """Make a waiting `receive` return; safe in a signal handler."""
        self._inbox.put(None)

    def send(self, identity: bytes, outputs: tuple[RequestOutput, ...]) -> None:
        """One frame with all of a gateway's outputs of this iteration."""
        self._outbox.append((identity, outputs))

    def flush(self) -> None:
        """Let the thread send what `send` queued."""
        if self._outbox:
            self._wake()

    def close(self, failure: str | None = None) -> None:
        """Tell the gateways why, if there is a reason, and end the thread."""
        self._failure = failure
        self._is_closing = True
        self._wake()
        self.join(timeout=2.0)
        self._wake_out.close()

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # as many wake-ups as fit are already waiting
            self._wake_out.send(b"", zmq.NOBLOCK)

    # -- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _LOG.exception("the wire broke")
            self._inbox.put(WireBrokenError(f"{type(error).__name__}: {error}"))
        finally:
            self._router.close()
            self._wake_in.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._is_closing:
            events = dict(poller.poll(self._poll_timeout_ms()))
            if self._wake_in in events:
                self._wake_in.recv()
            if self._router in events:
                self._read_all()
            self._send_outbox()
            self._retry_pending()
            if time.monotonic() >= self._next_heartbeat_s:
                self._beat()
        self._say_goodbye()

    def _poll_timeout_ms(self) -> int:
        if any(gateway.pending for gateway in self._gateways.values()):
            return int(_RETRY_S * 1000)
        return max(0, int((self._next_heartbeat_s - time.monotonic()) * 1000)) + 1

    def _read_all(self) -> None:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(identity, decode(frames[-1]))
            except (ValueError, IndexError) as error:
                _LOG.warning("a frame nobody understands: %s", error)

    def _handle(self, identity: bytes, message: Message) -> None:
        gateway = self._gateways.get(identity)
        if isinstance(message, Hello):
            gateway = self._gateways.setdefault(identity, _Gateway(time.monotonic()))
            if message.protocol_version != PROTOCOL_VERSION:
                self._post(identity, Failure(message=_version_text(message.protocol_version)))
            else:
                self._post(identity, self._info)
        elif gateway is None:
            # Declared dead, or from before this engine started: it must say hello again.
            self._post_unknown(identity)
            return
        elif isinstance(message, Submit | Abort | DropPrefix):
            self._inbox.put((identity, message))
        gateway.last_heard_s = time.monotonic()

    def _send_outbox(self) -> None:
        while self._outbox:
            identity, outputs = self._outbox.popleft()
            gateway = self._gateways.get(identity)
            if gateway is not None:
                gateway.num_steps += 1
                stats = self.stats if self.stats is not gateway.stats else None
                gateway.stats = stats or gateway.stats
                step = Step(number=gateway.num_steps, outputs=outputs, stats=stats)
                self._post(identity, step)

    def _beat(self) -> None:
        now = time.monotonic()
        self._next_heartbeat_s = now + HEARTBEAT_INTERVAL_S
        for identity, gateway in list(self._gateways.items()):
            if now - gateway.last_heard_s > SILENCE_LIMIT_S:
                self._bury(identity, f"silent for {SILENCE_LIMIT_S:.0f} s")
            else:
                self._post(identity, Heartbeat(stats=self.stats))

    def _post(self, identity: bytes, message: Message) -> None:
        gateway = self._gateways[identity]
        gateway.pending.append(encode(message))
        if len(gateway.pending) == 1:
            gateway.pending_since_s = time.monotonic()
            self._drain(identity, gateway)

    def _post_unknown(self, identity: bytes) -> None:
        try:
            failure = Failure(message="unknown gateway: say hello first")
            self._router.send_multipart([identity, encode(failure)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # it does not listen either

    def _drain(self, identity: bytes, gateway: _Gateway) -> None:
        while gateway.pending:
            try:
                self._router.send_multipart([identity, gateway.pending[0]], zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:  # EHOSTUNREACH: its connection is gone
                self._bury(identity, error.strerror or str(error), level=logging.DEBUG)
                return
            gateway.pending.popleft()
            gateway.pending_since_s = time.monotonic()

    def _retry_pending(self) -> None:
        now = time.monotonic()
        for identity, gateway in list(self._gateways.items()):
            if not gateway.pending:
                continue
            self._drain(identity, gateway)
            if gateway.pending and now - gateway.pending_since_s > SILENCE_LIMIT_S:
                self._bury(identity, f"took no frame for {SILENCE_LIMIT_S:.0f} s")

    def _bury(self, identity: bytes, reason: str, *, level: int = logging.WARNING) -> None:
        if self._gateways.pop(identity, None) is not None:
            _LOG.log(level, "gateway %s is gone: %s", identity.hex()[:8], reason)
            self._inbox.put((identity, GatewayGone()))

    def _say_goodbye(self) -> None:
        self._send_outbox()
        if self._failure is not None:
            for identity in list(self._gateways):
                self._post(identity, Failure(message=self._failure))


def _version_text(theirs: int) -> str:
    return f"protocol {theirs} is not the engine's {PROTOCOL_VERSION}: upgrade both together"
