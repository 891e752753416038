"""`/v1/stats`: the numbers of `/metrics` on a WebSocket, as they change. The dashboard reads it.

    server → {"time": …, "engine": {…} | null, "series": {"num_requests_running": 3, …}}

`time` is the server's clock in seconds. `series` has the changed numbers by name and labels as
`/metrics` writes them, without the prefix `penstock:`, the model's name and the worker: those of
several workers are added up. A series that is gone is null. `engine` is there when it has changed:
what serves, or null while nothing does. The first message after the handshake has it all. What the
client sends is not listened to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client.core import Metric
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.gateway.api.responses.websocket import accepted_subprotocol
from penstock.gateway.engines.engine_client import EngineClient
from penstock.gateway.telemetry.metrics import Metrics

INTERVAL_S = 0.5  # between two messages
_PREFIX = "penstock:"
_INNER_LABELS = frozenset({"model_name", "worker"})


_NOTHING_SAID: dict[str, Any] | None = {}  # while None says that there is no engine


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of one moment.

    Attributes:
        time: Unix time in seconds.
    """

    time: float
    series: Mapping[str, float]


class StatsSocket:
    """The endpoint. However many watch, the metrics are collected at most twice an interval."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._newest = Sample(0.0, {})
        self._fresh_until_s = 0.0
        self._collecting = asyncio.Lock()

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept(subprotocol=accepted_subprotocol(websocket.scope["subprotocols"]))
        leaving = asyncio.create_task(_left(websocket))
        said, said_engine = Sample(0.0, {}), _NOTHING_SAID
        try:
            while not leaving.done():
                sample, engine = await self._sample(), self._description()
                message: dict[str, Any] = {
                    "time": sample.time,
                    "series": changes(said.series, sample.series),
                }
                if engine != said_engine:
                    message["engine"] = engine
                await websocket.send_text(orjson.dumps(message).decode())
                said, said_engine = sample, engine
                await asyncio.wait([leaving], timeout=INTERVAL_S)
        except WebSocketDisconnect:
            pass
        finally:
            leaving.cancel()

    async def _sample(self) -> Sample:
        """The newest numbers, collected by whoever finds them old."""
        async with self._collecting:
            if time.monotonic() >= self._fresh_until_s:
                series = series_of(await self._metrics.families())
                self._newest = Sample(time.time(), series)
                self._fresh_until_s = time.monotonic() + INTERVAL_S / 2
        return self._newest

    def _description(self) -> dict[str, Any] | None:
        info = self._engine.info
        if info is None:
            return None
        return {
            "model": self._metrics.model_name,
            "device": info.device,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "max_num_seqs": info.max_num_seqs,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "bytes_per_block": info.bytes_per_block,
        }


async def _left(websocket: WebSocket) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


def series_of(families: Iterable[Metric]) -> dict[str, float]:
    """Our own numbers by name and labels, those of several workers added up."""
    series: dict[str, float] = {}
    for family in families:
        if not family.name.startswith(_PREFIX):
            continue  # the process's own
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in _INNER_LABELS
            )
            name = sample.name.removeprefix(_PREFIX)
            key = f"{name}{{{labels}}}" if labels else name
            series[key] = series.get(key, 0.0) + sample.value
    return series


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """What leads from one to the other; None is gone."""
    changed: dict[str, float | None] = {
        name: value for name, value in after.items() if before.get(name) != value
    }
    return changed | dict.fromkeys(before.keys() - after.keys())
