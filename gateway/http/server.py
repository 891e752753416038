"""uvicorn's server with its own accept loop, so that limits apply from the accept on.

uvloop's listener does not count TLS handshakes as connections and gives them 60 s, and without a
free descriptor it silently closes what it accepts. Here a connection is counted and timed from the
moment it is accepted. Beyond `max_connections`, a few are accepted to be answered 503; beyond
those, connections are closed at once. The log has a summary of what was turned away.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.config import create_ssl_context

from penstock.engine.errors import ConfigError
from penstock.engine.protocol.tls import CurrentContext
from penstock.gateway.http.http_protocol import LimitedHttpProtocol

_LOG = logging.getLogger(__name__)
_MAX_ACCEPTS = 64  # in one turn of the event loop
_RETRY_S = 0.5  # after an accept that failed for lack of descriptors or memory
_REPORT_TICKS = 20  # of uvicorn's, 10 a second
_SWEEP_TICKS = 100
_MAX_UNSENT_BYTES = 128 << 10  # of a connection, in the kernel, beyond what its reader has room for
_TLS_CLOSE_S = 5.0  # for the peer's close_notify


def https_context(config: uvicorn.Config) -> ssl.SSLContext:
    """Raises ConfigError if certificate or key cannot be used."""
    assert config.ssl_certfile is not None
    try:
        context = create_ssl_context(
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            password=config.ssl_keyfile_password,
            ssl_version=config.ssl_version,
            cert_reqs=config.ssl_cert_reqs,
            ca_certs=config.ssl_ca_certs,
            ciphers=config.ssl_ciphers,
        )
    except (OSError, ssl.SSLError) as error:
        files = " and ".join(_tls_files(config))
        raise ConfigError(f"cannot use the certificate and key of {files}: {error}") from error
    context.options |= ssl.OP_NO_RENEGOTIATION  # OpenSSL's default only since 3.0
    return context


def _tls_files(config: uvicorn.Config) -> list[str]:
    return [str(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]


class HttpServer(uvicorn.Server):
    """Serves listening sockets; `http` of its settings is a `limited_protocol`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._protocol = cast("type[LimitedHttpProtocol]", config.http)
        self._limits = self._protocol.limits
        self._tls: CurrentContext | None = None
        if config.is_ssl:
            self._tls = CurrentContext(partial(https_context, config), _tls_files(config))
        self._listeners: list[socket.socket] = []
        self._retry: asyncio.TimerHandle | None = None
        self._closing: set[Any] = set()  # connections that were closing at the last sweep
        self._events: Counter[tuple[int, str]] = Counter()  # not yet in the log

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # uvicorn itself listens on none
        self._listeners = list(sockets or ())
        for listener in self._listeners:
            listener.setblocking(False)
            # Its connections inherit this. The kernel would otherwise take megabytes for a reader
            # that does not read, who would not be found to be slow before.
            if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
            listener.listen(self.config.backlog)
        self._start_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting()
        await super().shutdown(sockets)
        self._report()

    async def on_tick(self, counter: int) -> bool:
        if counter % _REPORT_TICKS == 0:
            self._report()
        if counter % _SWEEP_TICKS == 0:
            self._abort_unclosed()
        return await super().on_tick(counter)

    # -- accepting ----------------------------------------------------------------------------

    def _start_accepting(self) -> None:
        self._retry = None
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)

    def _pause_accepting(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)

    def stop_accepting(self) -> None:
        """Stop accepting for good; existing connections stay."""
        self._pause_accepting()
        self._listeners = []
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors or memory
                self._note(logging.WARNING, f"failed accepts: {error.strerror}")
                self._pause_accepting()
                loop = asyncio.get_running_loop()
                self._retry = loop.call_later(_RETRY_S, self._start_accepting)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connections, limits = self.server_state.connections, self._limits
        is_beyond = len(connections) >= limits.max_connections
        if len(connections) >= limits.max_connections + limits.max_refused_connections:
            connection.close()
            self._note(logging.WARNING, "connections closed at once, beyond those answered 503")
            return
        if is_beyond:
            self._note(
                logging.WARNING, f"connections beyond --max-connections ({limits.max_connections})"
            )
        arrival = _Arrival(self, connection, is_beyond=is_beyond)
        connections.add(arrival)  # type: ignore[arg-type]
        arrival.opening = asyncio.get_running_loop().create_task(self._open(arrival))
        # Which comes even if it is cancelled before it begins, as the server ends.
        arrival.opening.add_done_callback(lambda _: self._opened(arrival))

    async def _open(self, arrival: _Arrival) -> None:
        connection, arrival.connection = arrival.connection, None
        assert connection is not None
        tls = self._tls
        options: dict[str, Any] = {}
        if tls is not None:
            options = {
                "ssl": tls(),
                "ssl_handshake_timeout": self._limits.header_timeout_s,
                "ssl_shutdown_timeout": _TLS_CLOSE_S,
            }
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(lambda: arrival, connection, **options)
        except OSError:  # the peer is gone, or its TLS handshake failed or took too long
            if tls is not None:
                self._note(logging.INFO, "TLS handshakes that failed or took too long")

    def _opened(self, arrival: _Arrival) -> None:
        arrival.opening = None
        if arrival.connection is not None:
            arrival.connection.close()
        self.server_state.connections.discard(arrival)

    def make_protocol(self) -> LimitedHttpProtocol:
        return self._protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    # -- periodic work ------------------------------------------------------------------------

    def _abort_unclosed(self) -> None:
        """Abort connections that are still closing since the last sweep, because their peer does
        not read the unsent data."""
        closing = {
            connection
            for connection in self.server_state.connections
            if connection.transport is not None and connection.transport.is_closing()
        }
        for connection in closing & self._closing:
            connection.transport.abort()
        self._closing = closing

    def _note(self, level: int, event: str) -> None:
        self._events[level, event] += 1

    def _report(self) -> None:
        for (level, event), num in self._events.items():
            _LOG.log(level, "%d %s", num, event)
        self._events.clear()


class _Arrival(asyncio.Protocol):
    """An accepted connection before its transport is ready. During the TLS handshake it has no HTTP
    protocol yet, which saves memory."""

    transport = None

    def __init__(self, server: HttpServer, connection: socket.socket, *, is_beyond: bool) -> None:
        self.opening: asyncio.Task[None] | None = None
        self.connection: socket.socket | None = connection  # until the event loop has it
        self._server = server
        self._is_beyond = is_beyond

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.server_state.connections.discard(self)
        protocol = self._server.make_protocol()
        if self._is_beyond:
            protocol.refuse_connection()
        transport.set_protocol(protocol)
        protocol.connection_made(cast("asyncio.Transport", transport))

    def shutdown(self) -> None:
        """uvicorn calls this for every connection when the server ends."""
        if self.opening is not None:
            self.opening.cancel()
