"""Compressed bodies of requests (RFC 9110 §8.4): gzip, deflate, and zstd where Python has it.

A body must not be larger than the limit, compressed or not: no coding's output grows beyond it, and
zstd's window is at most 8 MiB (RFC 9659).
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

from penstock.gateway.errors import RequestRefusedError

_MAX_CODINGS = 3  # of one body
_MAX_MEMBERS = 100  # gzip files or zstd frames, one after the other: each costs a copy of the rest
_ZSTD_WINDOW_LOG = 23
_GZIP, _ZLIB, _RAW = 31, 15, -15  # `wbits`


class _TooLargeError(Exception):
    """There is more output than the limit."""


def _inflated(data: bytes, max_bytes: int, *, wbits: int) -> bytes:
    return _joined(data, max_bytes, lambda: zlib.decompressobj(wbits))


def _inflated_gzip(data: bytes, max_bytes: int) -> bytes:
    return _inflated(data, max_bytes, wbits=_GZIP)


def _inflated_deflate(data: bytes, max_bytes: int) -> bytes:
    """In zlib's format, or without it, as some clients send (RFC 9110 §8.4.1.2)."""
    try:
        return _inflated(data, max_bytes, wbits=_ZLIB)
    except zlib.error:
        return _inflated(data, max_bytes, wbits=_RAW)


def _zstd_library() -> Any:
    """Python's own since 3.14, or the package with the same for earlier ones; None: neither."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_ZSTD = _zstd_library()


def _expanded_zstd(data: bytes, max_bytes: int) -> bytes:
    options = {_ZSTD.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _joined(data, max_bytes, lambda: _ZSTD.ZstdDecompressor(options=options))


def _joined(data: bytes, max_bytes: int, make: Callable[[], Any]) -> bytes:
    """What one or several compressed streams contain, one after the other."""
    parts: list[bytes] = []
    room = max_bytes
    for _ in range(_MAX_MEMBERS):
        decoder = make()
        part = decoder.decompress(data, room + 1)
        if len(part) > room:
            raise _TooLargeError
        if not decoder.eof:
            raise EOFError
        parts.append(part)
        room -= len(part)
        data = decoder.unused_data
        if not data:
            return b"".join(parts)
    raise EOFError


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _inflated_gzip,
    "deflate": _inflated_deflate,
    **({} if _ZSTD is None else {"zstd": _expanded_zstd}),
}
_ERRORS: tuple[type[Exception], ...] = (
    EOFError,
    zlib.error,
    *(() if _ZSTD is None else (_ZSTD.ZstdError,)),
)
ACCEPTED = ", ".join(_DECODERS)


def codings_of(header: str) -> list[str]:
    """The codings of a `Content-Encoding`, in the order in which they were applied.

    Raises:
        RequestRefusedError: 415: one of them is not supported, or they are too many.
    """
    named = [name.strip().lower() for name in header.split(",")]
    codings = [name.removeprefix("x-") for name in named if name not in ("", "identity")]
    if len(codings) > _MAX_CODINGS or not _DECODERS.keys() >= set(codings):
        refused = RequestRefusedError(
            f"Content-Encoding {header!r} is not supported; this server accepts {ACCEPTED}, and at "
            f"most {_MAX_CODINGS} of them",
            code="unsupported_content_encoding",
            param="Content-Encoding",
            status=415,
        )
        refused.headers = {"Accept-Encoding": ACCEPTED}
        raise refused
    return codings


def decoded(body: bytes, codings: list[str], max_bytes: int) -> bytes | None:
    """The body without its codings; None if it is larger than the limit.

    Raises:
        RequestRefusedError: it is not what its codings say.
    """
    for name in reversed(codings):
        try:
            body = _DECODERS[name](body, max_bytes)
        except _TooLargeError:
            return None
        except _ERRORS as error:
            reason = str(error) or "it does not end where its data ends"
            raise RequestRefusedError(
                f"Content-Encoding: the body is not valid {name}: {reason}",
                code="invalid_content_encoding",
                param="Content-Encoding",
            ) from error
    return body
