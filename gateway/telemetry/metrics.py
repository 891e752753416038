"""Prometheus metrics under vLLM's names with the prefix `penstock:`, in a separate registry.

Each stream has a `StreamMeter`, which observes it once per frame. `engine_metrics` has the engine's
own metrics, `worker_metrics` collects those of other gateway processes. `METRICS.md` lists all of
them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.storage.usage.ledger import Counts
from penstock.gateway.telemetry.engine_metrics import EngineCollector
from penstock.gateway.telemetry.request_record import CURRENT_REQUEST, RequestRecord
from penstock.gateway.telemetry.worker_metrics import Workers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 10.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2, 5)
_LAG_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LAG_INTERVAL_S = 0.1
_CHECK_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_MAX_TENANTS = 200  # with series of their own
_BY_TENANT = "penstock:tenant_"
_OTHERS = "(others)"  # tenants' names have only letters, digits, '_', '.' and '-'


# Of a `TokenCount`: name, text and unit.
_USED = {
    "prompt": ("prompt_tokens", "Tokens of prompts", 1),
    "generation": ("generation_tokens", "Tokens delivered", 1),
    "cached": ("prompt_tokens_cached", "Tokens of prompts found in the prefix cache", 1),
    "thinking": ("thinking_tokens", "Tokens of thoughts", 1),
    "compute_us": ("request_compute_seconds", "Seconds of compute of requests that ended", 1e-6),
    "block_us": (
        "request_kv_block_seconds",
        "KV blocks on the device times seconds of requests that ended",
        1e-6,
    ),
}


@dataclass(slots=True)
class TokenCount:
    """What one tenant has used. Plain numbers, because the first two are updated at every frame;
    the others are at the end of a request."""

    prompt: int = 0
    generation: int = 0
    cached: int = 0
    thinking: int = 0
    compute_us: int = 0
    block_us: int = 0


class Metrics:
    """All metrics of one gateway.

    Args:
        model_name: the label of every series.
        workers: the server's other gateway processes; None: there are none.
    """

    def __init__(self, engine: EnginePool, model_name: str, workers: Workers | None = None) -> None:
        self.model_name = model_name
        self._workers = workers
        self._client = engine
        self._engine = EngineCollector(engine, model_name)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._tokens: dict[str, TokenCount] = {}
        self._watched = _Watched(model_name)
        self._probes: dict[str, tuple[str, Callable[[], Awaitable[bool]]]] = {}
        self._finished = self._counter(
            "request_success",
            "Generations that ended, including those with `abort` and `error`.",
            "finished_reason",
        )
        self._refused = self._counter(
            "refusals",
            "Requests and WebSocket messages answered with 429 or 503.",
            "code",
        )
        self._requests = self._counter(
            "http_requests",
            "Requests that ended; a WebSocket counts once, as `WEBSOCKET` with 101.",
            "method",
            "route",
            "status",
        )
        self._grammars = self._counter(
            "grammar_checks",
            "Requests with a grammar: `accepted`, `refused`, `too_slow` to compile, or not "
            "compiled because the server is `overloaded`.",
            "verdict",
        )
        self._compared = self._counter(
            "prefix_cache_comparisons",
            "Requests with a predecessor, by why no more of its prompt was found in the prefix "
            "cache; `hit`: all of it was.",
            "reason",
        )
        self._missed = self._counter(
            "prefix_cache_missed_tokens",
            "Prompt tokens that a predecessor had and that were computed again, by the reason.",
            "reason",
        )
        self._counts = {
            "sessions": self._plain_counter("sessions", "Conversations that got a first turn."),
            "turns": self._plain_counter("turns", "Stored turns that began."),
            "resumes": self._plain_counter(
                "resumes", "Streams resumed by `starting_after` or `penstock.resume`."
            ),
        }
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from admission to the first token.",
            buckets=_TTFT_BUCKETS,
        )
        self.estimate_ratio = self._histogram(
            "time_to_first_token_estimate_ratio",
            "Predicted ÷ real seconds from admission to the first token, of requests for which "
            "rates were measured and that took 50 ms or more.",
            buckets=_RATIO_BUCKETS,
        )
        self.inter_token_latency = PlainHistogram(
            "penstock:inter_token_latency_seconds",
            "Seconds per token after the first.",
            labels={"model_name": model_name},
            buckets=_ITL_BUCKETS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds",
            "Seconds from admission to the last token.",
            buckets=_E2E_BUCKETS,
        )
        self.grammar_check = self._histogram(
            "grammar_check_seconds",
            "Seconds until a new grammar was accepted or refused.",
            buckets=_CHECK_BUCKETS,
        )
        self.event_loop_lag = PlainHistogram(
            "penstock:event_loop_lag_seconds",
            "Seconds by which the event loop calls back late; ten samples a second.",
            labels={"model_name": model_name},
            buckets=_LAG_BUCKETS,
        )
        self._watching_lag: asyncio.Task[None] | None = None
        self._registry.register(self.inter_token_latency)
        self._registry.register(self.event_loop_lag)
        self._registry.register(self._watched)
        self._registry.register(_Tokens(model_name, self._tokens))
        self.gauge("engine_up", "1 while an engine answers, otherwise 0.", self._has_engine)
        self.gauge(
            "engines",
            "Engines that take requests.",
            lambda: sum(link.is_usable for link in engine.links),
        )

    # -- observations ------------------------------------------------------------------------

    def count(self, what: str) -> None:
        """Add one to `sessions`, `turns` or `resumes`."""
        self._counts[what].inc()

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self.model_name, reason).inc()

    def count_refused(self, code: str) -> None:
        self._refused.labels(self.model_name, code).inc()

    def count_compared(self, reason: str, num_missed: int) -> None:
        """Count a request that was compared with its predecessor."""
        self._compared.labels(self.model_name, reason).inc()
        self._missed.labels(self.model_name, reason).inc(num_missed)

    def count_grammar(self, verdict: str) -> None:
        self._grammars.labels(self.model_name, verdict).inc()

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        route, status = record.route or "unknown", str(record.status or "left")
        self._requests.labels(self.model_name, record.method, route, status).inc()

    def tokens_of(self, tenant: str) -> TokenCount:
        """A tenant's counter. Tenants beyond the limit share one."""
        if tenant not in self._tokens and len(self._tokens) >= _MAX_TENANTS:
            tenant = _OTHERS
        return self._tokens.setdefault(tenant, TokenCount())

    # -- values read at collection -------------------------------------------------------------

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value `read` returns when metrics are collected."""
        self._watched.rows.append((GaugeMetricFamily, name, text, read))

    def states(self, name: str, text: str, states: Sequence[str], read: Callable[[], str]) -> None:
        """Add a gauge by state that is 1 for the state that `read` returns, and 0 for the rest."""
        self._watched.states.append((name, text, tuple(states), read))

    def counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a counter whose value `read` returns when metrics are collected."""
        self._watched.rows.append((CounterMetricFamily, name, text, read))

    def probe(self, name: str, text: str, ask: Callable[[], Awaitable[bool]]) -> None:
        """Add a gauge that is 1 if `ask` returns True when metrics are collected."""
        self._probes[name] = (text, ask)

    # -- collection ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start measuring the event loop's lag and answering the other workers."""
        self._watching_lag = asyncio.create_task(self._watch_lag())
        if self._workers is not None:
            await self._workers.start(self._own, self._has_engine)

    async def close(self) -> None:
        if self._watching_lag is not None:
            self._watching_lag.cancel()
        if self._workers is not None:
            await self._workers.close()

    async def render(self, *, names_tenants: bool = True) -> bytes:
        """The metrics in Prometheus' text format.

        Args:
            names_tenants: with the series of each tenant; otherwise only their totals.
        """
        registry = CollectorRegistry()
        families = await self.families()
        registry.register(
            _Families(each for each in families if names_tenants or not is_by_tenant(each.name))
        )
        return generate_latest(registry)

    async def have_engine(self) -> bool:
        """Whether this gateway and the server's others have an engine. A gateway that does not
        answer gets no requests."""
        if self._workers is None:
            return self._has_engine()
        return self._has_engine() and await self._workers.are_ready()

    def _has_engine(self) -> bool:
        return self._client.info is not None

    async def families(self) -> list[Metric]:
        """All metrics: of this gateway, of the other workers, and of the engine."""
        families = await self._own()
        if self._workers is not None:
            families = await self._workers.join(families)
        return [*families, *self._engine.collect()]

    async def _own(self) -> list[Metric]:
        probed = []
        for name, (text, ask) in self._probes.items():
            family = GaugeMetricFamily(f"penstock:{name}", text, labels=_LABELS)
            family.add_metric([self.model_name], float(await ask()))
            probed.append(family)
        families: list[Metric] = [*self._registry.collect(), *probed]
        for each in families:  # the creation times of series are not needed
            each.samples = [s for s in each.samples if not s.name.endswith("_created")]
        return families

    async def _watch_lag(self) -> None:
        while True:
            due_s = perf_counter() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.event_loop_lag.observe(max(0.0, perf_counter() - due_s))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock:{name}", text, (*_LABELS, *labels), registry=self._registry)

    def _plain_counter(self, name: str, text: str) -> Counter:
        return self._counter(name, text).labels(self.model_name)

    def _histogram(self, name: str, text: str, *, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"penstock:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(self.model_name)


class StreamMeter:
    """Observes one request: per output it reads the clock and updates at most one histogram."""

    __slots__ = (
        "_arrival_s", "_has_prompt", "_last_s", "_metrics", "_num_output", "_num_prompt",
        "_observe", "_request", "_tokens",
    )  # fmt: skip

    def __init__(self, metrics: Metrics, tenant: str = "default") -> None:
        self._metrics = metrics
        self._observe = metrics.inter_token_latency.observe
        self._tokens = metrics.tokens_of(tenant)
        self._request = CURRENT_REQUEST.get()
        self._arrival_s = perf_counter()
        self._has_prompt = False
        self._num_prompt = 0
        self._num_output = 0
        self._last_s: dict[int, float] = {}  # by branch

    def output(self, index: int, num_tokens: int, num_prompt_tokens: int) -> None:
        """A branch got tokens. The prompt is counted with the first output."""
        if num_tokens and index in self._last_s:
            self.more(num_tokens, index)
            return
        self._begin(num_prompt_tokens)
        if not num_tokens:
            return
        now = perf_counter()
        if not self._last_s:
            self._metrics.time_to_first_token.observe(now - self._arrival_s)
            if self._request is not None:
                self._request.note_first_token(self._metrics.model_name, now)
        self._tokens.generation += num_tokens
        self._num_output += num_tokens
        self._last_s[index] = now

    def more(self, num_tokens: int, index: int = 0) -> None:
        """A branch that had tokens before got some."""
        last_s, now = self._last_s, perf_counter()
        self._observe((now - last_s[index]) / num_tokens)
        last_s[index] = now
        self._tokens.generation += num_tokens
        self._num_output += num_tokens

    def _begin(self, num_prompt_tokens: int) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            self._num_prompt = num_prompt_tokens
            self._tokens.prompt += num_prompt_tokens

    def finished(self, reason: str, used: Counts) -> None:
        self._metrics.count_finished(reason)
        tokens = self._tokens
        tokens.cached += used.cached_tokens
        tokens.thinking += used.thinking_tokens
        tokens.compute_us += used.compute_us
        tokens.block_us += used.block_us
        self._metrics.e2e_request_latency.observe(perf_counter() - self._arrival_s)
        if self._request is not None:
            self._request.note_usage(input_tokens=self._num_prompt, output_tokens=self._num_output)


class _Tokens(Collector):
    """What was used, in total and by tenant; tokens of prompts and delivered under vLLM's names."""

    def __init__(self, model_name: str, counts: dict[str, TokenCount]) -> None:
        self._model_name = model_name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for kind, (name, text, unit) in _USED.items():
            numbers = {
                tenant: getattr(count, kind) * unit for tenant, count in self._counts.items()
            }
            total = CounterMetricFamily(f"penstock:{name}", f"{text}.", labels=_LABELS)
            total.add_metric([self._model_name], sum(numbers.values()))
            yield total
            each = CounterMetricFamily(
                f"{_BY_TENANT}{name}",
                f"{text}; tenants beyond the first {_MAX_TENANTS} are `{_OTHERS}`.",
                labels=(*_LABELS, "tenant"),
            )
            for tenant, number in numbers.items():
                each.add_metric([self._model_name, tenant], number)
            yield each


def is_by_tenant(family: str) -> bool:
    """Whether a metric has the label `tenant`; others have the totals."""
    return family.startswith(_BY_TENANT)


_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


class _Watched(Collector):
    """Numbers that other objects keep."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.rows: list[tuple[_Kind, str, str, Callable[[], float]]] = []
        self.states: list[tuple[str, str, tuple[str, ...], Callable[[], str]]] = []

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, read in self.rows:
            family = kind(f"penstock:{name}", text, labels=_LABELS)
            family.add_metric([self._model_name], float(read()))
            yield family
        for name, text, states, tell in self.states:
            by_state = GaugeMetricFamily(f"penstock:{name}", text, labels=(*_LABELS, "state"))
            now = tell()
            for state in states:
                by_state.add_metric([self._model_name, state], float(state == now))
            yield by_state


class _Families(Collector):
    """Metrics that have already been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class PlainHistogram(Collector):
    """A histogram with one series, for observations at every token. prometheus_client's takes two
    locks for each, which is not needed as one thread observes and reads.

    Args:
        buckets: upper bounds, ascending; a bucket without a bound is added.
    """

    def __init__(
        self, name: str, text: str, *, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        totals = accumulate(self._counts)
        family.add_metric(
            list(self._labels.values()), list(zip(bounds, totals, strict=True)), self._sum
        )
        yield family
