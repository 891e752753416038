"""Settings of the supervisors: what neither a gateway nor an engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.engine.settings.declaration import Group, Need, Section, setting
from penstock.engine.settings.kinds import (
    COUNT,
    ENDPOINT,
    FILE,
    HOST,
    PORT,
    POSITIVE_MILLISECONDS,
    SECONDS,
    Kind,
    whole,
)

REPLICAS = whole(0, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(Section):
    """What `penstock serve` and `penstock engine` do with their children."""

    # fmt: off
    # The children's environment has it, as the Hub's client reads it.
    hf_token: str | None = setting(None, Group.MODEL, "token for the Hub; default: HF_TOKEN",
        Kind("KEY", "a key"), is_secret=True, is_daily=True)
    step_timeout_s: float = setting(300.0, Group.SCHEDULING, "log the engine's "
        "stacks and restart it when a step makes no progress for so long; 0: never", SECONDS)
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(LaunchConfig):
    """Where `penstock serve` listens, and how many processes it starts."""

    # fmt: off
    host: str = setting("127.0.0.1", Group.LISTEN, "address to listen on; the default accepts only "
        "this machine", HOST, is_daily=True)
    port: int = setting(8000, Group.LISTEN, "port to listen on; 0 picks a free one", PORT,
        is_daily=True)
    uds: str | None = setting(None, Group.LISTEN, "path of a Unix socket to listen on, instead of "
        "--host and --port", FILE)
    api_workers: int = setting(1, Group.LISTEN, "gateway processes that share the port; more than "
        "one need --redis-url", COUNT, aliases=("--api-server-count", "-asc"),
        needs=(Need(("redis_url",), "gateways share their state through Redis"),), is_daily=True)
    replicas: int = setting(1, Group.ENGINES, "engines on this machine, each with its share of the "
        "cores or a GPU of its own; 0: none, only others'", REPLICAS,
        aliases=("--data-parallel-size", "-dp"), is_daily=True)
    ray_address: str | None = setting(None, Group.ENGINES, "have Ray place the --replicas, on its "
        "cluster at this address; needs pip install 'penstock-llm[ray]' and --redis-url",
        needs=(Need(("discover",), "Ray's engines register in Redis"),))
    max_replicas: int | None = setting(None, Group.ENGINES, "have Ray start up to this many "
        "engines while the queue is long; default: always --replicas", REPLICAS,
        needs=(Need(("ray_address",), "elsewhere an autoscaler decides"),))
    scale_up_queue_ms: float = setting(1000, Group.ENGINES, "start another one when new prompts "
        "are predicted to wait longer than this on average", POSITIVE_MILLISECONDS)
    scale_down_after_s: float = setting(60.0, Group.ENGINES, "end one when fewer have been enough "
        "for this long", SECONDS)
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunchConfig(LaunchConfig):
    """Where `penstock engine` listens, and under which address gateways reach it."""

    # fmt: off
    listen: str = setting("127.0.0.1:7000", Group.LISTEN, "where to listen for gateways; port 0 "
        "picks a free one", ENDPOINT, is_daily=True)
    advertise: str | None = setting(None, Group.LISTEN, "the address to register, if it is another "
        "one; its certificate must name the host", HOST, is_daily=True)
    # fmt: on


def check_replicas(settings: Mapping[str, Any]) -> None:
    """Check numbers of engines against each other.

    Raises:
        ConfigError: there would be no engine, or Ray could start fewer than it must.
    """
    num, most = settings["replicas"], settings["max_replicas"]
    if most is not None and not 0 < num <= most:
        raise ConfigError(f"--max-replicas {most} must be at least --replicas {num}, and that 1")
    if num == 0 and not (settings["discover"] or settings["engine"]):
        raise ConfigError("--replicas 0 needs --engine or --discover: there would be no engine")
