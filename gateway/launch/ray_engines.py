"""Engines that Ray places on its nodes and restarts there: `penstock serve --ray-address`.

A process of the supervisor's, beside the gateways, that is Ray's driver. A placement group spreads
a bundle for each engine over the nodes. An actor in each runs `penstock engine` as a process, which
registers in Redis as any other. No token passes through Ray. If a node is lost, Ray starts its
actor elsewhere; if this process dies, its actors end.

Every node needs penstock, the model and the files of `--tls-*` at the same paths.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.engine.logs import configure_logging
from penstock.engine.process import Status, run_child
from penstock.gateway.launch.flags import ENGINE_FLAGS

_PLACED_WITHIN_S = 120.0
# Ends with the actor, however that ends.
_COMMAND = (
    "import os, sys; from penstock.engine.process import die_with_parent; "
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
        command = [sys.executable, "-c", _COMMAND, str(os.getpid()), "engine", model]
        command += ["--listen", f"{host}:0", "--advertise", host]
        # The supervisor's own variables would override what it was told.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            command, env={**inherited, **environment}, stdin=subprocess.DEVNULL
        )
        self._is_stopping = False
        threading.Thread(target=self._watch, daemon=True).start()

    def pid(self) -> int:
        """Of the engine's supervisor."""
        return self._process.pid

    def stop(self) -> int:
        """Drain the engine; its exit code."""
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
    for flag in ENGINE_FLAGS:
        value = settings.get(flag.key, flag.default)
        if flag.is_list:
            value = ",".join(value) or flag.default
        if value != flag.default:
            found[flag.variable] = str(value)
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
    actor = ray.remote(RayEngine)
    engines = [
        actor.options(
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote(environment_of(settings), settings["model"])
        for index in range(settings["replicas"])
    ]
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    status.ready()
    stopped.wait()
    draining = [engine.stop.remote() for engine in engines]
    ray.wait(draining, num_returns=len(draining), timeout=settings["shutdown_grace_s"])
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(run_child("penstock-ray", serve))
