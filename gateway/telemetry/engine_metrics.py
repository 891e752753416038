"""The engine's stats as Prometheus metrics, as of its last frame, read when scraped.

    penstock:num_requests_running | waiting | swapped      penstock:num_preemptions_total
    penstock:kv_cache_usage_perc                           penstock:prefix_cache_queries_total, …
    penstock:engine_seconds_since_last_step                penstock:weight_bytes{quantization}
    penstock:kv_blocks{tier, state}                        penstock:swapped_bytes_total{direction}

Metrics that vLLM has too have vLLM's names. Those of requests and streams are in `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.protocol.messages import EngineStats
from penstock.gateway.engines.engine_link import EngineLink
from penstock.gateway.engines.engine_pool import EnginePool


@dataclass(frozen=True, slots=True)
class _Row:
    """A metric; `values` are its series by the value of `label`."""

    name: str
    text: str
    values: dict[str, float]
    label: str = ""


class EngineCollector(Collector):
    """
    Args:
        model_name: the first label of every series.
    """

    def __init__(self, engine: EnginePool, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """The series of several engines have the label `engine`."""
        links = self._engine.links
        if len(links) == 1:
            yield from self._of_engine(links[0])
            return
        joined: dict[str, Metric] = {}
        for link in links:
            for family in self._of_engine(link):
                into = joined.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    into.add_sample(
                        sample.name, {**sample.labels, "engine": link.name}, sample.value
                    )
        yield from joined.values()

    def _of_engine(self, link: EngineLink) -> Iterator[Metric]:
        stats = link.stats
        yield from (self._fill(GaugeMetricFamily, row) for row in _gauges(stats))
        yield self._fill(
            GaugeMetricFamily,
            _one(
                "engine_seconds_since_last_step",
                "Seconds since the engine's last step ended or its work began; 0 without work.",
                link.since_step_s,
            ),
        )
        if (info := link.info) is not None:
            size = {info.quantization: float(info.weight_bytes)}
            text = "Bytes of the weights in memory."
            yield self._fill(GaugeMetricFamily, _Row("weight_bytes", text, size, "quantization"))
        yield self._block_gauge(stats)
        yield from (self._fill(CounterMetricFamily, row) for row in _counters(stats))

    def _fill(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], row: _Row
    ) -> GaugeMetricFamily | CounterMetricFamily:
        labels = ["model_name", row.label] if row.label else ["model_name"]
        family = kind(f"penstock:{row.name}", row.text, labels=labels)
        for value_of_label, value in row.values.items():
            values = [self._model_name, value_of_label] if row.label else [self._model_name]
            family.add_metric(values, value)
        return family

    def _block_gauge(self, stats: EngineStats) -> GaugeMetricFamily:
        """The only metric with two labels."""
        tiers = {
            "device": (stats.num_blocks, stats.num_blocks_used, stats.num_blocks_cached),
            "host": (stats.num_host_blocks, stats.num_host_blocks_kept,
                     stats.num_host_blocks_cached),
        }  # fmt: skip
        family = GaugeMetricFamily(
            "penstock:kv_blocks",
            "KV blocks: used by sequences, cached (free, but found by their content), and free.",
            labels=["model_name", "tier", "state"],
        )
        for tier, (num_all, num_used, num_cached) in tiers.items():
            states = {
                "used": num_used,
                "cached": num_cached,
                "free": num_all - num_used - num_cached,
            }
            for state, num in states.items():
                family.add_metric([self._model_name, tier, state], num)
        return family


def _gauges(stats: EngineStats) -> Iterator[_Row]:
    yield _one("num_requests_running", "Sequences being computed.", stats.num_requests_running)
    yield _one("num_requests_waiting", "Requests in the queue.", stats.num_requests_waiting)
    yield _one("num_tokens_waiting", "Prompt tokens in the queue.", stats.num_tokens_waiting)
    yield _one(
        "queue_tokens_per_second",
        "Prompt tokens that leave the queue per second, while requests wait.",
        stats.queue_tokens_per_s,
    )
    yield _one(
        "kv_blocks_expected",
        "Cached KV blocks whose sessions are expected back.",
        stats.num_blocks_expected,
    )
    yield _one(
        "predicted_queue_seconds",
        "Predicted seconds until the prompts in the queue have left it.",
        stats.drain_s(stats.num_tokens_waiting),
    )
    yield _one(
        "prefill_tokens_per_second",
        "Prompt tokens computed per second, while there are any.",
        stats.prefill_tokens_per_s,
    )
    yield _one(
        "num_requests_swapped",
        "Preempted sequences whose KV is in host memory.",
        stats.num_requests_swapped,
    )
    yield _one(
        "kv_cache_usage_perc",
        "Share of KV blocks in use, from 0 to 1.",
        stats.num_blocks_used / max(stats.num_blocks, 1),
    )
    yield _one("num_grammars", "Compiled grammars that the engine keeps.", stats.num_grammars)
    yield _Row(
        "kv_slots",
        "Token slots in running sequences' blocks: allocated, and how many of those are empty.",
        {"allocated": stats.num_slots_allocated, "empty": stats.num_slots_empty},
        "state",
    )


def _counters(stats: EngineStats) -> Iterator[_Row]:
    yield _one("engine_steps", "Steps computed.", stats.num_steps_total)
    yield _one("engine_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens_total)
    yield _one("engine_generation_tokens", "Tokens sampled.", stats.generation_tokens_total)
    yield _one(
        "requests_refused",
        "Requests that the engine refused.",
        stats.num_requests_refused_total,
    )
    yield _one(
        "grammar_masks",
        "Masks of allowed tokens made for outputs with a grammar.",
        stats.num_grammar_masks_total,
    )
    yield _one(
        "grammar_masks_seconds",
        "Seconds spent making masks of allowed tokens.",
        stats.grammar_masks_seconds_total,
    )
    yield _one(
        "engine_request_compute_seconds",
        "Seconds of compute that requests were charged for.",
        stats.spent_compute_us_total / 1e6,
    )
    yield _one(
        "engine_request_kv_block_seconds",
        "KV blocks on the device times seconds that requests were charged for.",
        stats.spent_block_us_total / 1e6,
    )
    yield from _preemption_counters(stats)
    yield from _cache_counters(stats)
    yield from _speculation_counters(stats)


def _speculation_counters(stats: EngineStats) -> Iterator[_Row]:
    """By vLLM's names."""
    yield _one("spec_decode_num_drafts", "Steps of a sequence with drafts.", stats.num_drafts_total)
    yield _one("spec_decode_num_draft_tokens", "Tokens drafted.", stats.num_draft_tokens_total)
    yield _one(
        "spec_decode_num_accepted_tokens",
        "Drafts that were right.",
        stats.num_accepted_tokens_total,
    )
    yield _Row(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right, by their position in their step, from 0.",
        {str(position): n for position, n in enumerate(stats.num_accepted_tokens_per_pos_total)},
        "position",
    )


def _preemption_counters(stats: EngineStats) -> Iterator[_Row]:
    yield _one(
        "num_preemptions",
        "Sequences preempted for lack of KV blocks.",
        stats.num_preemptions_total,
    )
    yield _Row(
        "preemptions_by_kind",
        "Preemptions, by what happened to the KV.",
        {
            "swap": stats.num_swap_preemptions_total,
            "recompute": stats.num_recompute_preemptions_total,
        },
        "kind",
    )
    yield _one(
        "swap_fallbacks",
        "Sequences recomputed because the host tier was full.",
        stats.num_swap_fallbacks_total,
    )
    yield _Row(
        "swapped_bytes",
        "Bytes of KV moved between device and host memory.",
        {"out": stats.swapped_out_bytes_total, "in": stats.swapped_in_bytes_total},
        "direction",
    )
    yield _Row(
        "swap_seconds",
        "Seconds spent moving KV between device and host memory.",
        {"out": stats.swap_out_seconds_total, "in": stats.swap_in_seconds_total},
        "direction",
    )


def _cache_counters(stats: EngineStats) -> Iterator[_Row]:
    yield _one("kv_blocks_copied", "KV blocks copied on write.", stats.num_blocks_copied_total)
    yield _Row(
        "kv_blocks_evicted",
        "Cached KV blocks evicted.",
        {
            "device": stats.num_blocks_evicted_total,
            "host": stats.num_host_blocks_evicted_total,
        },
        "tier",
    )
    yield _one(
        "kv_blocks_evicted_expected",
        "Cached KV blocks evicted while their sessions were expected back from a tool call.",
        stats.num_held_blocks_evicted_total,
    )
    yield _Row(
        "tool_call_turns",
        "Turns that ended in a tool call: kept by the engine, and continued in time.",
        {"held": stats.num_turns_held_total, "returned": stats.num_turns_returned_total},
        "state",
    )
    yield _Row(
        "kv_blocks_transferred",
        "KV blocks sent to other engines, received, and refused as damaged or foreign.",
        {
            "sent": stats.num_kv_blocks_sent_total,
            "received": stats.num_kv_blocks_received_total,
            "refused": stats.num_kv_blocks_refused_total,
        },
        "direction",
    )
    yield _Row(
        "kv_transferred_bytes",
        "Bytes of KV sent to other engines, and received.",
        {"sent": stats.kv_sent_bytes_total, "received": stats.kv_received_bytes_total},
        "direction",
    )
    yield _one(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        stats.prefix_cache_queries_total,
    )
    yield _one(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        stats.prefix_cache_hits_total,
    )
    yield _one(
        "prefix_cache_host_hits",
        "Prompt tokens found in host memory by the prefix cache.",
        stats.prefix_cache_host_hits_total,
    )


def _one(name: str, text: str, value: float) -> _Row:
    return _Row(name, text, {"": value})
