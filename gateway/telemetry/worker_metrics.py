"""What gateway processes ask each other, so that any of them can answer `/metrics` and `/ready`.

Each worker listens on a Unix socket beside the engine's, in the server's own folder, and answers a
line (`metrics`, `ready`) with JSON. The worker that serves `/metrics` asks the others and gives
every series the label `worker`. So nothing is written between scrapes, and a worker that restarts
resets only its own series, as Prometheus expects of a counter. A worker that does not answer in
time is left out, which `penstock:gateway_workers` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.core import GaugeMetricFamily, Metric

_TIMEOUT_S = 1.0
_METRICS, _READY = b"metrics\n", b"ready\n"
Collect = Callable[[], Awaitable[Sequence[Metric]]]


class Workers:
    """One of several workers.

    Args:
        engine_address: a path in the server's folder.
        index: of this worker, from 0.
        num: the number of workers.
    """

    def __init__(self, engine_address: str, *, index: int, num: int) -> None:
        self._directory = Path(engine_address).parent
        self._index = index
        self._num = num
        self._server: asyncio.Server | None = None

    async def start(self, collect: Collect, is_ready: Callable[[], bool]) -> None:
        """Answer the other workers' `metrics` with the result of `collect`, and `ready` with that
        of `is_ready`."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                if await reader.readline() == _READY:
                    writer.write(orjson.dumps(is_ready()))
                else:
                    writer.write(_dumped(await collect()))
                await writer.drain()
            writer.close()

        self._server = await asyncio.start_unix_server(answer, self._path(self._index))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def join(self, own: Sequence[Metric]) -> list[Metric]:
        """This worker's metrics merged with those of the others, by family."""
        answers = await self._ask_others(_METRICS)
        found = {self._index: own} | {
            index: _loaded(families) for index, families in answers.items()
        }
        joined: dict[str, Metric] = {}
        for index, families in sorted(found.items()):
            for family in families:
                into = joined.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "worker": str(index)}
                    into.add_sample(sample.name, labels, sample.value)
        num = GaugeMetricFamily("penstock:gateway_workers", "Gateway processes that answer.")
        num.add_metric([], len(found))
        return [*joined.values(), num]

    async def are_ready(self) -> bool:
        """Whether all other workers that answer are ready."""
        return all((await self._ask_others(_READY)).values())

    async def _ask_others(self, question: bytes) -> dict[int, Any]:
        """The answers of the workers that answer, by index."""
        others = [index for index in range(self._num) if index != self._index]
        answers = await asyncio.gather(*(self._ask(index, question) for index in others))
        found = zip(others, answers, strict=True)
        return {index: answer for index, answer in found if answer is not None}

    async def _ask(self, index: int, question: bytes) -> Any:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(question)
                    return orjson.loads(await reader.read(-1))
                finally:
                    writer.close()
        except (OSError, TimeoutError, orjson.JSONDecodeError):
            return None

    def _path(self, index: int) -> Path:
        return self._directory / f"gateway-{index}.sock"


def _dumped(families: Sequence[Metric]) -> bytes:
    return orjson.dumps(
        [
            (
                family.name,
                family.documentation,
                family.type,
                [(sample.name, sample.labels, sample.value) for sample in family.samples],
            )
            for family in families
        ]
    )


def _loaded(content: list[tuple[str, str, str, list[Any]]]) -> list[Metric]:
    families = []
    for name, text, kind, samples in content:
        family = Metric(name, text, kind)
        for sample in samples:
            family.add_sample(*sample)
        families.append(family)
    return families
