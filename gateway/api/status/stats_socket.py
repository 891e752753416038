"""`/v1/stats`: the numbers of `/metrics` on a WebSocket, as they change. The dashboard reads it.

    server → {"time": …, "engine": {…} | null, "series": {"num_requests_running": 3, …}}

`time` is the server's clock in seconds. `series` has the numbers that changed, by name and labels
as in `/metrics`, but without the prefix `penstock:`, the model's name, the worker and the engine:
several workers' and engines' numbers are added up; of shares and times the largest counts. Only an
admin's key gets the numbers of each tenant. A series that has disappeared is null. `engine` is sent
when it has changed: a description of the engine, or null while there is none. The first message is
complete. The server ignores what the client sends.

`GET /v1/stats/history` has the same series of the last hour, every 15 s, as columns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.gateway.api.responses.websocket import accepted_subprotocol
from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.telemetry.metrics import Metrics, is_by_tenant

INTERVAL_S = 0.5  # between two messages
HISTORY_INTERVAL_S, HISTORY_S = 15.0, 3600.0
_PREFIX = "penstock:"
_INNER_LABELS = frozenset({"model_name", "worker", "engine"})
_SHARES = frozenset({"kv_cache_usage_perc", "engine_seconds_since_last_step"})  # have no sum


_NOTHING_SENT: dict[str, Any] | None = {}  # None would mean that there is no engine


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers at one point in time.

    Attributes:
        time: Unix time in seconds.
    """

    time: float
    series: Mapping[str, float]

    def without_tenants(self) -> Sample:
        series = {
            name: value for name, value in self.series.items() if not is_by_tenant(_PREFIX + name)
        }
        return Sample(self.time, series)


class StatsSocket:
    """The endpoint. Metrics are collected at most twice per interval, for all clients together."""

    def __init__(self, engine: EnginePool, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._newest = Sample(0.0, {})
        self._fresh_until_s = 0.0
        self._collecting = asyncio.Lock()
        self._history = _History()
        self._remembering: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start remembering. Must be called in the event loop."""
        self._remembering = asyncio.create_task(self._remember())

    async def close(self) -> None:
        if self._remembering is not None:
            self._remembering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._remembering

    async def _remember(self) -> None:
        while True:
            # One of its own: watchers get a newer one.
            self._history.add(Sample(time.time(), series_of(await self._metrics.families())))
            await asyncio.sleep(HISTORY_INTERVAL_S)

    @operation("GET /v1/stats/history", "The metrics of the last hour.", "StatsHistory")
    async def history(self, request: Request) -> Response:
        """By name and labels as in `/metrics`: a number for each of `times`, null where there was
        none; or a single one, where all are the same. As this gateway process has seen them."""
        names_tenants = caller_of(request.scope).is_admin
        return json_response(self._history.columns(names_tenants=names_tenants))

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept(subprotocol=accepted_subprotocol(websocket.scope["subprotocols"]))
        leaving = asyncio.create_task(_left(websocket))
        names_tenants = caller_of(websocket.scope).is_admin
        sent, sent_engine = Sample(0.0, {}), _NOTHING_SENT
        try:
            while not leaving.done():
                sample, engine = await self._sample(), self._description()
                if not names_tenants:
                    sample = sample.without_tenants()
                message: dict[str, Any] = {
                    "time": sample.time,
                    "series": changes(sent.series, sample.series),
                }
                if engine != sent_engine:
                    message["engine"] = engine
                await websocket.send_text(orjson.dumps(message).decode())
                sent, sent_engine = sample, engine
                await asyncio.wait([leaving], timeout=INTERVAL_S)
        except WebSocketDisconnect:
            pass
        finally:
            leaving.cancel()

    async def _sample(self) -> Sample:
        """The newest numbers, collected again if they are too old."""
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
            "weight_bytes": info.weight_bytes,
            "max_num_seqs": info.max_num_seqs,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "bytes_per_block": info.bytes_per_block,
            **({} if len(self._engine.links) < 2 else {"num_engines": self._engine.num_engines}),
        }


class _History:
    """The samples of the last hour, as rows of plain numbers."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._rows: deque[tuple[float, array[float]]] = deque(
            maxlen=round(HISTORY_S / HISTORY_INTERVAL_S)
        )

    def add(self, sample: Sample) -> None:
        row = array("d", [math.nan]) * len(self._places)
        for name, value in sample.series.items():
            place = self._places.setdefault(name, len(self._places))
            if place < len(row):
                row[place] = value
            else:
                row.append(value)
        self._rows.append((sample.time, row))

    def columns(self, *, names_tenants: bool) -> dict[str, Any]:
        series: dict[str, Any] = {}
        for name, place in self._places.items():
            if not names_tenants and is_by_tenant(_PREFIX + name):
                continue
            column = [row[place] if place < len(row) else math.nan for _, row in self._rows]
            if all(value == column[0] for value in column):
                series[name] = column[0]
            elif not all(map(math.isnan, column)):
                series[name] = [None if math.isnan(value) else value for value in column]
        return {"times": [time for time, _ in self._rows], "series": series}


async def _left(websocket: WebSocket) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


def series_of(families: Iterable[Metric]) -> dict[str, float]:
    """Our own series by name and labels, added up over the workers."""
    series: dict[str, float] = {}
    for family in families:
        if not family.name.startswith(_PREFIX):
            continue  # metrics of the process, without our prefix
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in _INNER_LABELS
            )
            name = sample.name.removeprefix(_PREFIX)
            key = f"{name}{{{labels}}}" if labels else name
            known = series.get(key, 0.0)
            series[key] = max(known, sample.value) if name in _SHARES else known + sample.value
    return series


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """The series that changed; None for one that has disappeared."""
    changed: dict[str, float | None] = {
        name: value for name, value in after.items() if before.get(name) != value
    }
    return changed | dict.fromkeys(before.keys() - after.keys())
