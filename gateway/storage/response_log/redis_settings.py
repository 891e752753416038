"""Settings of the response logs in Redis."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.storage.response_log.log_store import DEFAULT_TTL_S


@dataclass(slots=True, kw_only=True)
class RedisLogSettings:
    """How logs are kept in Redis, and how long gateways wait for Redis and for each other. A store
    reads them whenever it needs them, so that a change takes effect at once.

    Attributes:
        ttl_s: how long after its end a log can be read.
        max_log_bytes: of one log in Redis; a longer one is not resumable.
        ack_timeout_s: how long an entry waits for Redis before it is shown without being stored;
            longer where the measured round trip is long.
        request_timeout_s: how long a new response waits for Redis before it is refused; it, too,
            is longer where the round trip is.
        outage_s: how long Redis may be unavailable before readers of other gateways' responses get
            an error.
        lease_s: a gateway without a heartbeat for so long counts as dead.
        beat_s: time between two heartbeats; several must fit into a lease.
        without_engine_s: how long a dead gateway's responses wait for a gateway that can run them;
            then any gateway takes them.
        hand_over_s: how long a gateway that stops tries to tell the others.
    """

    ttl_s: float = DEFAULT_TTL_S
    max_log_bytes: int = 64 << 20
    ack_timeout_s: float = 0.25
    request_timeout_s: float = 1.0
    outage_s: float = 10.0
    lease_s: float = 3.0
    beat_s: float = 0.5
    without_engine_s: float = 12.0
    hand_over_s: float = 1.0
