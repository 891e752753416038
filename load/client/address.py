"""Where a server is, out of what a user types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from penstock.engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server's address.

    Attributes:
        netloc: host and port as the Host header has them.
        prefix: the path that the API lies below, `/v1` not included.
    """

    is_tls: bool
    host: str
    port: int
    netloc: str
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Self:
        """Of `http://host:port`, with or without `/v1`.

        Raises:
            ConfigError: it is no such address.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is no address of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{base_url!r} is no address of a server, such as http://host:port")
        is_tls = parts.scheme == "https"
        return cls(
            is_tls=is_tls,
            host=parts.hostname,
            port=port or (443 if is_tls else 80),
            netloc=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )
