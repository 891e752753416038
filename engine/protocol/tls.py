"""Mutual TLS between gateways and engines on different machines.

Both sides show a certificate that the same authority has signed, for their role if the certificate
names roles, and the engine's must also name the host that the gateway connects to. TLS 1.3 only,
and no session is resumed: what an eavesdropper has recorded opens no second connection, and a
certificate is checked at each.

Certificates may be replaced in place, as cert-manager does: `CurrentContext` reads them again when
they have changed. Connections that exist keep theirs.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.engine.config import TlsFiles
from penstock.engine.errors import ConfigError

_LOG = logging.getLogger(__name__)


class CurrentContext:
    """The context for the next connection, made again when one of its files has changed.

    While the new files cannot be used (one of them may not be there yet), the last context stays.

    Args:
        make: raises ConfigError if a file cannot be used, here too.
        files: the paths that it reads.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Iterable[str]) -> None:
        self._make = make
        self._files = tuple(files)
        self._seen = self._stamps()
        self._context = make()

    def __call__(self) -> ssl.SSLContext:
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._context = self._make()
            except ConfigError as error:
                _LOG.warning("the last certificate stays in use: %s", error)
            else:
                _LOG.info("read the changed certificate of %s", self._files[0])
        return self._context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._files]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def engine_context(files: TlsFiles) -> ssl.SSLContext:
    """For an engine. Raises ConfigError if a file cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    return context


def gateway_context(files: TlsFiles) -> ssl.SSLContext:
    """For a gateway. Raises ConfigError if a file cannot be used."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        # With None, OpenSSL would ask for the password of an encrypted key on the terminal.
        context.load_cert_chain(files.cert, files.key, password="none was given")  # noqa: S106
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(files)
        raise ConfigError(f"cannot use --tls-cert, --tls-key, --tls-ca ({names}): {error}") from (
            error
        )
    return context


class TlsConnection:
    """A gateway's connection after its handshake, with a non-blocking socket's behaviour.

    The step loop sends while the transport's thread reads; OpenSSL allows one of them at a time.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def recv(self, size: int) -> bytes:
        """Raises BlockingIOError if nothing has arrived, OSError if the connection is lost."""
        try:
            with self._lock:
                return self._connection.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def send(self, data: memoryview) -> int:
        """Raises BlockingIOError if there is no room, OSError if the connection is lost."""
        try:
            with self._lock:
                return self._connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def close(self) -> None:
        self._connection.close()


def begin_handshake(accepted: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection on which `do_handshake` is due; it does not block."""
    accepted.setblocking(False)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(
        accepted, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
    )
