"""Engines that Ray places on its nodes and restarts there: `penstock serve --ray-address`.

A process of the supervisor's, beside the gateways, that is Ray's driver. A placement group spreads
a bundle for each engine over the nodes. An actor in each runs `penstock engine` as a process, which
registers in Redis as any other. No token passes through Ray. If a node is lost, Ray starts its
actor elsewhere; if this process dies, its actors end.

With `--max-replicas`, further actors come and go with the queue, outside the group, as each is a
demand of its own: while Ray's nodes have no room for one, Ray's autoscaler sees it wait.

Every node needs penstock, the model and the files of `--tls-*` at the same paths.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.engine.process.launch import Status, run_child
from penstock.engine.process.logs import configure_logging
from penstock.gateway.config import pool_name
from penstock.gateway.launch.settings import ENGINE_SETTINGS
from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.engines import EngineRecord, RedisEngines
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

_PLACED_WITHIN_S = 120.0
_LOOK_S = 1.0  # as often as engines renew their records
_BUSY_S = 3.0  # before another engine is started
_MAX_FILL = 0.5  # of the slots of the engines that would be left
_ANSWER_S = 5.0  # for an actor that Ray has placed
_MARGIN_S = 5.0
_LOG = logging.getLogger(__name__)
# Ends with the actor, however that ends.
_COMMAND = (
    "import os, sys; from penstock.engine.process.launch import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); "
    "from penstock.gateway.launch.cli import main; sys.exit(main())"
)


class RayEngine:
    """An actor: runs one engine, and ends when it ends, so that Ray starts another.

    Args:
        environment: the engine's options as `penstock engine` reads them.
        model: as the user named it.
    """

    def __init__(self, environment: Mapping[str, str], model: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            self._address = f"{host}:{free.getsockname()[1]}"
        command = [sys.executable, "-c", _COMMAND, str(os.getpid()), "engine", model]
        command += ["--listen", self._address, "--advertise", host]
        # The supervisor's own variables would override what it was told.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            command, env={**inherited, **environment}, stdin=subprocess.DEVNULL
        )
        self._is_stopping = False
        threading.Thread(target=self._watch, daemon=True).start()

    def pid(self) -> int:
        """The process id of the engine's supervisor."""
        return self._process.pid

    def address(self) -> str:
        """Under which the engine registers."""
        return self._address

    def stop(self) -> int:
        """Drain the engine; its exit code."""
        if not self._is_stopping:  # a second signal would not wait for streams
            self._is_stopping = True
            self._process.terminate()
        return self._process.wait()

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)


def environment_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The options that an engine shares with `penstock serve`, as environment variables."""
    found = {}
    for each in ENGINE_SETTINGS:
        value = settings.get(each.key, each.default)
        if each.is_list:
            value = ",".join(value) or each.default
        if value != each.default:
            found[each.variable] = str(value)
    return found


def serve(settings: Mapping[str, Any], status: Status) -> None:
    """The process: place the engines, then wait for SIGTERM.

    Raises:
        ConfigError: Ray is missing, not found at its address, or has no room.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    configure_logging(settings["log_level"], settings["log_format"])
    try:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ModuleNotFoundError as error:
        raise ConfigError("--ray-address needs Ray: pip install 'penstock-llm[ray]'") from error
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints; what starts us reads our output
    try:
        ray.init(address=settings["ray_address"], log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {settings['ray_address']}: {error}") from error
    share: dict[str, float] = {"CPU": settings["num_threads"] or 1}
    if settings["device"] == "cuda":
        share["GPU"] = 1
    group = placement_group([share] * settings["replicas"], strategy="SPREAD")
    if not group.wait(_PLACED_WITHIN_S):
        raise ConfigError(
            f"--replicas {settings['replicas']}: Ray's nodes have no room for so many with {share}"
        )

    def start(strategy: Any) -> Any:
        return (
            ray.remote(RayEngine)
            .options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=strategy,
            )
            .remote(environment_of(settings), settings["model"])
        )

    engines = [
        start(PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index))
        for index in range(settings["replicas"])
    ]
    more: list[Any] = []
    asyncio.run(_serve(settings, status, more, lambda: start("SPREAD")))
    draining = [engine.stop.remote() for engine in (*engines, *more)]
    ray.wait(draining, num_returns=len(draining), timeout=settings["shutdown_grace_s"])
    ray.shutdown()


async def _serve(
    settings: Mapping[str, Any], status: Status, more: list[Any], start: Callable[[], Any]
) -> None:
    """Until SIGTERM; starts and ends actors beyond the first ones, `more`, meanwhile."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    status.ready()
    scaling = None
    if settings["max_replicas"] not in (None, settings["replicas"]):
        scaling = asyncio.create_task(_scale(settings, more, start))
    await stopped.wait()
    if scaling is not None:
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)


async def _scale(settings: Mapping[str, Any], more: list[Any], start: Callable[[], Any]) -> None:
    model = pool_name(settings)
    found = RedisEngines(RedisLink(RedisAddress.parse(settings["redis_url"])), model)
    scaling = Scaling(
        least=settings["replicas"],
        most=settings["max_replicas"],
        queue_s=settings["scale_up_queue_ms"] / 1000,
        idle_s=settings["scale_down_after_s"],
        max_num_seqs=settings["max_num_seqs"],
    )
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                records = await found.records()
            except (StoreUnavailableError, UnreadableDataError):
                continue  # its link complains
            num = settings["replicas"] + len(more)
            change = scaling.decide(records, num, now_s=time.monotonic())
            if change > 0:
                _LOG.info("starting engine %d: the queue is long", num + 1)
                more.append(start())
            elif change < 0:
                _LOG.info("ending an engine of %d: fewer are enough", num)
                loads = {record.address: record.num_requests for record in records}
                await asyncio.to_thread(_end_least, more, loads, settings["shutdown_grace_s"])
    finally:
        await found.close()


def _end_least(engines: list[Any], loads: Mapping[str, int], grace_s: float) -> None:
    """Drain the engine with the least to do and take it out of the list; one that Ray has not
    placed yet goes first."""
    import ray

    asked = {engine.address.remote(): engine for engine in engines}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    if silent:
        least = asked[silent[0]]
    else:
        addresses = dict(zip(answered, ray.get(answered), strict=True))
        least = asked[min(answered, key=lambda ref: loads.get(addresses[ref], 0))]
        ray.wait([least.stop.remote()], timeout=grace_s + _MARGIN_S)
    engines.remove(least)
    ray.kill(least)


class Scaling:
    """How many engines there should be: one more while prompts wait too long, one fewer when the
    rest would have enough free slots.

    Args:
        least, most: numbers of engines.
        queue_s: predicted seconds in the queue, on average over the engines, that are too long.
        idle_s: how long fewer must have been enough.
        max_num_seqs: slots of an engine.
    """

    def __init__(
        self, *, least: int, most: int, queue_s: float, idle_s: float, max_num_seqs: int
    ) -> None:
        self._least, self._most, self._queue_s, self._idle_s = least, most, queue_s, idle_s
        self._max_num_seqs = max_num_seqs
        self._busy_since_s: float | None = None
        self._idle_since_s: float | None = None

    def decide(self, records: Sequence[EngineRecord], num: int, *, now_s: float) -> int:
        """+1, 0 or -1 engine.

        Args:
            records: of the engines that answer.
            num: of engines that should answer; no further one is started before they all do.
        """
        mean_s = sum(each.queue_s for each in records) / max(1, len(records))
        num_requests = sum(each.num_requests for each in records)
        is_busy = mean_s > self._queue_s
        is_idle = (
            not any(each.num_tokens_waiting for each in records)
            and num_requests <= (num - 1) * self._max_num_seqs * _MAX_FILL
        )
        self._busy_since_s = (self._busy_since_s or now_s) if is_busy else None
        self._idle_since_s = (self._idle_since_s or now_s) if is_idle else None
        change = 0
        if self._busy_since_s is not None and num < self._most and len(records) >= num:
            change = int(now_s - self._busy_since_s >= _BUSY_S)
        elif self._idle_since_s is not None and num > self._least:
            change = -int(now_s - self._idle_since_s >= self._idle_s)
        if change:
            self._busy_since_s = self._idle_since_s = None
        return change


if __name__ == "__main__":
    sys.exit(run_child("penstock-ray", serve))
