"""Samples of a server during a soak: memory and descriptors of its processes, its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

Family = Mapping[str, psutil.Process]

# Figures of /metrics that are 0 when nothing runs: the ends of their names, with a state.
IDLE_METRICS = ("num_requests_running", "num_requests_waiting", "num_requests_swapped",
                "kv_cache_usage_perc", "kv_blocks used", "kv_slots allocated")  # fmt: skip
_MAX_INTERVAL_S = 1.0
_NUM_SAMPLES = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process at one time."""

    name: str
    pid: int
    rss_bytes: int
    num_fds: int
    num_sockets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A server at one time. Metrics are by name and state, summed over the other labels; empty
    without any."""

    at_s: float  # on `time.perf_counter()`
    processes: tuple[ProcessSample, ...]  # live ones
    metrics: Mapping[str, float]
    num_streams: int  # that clients wait for

    @property
    def holds(self) -> list[tuple[int, int, int]]:
        """The open descriptors and sockets of each process."""
        return [(each.pid, each.num_fds, each.num_sockets) for each in self.processes]

    @property
    def is_idle(self) -> bool:
        return not any(self.metrics.get(name, 0.0) for name in IDLE_METRICS)


@dataclass(slots=True)
class Watch:
    """Takes samples of the processes in `family`."""

    family: Callable[[], Family]
    http: aiohttp.ClientSession
    num_streams: Callable[[], int]
    samples: list[Sample] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self, duration_s: float) -> AsyncIterator[None]:
        """Take samples during the block."""
        interval_s = min(_MAX_INTERVAL_S, duration_s / _NUM_SAMPLES * 10)
        task = asyncio.create_task(self._run(interval_s))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def sample(self) -> Sample:
        return Sample(
            at_s=time.perf_counter(),
            processes=tuple(self._processes()),
            metrics=await self._metrics(),
            num_streams=self.num_streams(),
        )

    async def settled(self, within_s: float, is_settled: Callable[[Sample], bool]) -> Sample:
        """The first sample that is settled and like the one before it; the last one if none is
        in time."""
        give_up_s = time.perf_counter() + within_s
        last, sample = None, await self.sample()
        while time.perf_counter() < give_up_s:
            if last is not None and is_settled(sample) and last.holds == sample.holds:
                break
            await asyncio.sleep(_MAX_INTERVAL_S / 2)
            last, sample = sample, await self.sample()
        return sample

    async def _run(self, interval_s: float) -> None:
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(interval_s)

    def _processes(self) -> Iterator[ProcessSample]:
        """The live processes; one may end while it is sampled."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for name, process in self.family().items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield _sample(name, process)

    async def _metrics(self) -> Mapping[str, float]:
        try:
            async with self.http.get("/metrics", timeout=aiohttp.ClientTimeout(5)) as response:
                return figures_of(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, OSError, TimeoutError):
            return {}


def _sample(name: str, process: psutil.Process) -> ProcessSample:
    with process.oneshot():
        return ProcessSample(
            name=name,
            pid=process.pid,
            rss_bytes=process.memory_info().rss,
            num_fds=process.num_fds(),
            num_sockets=len(process.net_connections(kind="all")),
        )


def figures_of(text: str) -> dict[str, float]:
    """Of a Prometheus text, by name without its prefix (`penstock:`), with a state if any: the sums
    over other labels. Empty for what is no such text."""
    values: defaultdict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.rpartition(":")[2]
                values[f"{name} {sample.labels.get('state', '')}".strip()] += sample.value
    except ValueError:
        return {}
    return dict(values)
