"""Parses and checks `--redis-url`.

    redis://[user:password@]host[:port][/db]            one server
    rediss://…?ssl_ca_certs=FILE                        the same over TLS
    unix:///path/to/socket?db=0                         the same over a local socket
    redis+sentinel://[…@]host[:port],host…/service[/db] the master that Sentinels report
    redis+cluster://[…@]host[:port],host…               a cluster, by any of its nodes

`rediss+sentinel` and `rediss+cluster` use TLS. The query may have options under redis-py's names;
special characters in a password must be percent-encoded.

No message contains a part of the URL that could be a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from redis.asyncio.connection import parse_url

from penstock.engine.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix")
_OPTIONS = frozenset(
    (
        "db",
        "username",
        "password",
        "client_name",
        "max_connections",
        "socket_timeout",
        "socket_connect_timeout",
        "health_check_interval",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "sentinel_username",
        "sentinel_password",
    )
)
_SINGLE_ONLY = frozenset(("db", "ssl_ca_path"))  # not options of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A parsed `--redis-url`. Its string form names hosts, but no password.

    Attributes:
        service: the Sentinels' name of the master; None without Sentinels.
        hosts: (host, port) of a server, of Sentinels or of a cluster's nodes; empty for a socket.
        options: redis-py's options for every connection.
        sentinel_options: the same for connections to Sentinels.
    """

    hosts: tuple[tuple[str, int], ...]
    service: str | None = None
    is_cluster: bool = False
    is_tls: bool = False
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.hosts) or self.options["path"]

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Read a URL.

        Raises:
            ConfigError: the URL has none of the forms above. The message quotes nothing that could
                be part of a password.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise _bad_url("not a valid URL") from None
        scheme, _, kind = parts.scheme.partition("+")
        if scheme not in _SCHEMES or kind not in ("", "sentinel", "cluster"):
            raise _bad_url(
                "must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
            )
        if "@" in parts.path + parts.query or parts.fragment:
            raise _bad_url("characters such as / ? # @ in a password must be percent-encoded")
        is_unix = scheme == "unix"
        if is_unix and (kind or not parts.path.strip("/")):
            raise _bad_url("unix:// needs the path of one socket")
        hosts = () if is_unix else _hosts(parts, default_port=26379 if kind == "sentinel" else 6379)
        if len(hosts) > 1 and not kind:
            raise _bad_url("several hosts need redis+sentinel:// or redis+cluster://")
        path = [] if is_unix else [part for part in parts.path.split("/") if part]
        service = path.pop(0) if kind == "sentinel" and path else None
        if kind == "sentinel" and service is None:
            raise _bad_url("redis+sentinel://hosts/service: the service's name is missing")
        options = _options(parts, scheme)
        options.setdefault("db", _database(path))
        if kind == "cluster":
            if options["db"]:
                raise _bad_url("a cluster has no numbered databases")
            options = {key: value for key, value in options.items() if key not in _SINGLE_ONLY}
        of_sentinel = {
            name: options.pop(f"sentinel_{name}")
            for name in ("username", "password")
            if f"sentinel_{name}" in options
        }
        return cls(
            hosts=hosts,
            service=service,
            is_cluster=kind == "cluster",
            is_tls=scheme == "rediss",
            options=options,
            sentinel_options=of_sentinel,
        )


def _hosts(parts: SplitResult, *, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for text in parts.netloc.rpartition("@")[2].split(","):
        try:
            one = urlsplit(f"//{text}")
            port = one.port or default_port
        except ValueError:
            raise _bad_url("the port must be between 1 and 65535") from None
        if not one.hostname:
            raise _bad_url("a host is missing")
        hosts.append((one.hostname, port))
    return tuple(hosts)


def _options(parts: SplitResult, scheme: str) -> dict[str, Any]:
    """redis-py's options from user name, password and query."""
    login, at, _ = parts.netloc.rpartition("@")
    query = f"?{parts.query}" if parts.query else ""
    path = parts.path if scheme == "unix" else ""
    host = "" if scheme == "unix" else "host"
    try:
        options = dict(parse_url(f"{scheme}://{login}{at}{host}{path}{query}"))
    except ValueError as error:  # its message contains only the option's name
        raise _bad_url(str(error)) from None
    is_path = scheme == "unix"
    for name in ("host",) if is_path else ("host", "connection_class"):
        options.pop(name, None)
    unknown = options.keys() - _OPTIONS - ({"path", "connection_class"} if is_path else set())
    if unknown:
        raise _bad_url(f"unknown option {min(unknown)!r}")
    if scheme != "rediss" and (tls := sorted(name for name in options if name.startswith("ssl_"))):
        raise _bad_url(f"{tls[0]} needs rediss://")
    return options


def _database(path: list[str]) -> int:
    if not path:
        return 0
    if len(path) > 1 or not path[0].isdecimal():
        raise _bad_url("the path after the host must be the number of a database")
    return int(path[0])


def _bad_url(why: str) -> ConfigError:
    return ConfigError(f"--redis-url: {why}")
