"""A ZeroMQ DEALER on the event loop: frames are handed over as they come, sends do not wait.

pyzmq's own asyncio socket makes a future of every frame, which costs a stream of single tokens more
than all the rest of the gateway does for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio

_LINGER_MS = 200


class EngineSocket:
    """Connects under a fresh identity; call it inside the event loop.

    Args:
        address: of a ROUTER; it may not be there yet.
        on_frame: is called with every frame.

    Attributes:
        disconnected: set once a connection was lost.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        on_frame: Callable[[bytes], None],
    ) -> None:
        plain: Any = zmq.Socket  # the context would make them asyncio's
        made = context.socket(zmq.DEALER, socket_class=plain)
        self._socket = cast("zmq.Socket[bytes]", made)
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.disconnected = asyncio.Event()
        events = f"inproc://engine-socket-{id(self)}"
        self._socket.monitor(events, zmq.EVENT_DISCONNECTED)
        monitor = context.socket(zmq.PAIR, socket_class=plain)
        self._monitor = cast("zmq.Socket[bytes]", monitor)
        self._monitor.connect(events)
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._read_monitor()  # a file descriptor tells of what comes after one has looked

    def send(self, frame: bytes) -> bool:
        """Whether there was room for it."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may take the notice that something can be read off the file descriptor.
        self._loop.call_soon(self._read)
        return True

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)

    def _read_monitor(self) -> None:
        # It tells of one kind of event alone, so what it says of it is of no interest.
        if self._monitor.poll(0):
            self.disconnected.set()
