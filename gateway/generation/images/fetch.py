"""Fetches images from hosts that the operator has listed (`--allowed-media-domains`).

A caller chooses the URL, so this must not become a way into the network behind the gateway. Every
hop, redirects included, must name a listed host. Its addresses are looked up once, all of them must
be public, and the connection goes to one of these very addresses, so that a second DNS answer
changes nothing. A listed host that is itself an IP address may be private: the operator wrote it.

Nor may a host keep this process busy. Answers are read in threads: packets and TLS records of one
byte each would cost the event loop as much as large ones. A thread pauses after little; tiny chunks
and too few bytes a second are refused; and one host gets only some of the fetches at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urljoin, urlsplit

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images.public_addresses import is_public

_MAX_REDIRECTS = 3
_MAX_HEAD_BYTES = 16 << 10
_MAX_URL_CHARS = 2048
_MAX_AT_ONCE = 4  # of a gateway process; further ones wait, within their time
_MAX_AT_ONCE_OF_HOST = 2
_PIECE_BYTES = 256 << 10
_LITTLE_BYTES, _PAUSE_S = 8 << 10, 0.001  # after a piece of less, so long until the next
_MIN_BYTES_PER_S, _LENIENT_S = 8 << 10, 1.0  # of a body; in the first second there may be none
# Each chunk costs as much as some hundred bytes: these many, and one more per so many bytes.
_MAX_SMALL_CHUNKS, _MIN_CHUNK_BYTES = 64, 256
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _UnusableError(Exception):
    """Why an image cannot be fetched, for the caller."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class ImageFetcher:
    """
    Args:
        domains: hosts, each with `:PORT` unless it is the scheme's own; empty: none.
        max_bytes: of an image.
        timeout_s: for an image with all its redirects, time spent waiting for a turn included.
    """

    def __init__(self, domains: Sequence[str], *, max_bytes: int, timeout_s: float) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._turns_of_host = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(_MAX_AT_ONCE_OF_HOST)
        )  # as many as are listed
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="image-fetch")

    async def fetch(self, url: str, *, param: str) -> bytes:
        """The file at a URL.

        Raises:
            RequestRefusedError: 400: the host is not listed, or does not send an image's worth of
                bytes in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._follow(url, limit.when() or 0.0)
        except _UnusableError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"it was not there within {self._timeout_s:g} s"
        except (OSError, ValueError, EOFError):
            reason = "the connection failed, or its answer is not valid HTTP"
        raise RequestRefusedError(
            f"{param}: the image cannot be fetched: {reason}", code="invalid_image_url", param=param
        )

    async def _follow(self, url: str, until_s: float) -> bytes:
        """The file, by `until_s` of the event loop's clock."""
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_REDIRECTS + 1):
            parts = self._checked(url)
            async with self._turns_of_host[parts.netloc.lower()], self._turns:
                host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
                address = await _public_address(host, port)
                opened: list[socket.socket] = []
                get = partial(self._get, parts, (address, port), until_s - loop.time(), opened)
                try:
                    answer = await loop.run_in_executor(self._threads, get)
                except asyncio.CancelledError:
                    for each in opened:  # which ends the thread
                        with contextlib.suppress(OSError):
                            each.shutdown(socket.SHUT_RDWR)
                    raise
            if answer.status in _REDIRECTS and "location" in answer.headers:
                url = urljoin(url, answer.headers["location"])
            elif answer.status == 200:
                return answer.body
            else:
                raise _UnusableError(f"its host answered with status {answer.status}")
        raise _UnusableError(f"it was redirected more than {_MAX_REDIRECTS} times")

    def _checked(self, url: str) -> SplitResult:
        """The parts of a URL whose host is listed."""
        if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
            raise _UnusableError(f"a URL has at most {_MAX_URL_CHARS} visible ASCII characters")
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
            raise _UnusableError("a URL needs http or https, a host, and no user name")
        host, port = parts.hostname, parts.port or _PORTS[parts.scheme]
        shown = f"[{host}]" if ":" in host else host
        named = {f"{shown}:{port}"}
        if port == _PORTS[parts.scheme]:
            named.add(shown)
        if not named & self._domains:
            raise _UnusableError(
                "its host is not among --allowed-media-domains"
                if self._domains
                else "this server fetches no images: send a data URL, or start it with "
                f"--allowed-media-domains {host}"
            )
        return parts

    def _get(
        self,
        parts: SplitResult,
        address: tuple[str, int],
        patience_s: float,
        opened: list[socket.socket],
    ) -> _Answer:
        """What the host at an address answers. Runs in a thread, which ends in time by itself, or
        when what it adds to `opened` is shut down."""
        until_s = time.monotonic() + patience_s
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with (
            socket.create_connection(address, max(patience_s, 0.001)) as plain,
            _secured(plain, parts) as connection,
        ):
            opened.append(connection)
            connection.sendall(
                f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nUser-Agent: penstock\r\n"
                "Connection: close\r\n\r\n".encode("ascii")
            )
            return self._read(_Pieces(connection, until_s))

    def _read(self, pieces: _Pieces) -> _Answer:
        head = pieces.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, status, *_ = head[0].split(" ", 2)
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise ValueError(head[0])
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if int(status) != 200:
            return _Answer(int(status), headers, b"")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _UnusableError("it is compressed, although that was not asked for")
        pieces.expect_a_body()
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return _Answer(200, headers, self._read_chunks(pieces))
        length = headers.get("content-length")
        if length is None:
            return _Answer(200, headers, self._read_all(pieces))
        if not length.isdecimal():
            raise ValueError(length)
        self._check_size(int(length))
        return _Answer(200, headers, pieces.exactly(int(length)))

    def _read_all(self, pieces: _Pieces) -> bytes:
        with contextlib.suppress(EOFError):
            while True:
                self._check_size(pieces.num_held)
                pieces.more()
        return pieces.exactly(pieces.num_held)

    def _read_chunks(self, pieces: _Pieces) -> bytes:
        data, num_chunks = bytearray(), 0
        while size := int(pieces.until(b"\r\n").split(b";")[0], 16):
            if size < 0:
                raise ValueError(size)
            self._check_size(len(data) + size)
            data += pieces.exactly(size + 2)[:-2]
            num_chunks += 1
            if num_chunks > _MAX_SMALL_CHUNKS + len(data) // _MIN_CHUNK_BYTES:
                raise _UnusableError(f"its chunks have less than {_MIN_CHUNK_BYTES} bytes each")
        return bytes(data)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise _UnusableError(f"it has more than {self._max_bytes} bytes")


def _secured(plain: socket.socket, parts: SplitResult) -> socket.socket:
    """With https, TLS whose handshake comes with the first bytes sent."""
    if parts.scheme != "https":
        return plain
    return ssl.create_default_context().wrap_socket(
        plain, server_hostname=parts.hostname, do_handshake_on_connect=False
    )


class _Pieces:
    """What a host sends.

    Args:
        until_s: on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._connection = connection
        self._until_s = until_s
        self._held = bytearray()
        self._begins = 0  # what of it is not taken yet
        self._num_bytes = 0  # of the body, as far as it is here
        self._begun_s = math.inf  # the body; before, there is no least rate

    @property
    def num_held(self) -> int:
        return len(self._held) - self._begins

    def expect_a_body(self) -> None:
        """From now on the least rate counts."""
        self._begun_s = time.monotonic()
        self._num_bytes = self.num_held

    def more(self) -> None:
        """Wait for the next piece.

        Raises:
            EOFError: there is none.
            TimeoutError: it was not there in time.
        """
        due_s = self._begun_s + _LENIENT_S + self._num_bytes / _MIN_BYTES_PER_S
        self._connection.settimeout(max(min(due_s, self._until_s) - time.monotonic(), 0.001))
        try:
            piece = self._connection.recv(_PIECE_BYTES)
        except TimeoutError:
            if due_s > self._until_s:
                raise
            text = f"its host sends less than {_MIN_BYTES_PER_S} bytes a second"
            raise _UnusableError(text) from None
        if not piece:
            raise EOFError
        if len(piece) < _LITTLE_BYTES:
            time.sleep(_PAUSE_S)
        del self._held[: self._begins]
        self._begins = 0
        self._held += piece
        self._num_bytes += len(piece)
        if time.monotonic() > self._until_s:
            raise TimeoutError

    def until(self, end: bytes) -> bytes:
        """Up to and with `end`. Raises: ValueError: it is not within a head's length."""
        while (at := self._held.find(end, self._begins)) < 0:
            if self.num_held > _MAX_HEAD_BYTES:
                raise ValueError("no end")
            self.more()
        if at - self._begins > _MAX_HEAD_BYTES:
            raise ValueError("a late end")
        return self._taken(at + len(end) - self._begins)

    def exactly(self, num_bytes: int) -> bytes:
        while self.num_held < num_bytes:
            self.more()
        return self._taken(num_bytes)

    def _taken(self, num_bytes: int) -> bytes:
        taken = bytes(self._held[self._begins : self._begins + num_bytes])
        self._begins += num_bytes
        return taken


async def _public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses are public, or of a host that is an address."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _UnusableError("its host has no address") from error
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        raise _UnusableError("its host has an address that is not public")
    return addresses[0]
