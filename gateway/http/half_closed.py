"""Connections whose client has closed its side: whether it still reads.

A client may end its side after its request (`shutdown(SHUT_WR)`) and read the answer. One that is
gone (`close`) sends the same FIN. They differ in what comes back for the next byte: the kernel of a
client that is gone answers RST, which ends the connection. So a byte is sent that says nothing:

    before the answer          100 Continue (RFC 9110 §15.2: a client reads over it), if the answer
                               does not begin soon
    within a chunked answer    0, the first digit of the next chunk's size (RFC 9112 §7.1)

No event loop polls a socket whose input has ended. Its RST is found by an epoll of our own, which
the loop polls instead.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PROBE_AFTER_S = 0.5
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def can_outlive_input(transport: asyncio.Transport, cycle: RequestResponseCycle) -> bool:
    """Whether an answer can go on after the end of the client's input: whether it would be found
    out that the client is gone.

    TLS has no half-closed connections, and HTTP/1.0 no `100 Continue` (proxies that speak it close
    the connection when their client has left).
    """
    return (
        hasattr(select, "epoll")
        and cycle.scope["http_version"] == "1.1"
        and transport.get_extra_info("sslcontext") is None
    )


def send_nothing(transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
    """Send what says nothing, at whatever place of the answer."""
    if not cycle.response_started:
        transport.write(_CONTINUE)
    elif cycle.chunked_encoding:
        transport.write(b"0")


class Hangups:
    """Tells when the clients of half-closed connections are gone."""

    _of_loops: ClassVar[dict[asyncio.AbstractEventLoop, Hangups]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}  # by file descriptor
        loop.add_reader(self._epoll.fileno(), self._tell)

    @classmethod
    def watch(
        cls,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        on_hangup: Callable[[], None],
    ) -> Callable[[], None]:
        """Call `on_hangup` once the client is gone, unless the returned function is called first.
        It must be called before the connection is closed."""
        if loop not in cls._of_loops:
            cls._of_loops[loop] = cls(loop)
        watcher, fd = cls._of_loops[loop], transport.get_extra_info("socket").fileno()
        watcher._epoll.register(fd, 0)  # hang-ups and errors are told in any case
        watcher._callbacks[fd] = on_hangup
        return lambda: watcher._forget(fd)

    def _tell(self) -> None:
        for fd, _ in self._epoll.poll(0):
            on_hangup = self._callbacks[fd]
            self._forget(fd)
            on_hangup()

    def _forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is None:
            return
        self._epoll.unregister(fd)
        if not self._callbacks:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            del self._of_loops[self._loop]
