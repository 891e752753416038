"""Arguments for a dataset and its arrivals, shared by the benches that measure a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Endpoint
from penstock.load.client.transport import Wire
from penstock.load.report.options import counts, json_object, positive, rates
from penstock.load.workloads.datasets import (
    DEFAULT_VOCAB_SIZE,
    Conversations,
    Dataset,
    Jsonl,
    Lengths,
    RandomLengths,
    ShareGpt,
    TokenIds,
    Words,
    lengths,
)
from penstock.load.workloads.driver import Arrivals, ClosedLoop, OpenLoop, gamma_offsets


def add_wire_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--model", help="model name in requests; default: the first that a server lists")
    add("--transport", choices=("sse", "websocket"), default="sse", help="transport")
    add("--endpoint", choices=("completions", "chat", "responses"),
        help="default: completions for sse, responses for websocket")  # fmt: skip
    add("--history", choices=("full", "previous_response_id"), default="full",
        help="how later turns of a dialogue refer to earlier ones")  # fmt: skip
    add("--api-key", help="default: the first in PENSTOCK_API_KEY")
    add("--extra-body", type=json_object, default='{"temperature": 0}',
        help="JSON object with more fields of every request")  # fmt: skip
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="generate exactly max_tokens")  # fmt: skip
    add("--stall-s", type=float, default=60.0, help="seconds of silence that are a fault")


def wire_of(parsed: argparse.Namespace) -> Wire:
    """Raises ConfigError for arguments that cannot be combined."""
    keys = os.environ.get("PENSTOCK_API_KEY", "")
    return Wire(
        transport=parsed.transport,
        endpoint=parsed.endpoint
        or ("responses" if parsed.transport == "websocket" else "completions"),
        history=parsed.history,
        api_key=parsed.api_key or keys.split(",")[0].strip() or None,
        extra=parsed.extra_body,
        ignore_eos=parsed.ignore_eos,
        stall_s=parsed.stall_s,
    )


WARM_UP_SEED = 1 << 40  # warm-up prompts differ from those of a run, or a cache would find them

_LENGTHS = "tokens: one number, or two as 64-256"


def add_dataset_arguments(
    parser: argparse.ArgumentParser, *, num_prompts: int | None = None
) -> None:
    """`num_prompts`: the default; None: somebody else says how many."""
    group = parser.add_argument_group("dataset")
    add = group.add_argument
    add("--dataset", choices=tuple(_DATASETS), default="random", help="dataset to send")
    if num_prompts is not None:
        add("--num-prompts", type=int, default=num_prompts,
            help="number of dialogues; the maximum from a file")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of everything random")
    add("--vocab-size", type=positive,
        help="token ids drawn for --endpoint completions, which else are "
        f"{DEFAULT_VOCAB_SIZE:,}; the other endpoints get words")  # fmt: skip
    add("--dataset-path", type=Path, help="the file of jsonl")
    group = parser.add_argument_group("lengths of random and conversations")
    fixed = Lengths.fixed(128)
    add = group.add_argument
    add("--input-len", type=lengths, default=fixed, help=f"{_LENGTHS}; of one user's turn")
    add("--output-len", type=lengths, default=fixed,
        help=f"{_LENGTHS}; the upper is also jsonl's where a line says none")  # fmt: skip
    add("--prefix-len", type=positive, default=512, help="tokens of a shared system prompt")
    add("--turns", type=positive, default=4, help="conversations: turns per dialogue")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load",
        "--max-concurrency alone is a closed loop. Beside a rate it delays requests, but latency "
        "counts from when they were due. Several loads, comma-separated, are a sweep.",
    )
    add = group.add_argument
    add("--request-rate", type=rates, help="dialogues per second; default: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: more even")
    add("--max-concurrency", type=counts, help="dialogues in flight")


@dataclass(frozen=True, slots=True)
class Load:
    """What a server is asked to bear: dialogues a second, in flight, or both; neither: all at
    once."""

    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0

    def arrivals(self, dialogues: Sequence[Dialogue], *, seed: int) -> Arrivals:
        if self.rate is not None:
            offsets_s = gamma_offsets(
                len(dialogues), rate=self.rate, burstiness=self.burstiness, seed=seed
            )
            return OpenLoop(offsets_s, self.concurrency)
        if self.concurrency is not None:
            return ClosedLoop(self.concurrency)
        return OpenLoop((0.0,) * len(dialogues))

    def __str__(self) -> str:
        cap = None if self.concurrency is None else f"{self.concurrency:,} in flight"
        rate = None if self.rate is None else f"{self.rate:g} a second"
        return ", at most ".join(filter(None, (rate, cap))) or "all at once"


def loads_of(parsed: argparse.Namespace) -> list[Load]:
    """By ascending load. Raises ConfigError for arguments that cannot be combined."""
    rates, caps = parsed.request_rate, parsed.max_concurrency
    if parsed.burstiness <= 0 or (parsed.burstiness != 1.0 and rates is None):
        raise ConfigError("--burstiness must be positive, and needs --request-rate")
    if rates is None:
        return [Load(concurrency=cap) for cap in sorted(set(caps))] if caps else [Load()]
    if caps is not None and len(caps) > 1:
        raise ConfigError("--request-rate needs a single --max-concurrency, or none")
    cap = caps[0] if caps else None
    return [Load(rate, cap, parsed.burstiness) for rate in sorted(set(rates))]


def make_dialogues(
    parsed: argparse.Namespace, endpoint: Endpoint, *, num_dialogues: int, seed: int
) -> list[Dialogue]:
    """The workload. Raises ConfigError for invalid arguments or an invalid file."""
    if num_dialogues < 1:
        raise ConfigError("--num-prompts must be at least 1")
    is_text = endpoint != "completions" or parsed.dataset == "conversations"
    dataset = _dataset(parsed, num_dialogues, seed)
    dialogues = dataset.make(
        Words() if is_text else TokenIds(range(parsed.vocab_size or DEFAULT_VOCAB_SIZE))
    )
    if endpoint != "completions" and any(
        not isinstance(turn.text, str) for dialogue in dialogues for turn in dialogue.turns
    ):
        raise ConfigError("token ids as prompts need --endpoint completions")
    return dialogues


_DATASETS: Mapping[str, type[Dataset]] = {
    "random": RandomLengths,
    "sharegpt": ShareGpt,
    "conversations": Conversations,
    "jsonl": Jsonl,
}


def _dataset(parsed: argparse.Namespace, num_dialogues: int, seed: int) -> Dataset:
    """The named dataset, its fields from the arguments."""
    kind = _DATASETS[parsed.dataset]
    values = {
        **vars(parsed),
        "num_dialogues": num_dialogues,
        "seed": seed,
        "num_turns": parsed.turns,
        "system_len": parsed.prefix_len,
        "path": parsed.dataset_path,
        "max_tokens": parsed.output_len.high,
    }
    needed = {each.name: values[each.name] for each in fields(kind) if each.name in values}
    if "path" in needed and parsed.dataset_path is None:
        raise ConfigError(f"--dataset {parsed.dataset} needs --dataset-path")
    return kind(**needed)
