"""Fetches images from hosts that the operator has listed (`--allowed-media-domains`).

A caller chooses the URL, so this must not become a way into the network behind the gateway. Every
hop, redirects included, must name a listed host. Its addresses are looked up once, all of them must
be public, and the connection goes to one of these very addresses, so that a second DNS answer
changes nothing. A listed host that is itself an IP address may be private: the operator wrote it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from penstock.gateway.errors import RequestRefusedError

_MAX_REDIRECTS = 3
_MAX_HEAD_BYTES = 16 << 10
_MAX_URL_CHARS = 2048
_MAX_AT_ONCE = 4  # of a gateway process; further ones wait, within their time
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

    async def fetch(self, url: str, *, param: str) -> bytes:
        """The file at a URL.

        Raises:
            RequestRefusedError: 400: the host is not listed, or does not send an image's worth of
                bytes in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await self._follow(url)
        except _UnusableError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"it was not there within {self._timeout_s:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            reason = "the connection failed, or its answer is not valid HTTP"
        raise RequestRefusedError(
            f"{param}: the image cannot be fetched: {reason}", code="invalid_image_url", param=param
        )

    async def _follow(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._get(self._checked(url))
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

    async def _get(self, parts: SplitResult) -> _Answer:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        address = await _public_address(host, port)
        reader, writer = await asyncio.open_connection(
            address,
            port,
            ssl=ssl.create_default_context() if parts.scheme == "https" else None,
            server_hostname=host if parts.scheme == "https" else None,
            limit=_MAX_HEAD_BYTES,
        )
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            writer.write(
                f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nUser-Agent: penstock\r\n"
                "Connection: close\r\n\r\n".encode("ascii")
            )
            return await self._read(reader)
        finally:
            writer.transport.abort()  # nothing more is wanted, whatever it still sends

    async def _read(self, reader: asyncio.StreamReader) -> _Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, *_ = head[0].split(" ", 2)
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise ValueError(head[0])
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if int(status) != 200:
            return _Answer(int(status), headers, b"")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _UnusableError("it is compressed, although that was not asked for")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return _Answer(200, headers, await self._read_chunks(reader))
        length = headers.get("content-length")
        if length is None:
            return _Answer(200, headers, await self._read_some(reader, None))
        if not length.isdecimal():
            raise ValueError(length)
        return _Answer(200, headers, await self._read_some(reader, int(length)))

    async def _read_some(self, reader: asyncio.StreamReader, length: int | None) -> bytes:
        """So many bytes; None: all until the end."""
        self._check_size(length or 0)
        if length is not None:
            return await reader.readexactly(length)
        data = bytearray()
        while more := await reader.read(_MAX_HEAD_BYTES):
            data += more
            self._check_size(len(data))
        return bytes(data)

    async def _read_chunks(self, reader: asyncio.StreamReader) -> bytes:
        data = bytearray()
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            if size < 0:
                raise ValueError(size)
            self._check_size(len(data) + size)
            data += await reader.readexactly(size)
            await reader.readexactly(2)
        return bytes(data)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise _UnusableError(f"it has more than {self._max_bytes} bytes")


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


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and of nothing within it that leads
    back (IPv4 in IPv6)."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None or found in _NAT64:
            return False
    return found.is_global and not found.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
