"""Starts one process of the server alone and prints the seconds of each part as JSON.

Run as `python -m penstock.load.bench.startup_probe gateway|engine LAUNCHED_S MODEL DTYPE`, where
LAUNCHED_S is `time.perf_counter()` when the process was made: all processes share that clock. Only
the standard library is imported before the parts begin.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.load.machine import CallTimer

# What each process imports before it reads its settings. Torch by itself, since it is most of it.
IMPORTS = {
    "gateway": ("penstock.gateway.launch.process",),
    "engine": ("torch", "penstock.engine.server"),
}


class Laps:
    """Seconds of one part after another."""

    def __init__(self, began_s: float) -> None:
        self._last_s = began_s
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End the part that began when the last one ended."""
        now_s = time.perf_counter()
        self.seconds[part] = now_s - self._last_s
        self._last_s = now_s


def probe(process: str, *, launched_s: float, model: str, dtype: str) -> dict[str, float]:
    """Start one process up to where it would wait for requests; return seconds by part."""
    laps = Laps(launched_s)
    laps.end("interpreter")
    for name in IMPORTS[process]:
        importlib.import_module(name)  # here and not above: this is what is timed
        laps.end("import torch" if name == "torch" else "imports")
    return _PARTS[process](laps, model, dtype)


def _start_gateway(laps: Laps, model: str, dtype: str) -> dict[str, float]:
    config = importlib.import_module("penstock.engine.config")
    gateway = importlib.import_module("penstock.gateway.config")
    app = importlib.import_module("penstock.gateway.app")
    app.create_app(
        gateway.GatewayConfig(
            engine_address="/nowhere", model=config.ModelConfig(model=model, dtype=dtype)
        )
    )
    laps.end("tokenizer and app")
    return laps.seconds


def _start_engine(laps: Laps, model: str, dtype: str) -> dict[str, float]:
    config = importlib.import_module("penstock.engine.config")
    startup = importlib.import_module("penstock.engine.startup")
    runner = importlib.import_module("penstock.engine.runner.model_runner")
    timer = CallTimer(
        {
            "weights": ((runner, "load_model"),),
            "KV cache": ((runner, "allocate_pool"), (runner, "allocate_host_tier")),
        }
    )
    with timer.attached():
        core, _ = startup.build_core(
            config.EngineConfig(model=config.ModelConfig(model=model, dtype=dtype))
        )
    laps.end("the rest")
    core.close()
    parts = timer.take()
    rest_s = laps.seconds.pop("the rest") - sum(parts.values())
    return {**laps.seconds, **parts, "the rest": rest_s}


_PARTS: dict[str, Callable[[Laps, str, str], dict[str, Any]]] = {
    "gateway": _start_gateway,
    "engine": _start_engine,
}


if __name__ == "__main__":
    _, which, launched, model_name, dtype_name = sys.argv
    seconds = probe(which, launched_s=float(launched), model=model_name, dtype=dtype_name)
    print(json.dumps(seconds))
