"""The caller of a request: the tenant of its API key, and what the tenant may do.

`guard` finds the caller and puts it into the ASGI scope; all other modules read it from there. What
one does as an admin leaves a line of the logger `penstock.audit` (`audited`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.tenant_shares import NO_QUOTA, StoreQuota
from penstock.gateway.telemetry.request_record import CURRENT_REQUEST

_AUDIT = logging.getLogger("penstock.audit")
_SCOPE_KEY = "penstock.caller"
_DEADLINE_HEADER = "x-request-deadline-ms"
_MAX_DEADLINE_MS = 1e9
_ANY_PRIORITY = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """A tenant's limits over all its keys and all gateways. None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent_requests: int | None = None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A tenant, identified by one of its keys.

    Attributes:
        tenant: owner of conversations, responses and prefix cache.
        key_id: the key's name in logs; not secret.
        weight: the tenant's share of the engine, relative to other tenants' weights.
        priority: of requests that set none, or may not set one.
        priority_bounds: minimum and maximum to which a request's priority is clamped; None: a
            request's priority is ignored.
        allows_cache_salt: whether a request's own cache salt is used.
        cache_salt: separates its prefix cache from other tenants'; empty shares it.
        store_quota: what the tenant may store by the key file.
        adapters: names of the adapters that it may use; None: all.
        is_admin: may see numbers of all tenants by name, load adapters, and end any request.
    """

    tenant: str = "default"
    key_id: str = ""
    weight: float = 1.0
    priority: int = 0
    priority_bounds: tuple[int, int] | None = _ANY_PRIORITY
    allows_cache_salt: bool = True
    cache_salt: str = ""
    limits: TenantLimits = NO_LIMITS
    store_quota: StoreQuota = NO_QUOTA
    adapters: frozenset[str] | None = None
    is_admin: bool = False

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request that asks for `asked`; None: it asks for none."""
        if asked is None or self.priority_bounds is None:
            return self.priority
        least, greatest = self.priority_bounds
        return min(max(asked, least), greatest)

    def salt_of(self, asked: str | None) -> str:
        """The cache salt of a request that asks for `asked`; None: it asks for none."""
        own = (asked or "") if self.allows_cache_salt else ""
        # A tenant's salt has no line break, so different pairs cannot produce the same text.
        return f"{self.cache_salt}\n{own}" if self.cache_salt else own


ANYBODY = Caller(is_admin=True)  # of a server without keys
STRANGER = Caller()  # without a valid key, where none is needed


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of an HTTP request or a WebSocket."""
    caller: Caller = scope.get(_SCOPE_KEY, ANYBODY)
    return caller


def set_caller(scope: MutableMapping[str, Any], caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller
    if caller is STRANGER:
        return
    record = CURRENT_REQUEST.get()
    if record is not None:
        record.tenant = caller.tenant


@contextlib.contextmanager
def audited(scope: MutableMapping[str, Any], action: str) -> Iterator[dict[str, str]]:
    """Leave a line about an administrative call when it ends: who did what, and the outcome, which
    is "done" or a failure's code. Into the dict goes what it is about.

    Raises:
        RequestRefusedError: the caller is no admin.
    """
    caller, what, outcome = caller_of(scope), dict[str, str](), "done"
    try:
        if not caller.is_admin:
            raise RequestRefusedError(
                "this needs the key of an admin", code="permission_denied", status=403
            )
        yield what
    except BaseException as error:
        outcome = getattr(error, "code", None) or type(error).__name__
        raise
    finally:
        _AUDIT.info(
            "%s by key %r of tenant %r: %s: %s",
            action,
            caller.key_id,
            caller.tenant,
            ", ".join(map(repr, what.values())) or "-",
            outcome,
            extra={"action": action, "key_id": caller.key_id, **what, "outcome": outcome},
        )


def deadline_of(scope: MutableMapping[str, Any]) -> float | None:
    """Seconds within which the caller wants the first token; None if it sets no deadline.

    Raises:
        RequestRefusedError: `x-request-deadline-ms` is not a valid number.
    """
    text = Headers(scope=scope).get(_DEADLINE_HEADER)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= _MAX_DEADLINE_MS:
        raise RequestRefusedError(
            f"{_DEADLINE_HEADER} must be a number of milliseconds above 0",
            code="invalid_value",
            param=_DEADLINE_HEADER,
        )
    return milliseconds / 1e3
