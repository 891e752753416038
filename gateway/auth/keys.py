"""The accepted API keys: those of `--api-key` and those of the key file, which may change.

The file lists keys, their tenants, and what the tenants may do. It is TOML, or JSON of the same
structure if its name ends in `.json`:

    [[keys]]                            # key or sha256 (of the key, in hex), tenant, id?, admin?
    [tenants.NAME]                      # all of them optional, see `_TENANT_FIELDS`

The file is checked when a key is offered, at most once a second, and read again when it has
changed. If it has become invalid, the previous keys stay and the log says so once. No part of a key
ever appears in an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import math
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.gateway.auth.callers import ANYBODY, Caller, TenantLimits
from penstock.gateway.storage.tenant_shares import NO_QUOTA, StoreQuota

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_Stamp = tuple[int, int, int] | None
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SURROGATES = re.compile(r"[\ud800-\udfff]")  # JSON can write them alone
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MAX_PRIORITY = 1 << 31
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
_TENANT_FIELDS = frozenset(
    {
        "weight", "priority", "min_priority", "max_priority", "allow_cache_salt", "cache_salt",
        "adapters", "store_bytes", "store_objects",
        *_LIMITS,
    }
)  # fmt: skip
_KEY_FIELDS = frozenset({"key", "sha256", "tenant", "id", "admin"})


class KeyRing:
    """
    Args:
        keys: the operator's, of the tenant `default`, without limits.
        file: the key file.
        clock: monotonic seconds.

    Attributes:
        is_open: the server needs no key.

    Raises:
        ConfigError: the file is invalid.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        digests = [digest_of(key.encode()) for key in keys]
        self._given = {digest: Caller(key_id=name_of(digest), is_admin=True) for digest in digests}
        self.is_open = file is None and not digests
        self._file = file
        self._clock = clock
        self._stamp = _stamp(file)
        self._due_s = clock() + _POLL_S
        self._callers = self._given if file is None else self._given | read_key_file(file)
        self._by_id = self._ids()
        self._quotas = self._store_quotas()

    def find(self, offered: Sequence[bytes]) -> Caller | None:
        """The caller of an offered key. Always compares every key, by digests of equal length, so
        that the time taken reveals nothing."""
        self._poll()
        found = None
        for key in offered:
            digest = digest_of(key)
            for known, caller in self._callers.items():
                if hmac.compare_digest(digest, known):
                    found = caller
        return found

    def by_id(self, key_id: str) -> Caller | None:
        """The caller of a key that is still valid."""
        self._poll()
        return ANYBODY if self.is_open else self._by_id.get(key_id)

    def of_tenant(self, tenant: str) -> Caller | None:
        """A caller of a tenant that has a key, for what the tenant asked for before."""
        self._poll()
        if self.is_open:
            return ANYBODY if tenant == ANYBODY.tenant else None
        return next((each for each in self._by_id.values() if each.tenant == tenant), None)

    def store_quota(self, tenant: str) -> StoreQuota:
        """What a tenant may store, by the key file."""
        return self._quotas.get(tenant, NO_QUOTA)

    def _ids(self) -> dict[str, Caller]:
        return {caller.key_id: caller for caller in self._callers.values()}

    def _store_quotas(self) -> dict[str, StoreQuota]:
        return {caller.tenant: caller.store_quota for caller in self._callers.values()}

    def _poll(self) -> None:
        if self._file is None or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + _POLL_S
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = self._given | read_key_file(self._file)
        except ConfigError as error:
            _LOG.error("keeping the previous API keys: %s", error)
        else:
            self._by_id = self._ids()
            self._quotas = self._store_quotas()
            _LOG.info("reloaded the key file: %d keys", len(self._callers))


def _stamp(file: Path | None) -> _Stamp:
    """Changes with the file, also when another file of the same age replaces it."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


def digest_of(key: bytes) -> bytes:
    """The digest of a key; only digests are kept and compared."""
    return hashlib.sha256(key).digest()


def name_of(digest: bytes) -> str:
    """The id of a key without a configured one."""
    return f"key-{digest.hex()[:12]}"


def read_key_file(path: Path) -> dict[bytes, Caller]:
    """Callers by the SHA-256 digest of their keys.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # The parser's message may quote a key, so only its position is reported.
        found = re.search(r"line \d+,? column \d+", str(error))
        where = f" at {found.group()}" if found else ""
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"the key file {path} is not {kind}{where}") from None
    try:
        return _callers(values)
    except ConfigError as error:
        raise ConfigError(f"the key file {path}: {error}") from None


def _callers(values: Any) -> dict[bytes, Caller]:
    _check(isinstance(values, dict), "the top level must be a table")
    _check_fields(values, frozenset({"keys", "tenants"}), "the top level")
    keys, tenants = values.get("keys", []), values.get("tenants", {})
    _check(isinstance(keys, list), "keys must be a list of tables")
    _check(isinstance(tenants, dict), "tenants must be a table of tables")
    of_tenant = {name: _tenant(name, table) for name, table in tenants.items()}
    callers: dict[bytes, Caller] = {}
    for number, table in enumerate(keys, 1):
        digest, caller = _key(f"key {number}", table, of_tenant)
        _check(digest not in callers, f"key {number} appears twice")
        callers[digest] = caller
    ids = [caller.key_id for caller in callers.values()]
    _check(len(set(ids)) == len(ids), "two keys have the same id")
    return callers


def _key(where: str, table: Any, tenants: Mapping[str, Caller]) -> tuple[bytes, Caller]:
    _check(isinstance(table, dict), f"{where} must be a table")
    _check_fields(table, _KEY_FIELDS, where)
    key, sha256 = table.get("key"), table.get("sha256")
    _check((key is None) != (sha256 is None), f"{where} needs either key or sha256")
    if key is not None:
        is_text = isinstance(key, str) and bool(key.strip()) and _SURROGATES.search(key) is None
        _check(is_text, f"{where}: key must be a string")
        digest = digest_of(key.encode())
    else:
        is_digest = isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None
        _check(is_digest, f"{where}: sha256 must be 64 hexadecimal digits")
        digest = bytes.fromhex(str(sha256))
    key_id = table.get("id", name_of(digest))
    _check_name(key_id, f"{where}: id")
    tenant = table.get("tenant")
    _check_name(tenant, f"{where}: tenant")
    _check(tenant in tenants, f"{where}: there is no tenant {tenant!r} in the file")
    is_admin = table.get("admin", False)
    _check(isinstance(is_admin, bool), f"{where}: admin must be true or false")
    return digest, dataclasses.replace(tenants[tenant], key_id=key_id, is_admin=is_admin)


def _tenant(name: Any, table: Any) -> Caller:
    where = "a tenant's name"
    _check_name(name, where)
    where = f"tenant {name}"
    _check(isinstance(table, dict), f"{where} must be a table")
    _check_fields(table, _TENANT_FIELDS, where)
    weight = _number(table, "weight", where, default=1.0)
    is_weight = weight is not None and 1e-3 <= weight <= 1e3
    _check(is_weight, f"{where}: weight must be between 0.001 and 1000")
    assert weight is not None
    salt = table.get("cache_salt", name)
    _check_name(salt, f"{where}: cache_salt")
    priority = _priority(table, "priority", where)
    allows_salt = table.get("allow_cache_salt", False)
    _check(isinstance(allows_salt, bool), f"{where}: allow_cache_salt must be true or false")
    return Caller(
        tenant=name,
        weight=weight,
        priority=0 if priority is None else priority,
        priority_bounds=_bounds(table, where),
        allows_cache_salt=allows_salt,
        cache_salt=salt,
        limits=_limits(table, where),
        store_quota=_store_quota(table, where),
        adapters=_adapters(table, where),
    )


def _adapters(table: Mapping[str, Any], where: str) -> frozenset[str] | None:
    names = table.get("adapters")
    if names is None:
        return None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    _check(is_list, f"{where}: adapters must be a list of names")
    return frozenset(names)


def _bounds(table: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    least = _priority(table, "min_priority", where)
    greatest = _priority(table, "max_priority", where)
    if least is None and greatest is None:
        return None
    _check(
        least is not None and greatest is not None and least <= greatest,
        f"{where}: min_priority and max_priority must be set together, min_priority not greater",
    )
    assert least is not None
    assert greatest is not None
    return least, greatest


def _limits(table: Mapping[str, Any], where: str) -> TenantLimits:
    numbers = {name: _number(table, name, where) for name in _LIMITS}
    for name, number in numbers.items():
        _check(number is None or number >= 1, f"{where}: {name} must be at least 1")
    at_once = numbers["max_concurrent_requests"]
    return TenantLimits(
        requests_per_minute=numbers["requests_per_minute"],
        tokens_per_minute=numbers["tokens_per_minute"],
        max_concurrent_requests=None if at_once is None else int(at_once),
    )


def _store_quota(table: Mapping[str, Any], where: str) -> StoreQuota:
    values = {name: table.get(name) for name in ("store_bytes", "store_objects")}
    for name, value in values.items():
        is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _check(value is None or is_integer, f"{where}: {name} must be a whole number from 1 on")
    return StoreQuota(num_bytes=values["store_bytes"], num_objects=values["store_objects"])


def _number(
    table: Mapping[str, Any], name: str, where: str, *, default: float | None = None
) -> float | None:
    value = table.get(name, default)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _check(is_number and math.isfinite(value), f"{where}: {name} must be a number")
    return float(value)


def _priority(table: Mapping[str, Any], name: str, where: str) -> int | None:
    value = table.get(name)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_valid = value is None or (is_integer and -_MAX_PRIORITY <= value < _MAX_PRIORITY)
    _check(is_valid, f"{where}: {name} must be a 32-bit integer")
    return value


def _check_name(value: Any, where: str) -> None:
    is_name = isinstance(value, str) and _NAME.fullmatch(value) is not None
    _check(is_name, f"{where} must be 1 to 64 letters, digits, '_', '.' or '-'")


def _check_fields(table: Mapping[Any, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(str(name) for name in set(table) - known)
    # An unknown name is not quoted either: it might be a misplaced key.
    _check(not unknown, f"{where} has {len(unknown)} unknown field(s); known: "
           f"{', '.join(sorted(known))}")  # fmt: skip


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise ConfigError(message)
