"""The arguments that choose a dataset and its times, and what they come to.

Shared by the benches that send to a server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.load.client.bodies import Endpoint
from penstock.load.client.records import Dialogue
from penstock.load.workloads.arrivals import (
    Arrivals,
    ClosedLoop,
    OpenLoop,
    gamma_offsets,
    ramp_offsets,
)
from penstock.load.workloads.datasets.conversations import Conversations
from penstock.load.workloads.datasets.dataset import Dataset, Lengths, lengths
from penstock.load.workloads.datasets.jsonl import Jsonl
from penstock.load.workloads.datasets.random_lengths import RandomLengths
from penstock.load.workloads.datasets.shared_prefix import SharedPrefix
from penstock.load.workloads.datasets.sharegpt import ShareGpt
from penstock.load.workloads.datasets.trace import Trace
from penstock.load.workloads.prompts import (
    DEFAULT_VOCAB_SIZE,
    PromptMaker,
    TokenIds,
    Words,
    load_tokenizer,
    plain_ids,
)

WARM_UP_SEED = 1 << 40  # its prompts are none of a run's, or they would be found in a cache

_LENGTHS = "tokens: one number, or two as 64-256"


def add_dataset_arguments(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset", choices=tuple(_DATASETS), default="random", help="what is sent")
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, help="dialogues; at most, out of a file"
    )
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every answer is as long as asked for",
    )
    group.add_argument("--tokenizer", type=Path, help="model directory; makes prompt lengths exact")
    group.add_argument(
        "--vocab-size",
        type=int,
        help="token ids drawn for --endpoint completions; else the tokenizer's, or "
        f"{DEFAULT_VOCAB_SIZE:,}",
    )
    group.add_argument("--dataset-path", type=Path, help="file of trace and jsonl")
    _add_length_arguments(parser)


def _add_length_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lengths of random, shared-prefix and conversations")
    fixed = Lengths.fixed(128)
    group.add_argument(
        "--input-len", type=lengths, default=fixed, help=f"{_LENGTHS}; of one user's turn"
    )
    group.add_argument(
        "--output-len",
        type=lengths,
        default=fixed,
        help=f"{_LENGTHS}; the upper is also jsonl's where a line says none",
    )
    group.add_argument(
        "--prefix-len", type=int, default=512, help="tokens of a shared prefix or system prompt"
    )
    group.add_argument("--num-prefixes", type=int, default=1, help="shared-prefix: different ones")
    group.add_argument("--turns", type=int, default=4, help="conversations: turns of each")
    group.add_argument(
        "--think-s", type=float, default=0.0, help="conversations: mean pause before a next turn"
    )
    group = parser.add_argument_group("lengths of sharegpt, and speed of trace")
    default = ShareGpt(num_dialogues=1)
    for name, kind, value, text in (
        ("--prompt-mean", float, default.prompt_mean, "tokens, before clipping"),
        ("--output-mean", float, default.output_mean, "tokens, before clipping"),
        ("--sigma", float, default.sigma, "of the logarithm of either length"),
        ("--shortest", int, default.shortest, "tokens of either"),
        ("--max-input-len", int, default.max_input_tokens, "tokens"),
        ("--max-output-len", int, default.max_output_tokens, "tokens"),
        ("--trace-speedup", float, 1.0, "a trace's times are divided by it"),
    ):
        group.add_argument(name, type=kind, default=value, help=text)


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "arrivals",
        "With --max-concurrency alone a closed loop; else an open one, at a rate, or at the times "
        "of a trace. A cap on an open loop holds requests back, but latency counts from when they "
        "were due.",
    )
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="dialogues a second; inf: all at once"
    )
    add_burstiness(group)
    group.add_argument("--ramp-from", type=float, help="first rate; with --ramp-to, no fixed rate")
    group.add_argument("--ramp-to", type=float, help="last rate; in between it grows by request")
    group.add_argument("--max-concurrency", type=int, help="dialogues in flight")


def add_burstiness(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: more even"
    )


def make_dialogues(
    parsed: argparse.Namespace, endpoint: Endpoint, *, num_dialogues: int, seed: int
) -> list[Dialogue]:
    """The workload.

    Raises:
        ConfigError: arguments or a file that make no workload.
    """
    if num_dialogues < 1:
        raise ConfigError("--num-prompts must be at least 1")
    dataset = _DATASETS[parsed.dataset](parsed, num_dialogues, seed)
    dialogues = dataset.make(_prompt_maker(parsed, endpoint))
    if endpoint != "completions" and any(
        not isinstance(turn.text, str) for dialogue in dialogues for turn in dialogue.turns
    ):
        raise ConfigError("token ids as prompts need --endpoint completions")
    return [
        replace(
            dialogue,
            turns=tuple(replace(turn, ignore_eos=parsed.ignore_eos) for turn in dialogue.turns),
        )
        for dialogue in dialogues
    ]


def make_arrivals(parsed: argparse.Namespace, dialogues: Sequence[Dialogue]) -> Arrivals:
    """The times of a workload.

    Raises:
        ConfigError: arguments that do not go together, or have no sense.
    """
    has_rate, has_ramp = parsed.request_rate != math.inf, parsed.ramp_from is not None
    if has_ramp != (parsed.ramp_to is not None) or (has_ramp and has_rate):
        raise ConfigError("--ramp-from and --ramp-to go together, and without --request-rate")
    if parsed.burstiness != 1.0 and not has_rate and not has_ramp:
        raise ConfigError("--burstiness needs --request-rate, or a ramp")
    num, cap = len(dialogues), parsed.max_concurrency
    if has_ramp:
        offsets_s = ramp_offsets(
            num,
            first_rate=parsed.ramp_from,
            last_rate=parsed.ramp_to,
            burstiness=parsed.burstiness,
            seed=parsed.seed,
        )
    elif has_rate or (dialogues[0].at_s is None and cap is None):
        offsets_s = gamma_offsets(
            num, rate=parsed.request_rate, burstiness=parsed.burstiness, seed=parsed.seed
        )
    elif dialogues[0].at_s is not None:
        offsets_s = tuple(dialogue.at_s or 0.0 for dialogue in dialogues)
    else:
        return ClosedLoop(cap)
    return OpenLoop(offsets_s, max_concurrency=cap)


def _prompt_maker(parsed: argparse.Namespace, endpoint: Endpoint) -> PromptMaker:
    tokenizer = load_tokenizer(parsed.tokenizer) if parsed.tokenizer else None
    if endpoint != "completions" or parsed.dataset == "conversations":
        return Words(tokenizer)
    if parsed.vocab_size is not None:
        if parsed.vocab_size < 1:
            raise ConfigError("--vocab-size must be at least 1")
        return TokenIds(range(parsed.vocab_size))
    return TokenIds(plain_ids(tokenizer)) if tokenizer else TokenIds()


# -- each dataset from the arguments: with how many dialogues, and which seed -----------------


def _random(parsed: argparse.Namespace, num: int, seed: int) -> Dataset:
    return RandomLengths(
        num_dialogues=num, input_len=parsed.input_len, output_len=parsed.output_len, seed=seed
    )


def _sharegpt(parsed: argparse.Namespace, num: int, seed: int) -> Dataset:
    return ShareGpt(
        num_dialogues=num,
        prompt_mean=parsed.prompt_mean,
        output_mean=parsed.output_mean,
        sigma=parsed.sigma,
        shortest=parsed.shortest,
        max_input_tokens=parsed.max_input_len,
        max_output_tokens=parsed.max_output_len,
        seed=seed,
    )


def _shared_prefix(parsed: argparse.Namespace, num: int, seed: int) -> Dataset:
    return SharedPrefix(
        num_dialogues=num,
        num_prefixes=parsed.num_prefixes,
        prefix_len=parsed.prefix_len,
        input_len=parsed.input_len,
        output_len=parsed.output_len,
        seed=seed,
    )


def _conversations(parsed: argparse.Namespace, num: int, seed: int) -> Dataset:
    return Conversations(
        num_dialogues=num,
        num_turns=parsed.turns,
        system_len=parsed.prefix_len,
        input_len=parsed.input_len,
        output_len=parsed.output_len,
        think_s=parsed.think_s,
        seed=seed,
    )


def _trace(parsed: argparse.Namespace, num: int, seed: int) -> Dataset:
    return Trace(path=_path(parsed), num_dialogues=num, speedup=parsed.trace_speedup, seed=seed)


def _jsonl(parsed: argparse.Namespace, num: int, _: int) -> Dataset:
    return Jsonl(path=_path(parsed), num_dialogues=num, max_tokens=parsed.output_len.high)


def _path(parsed: argparse.Namespace) -> Path:
    if parsed.dataset_path is None:
        raise ConfigError(f"--dataset {parsed.dataset} needs --dataset-path")
    path: Path = parsed.dataset_path
    return path


_DATASETS: Mapping[str, Callable[[argparse.Namespace, int, int], Dataset]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "shared-prefix": _shared_prefix,
    "conversations": _conversations,
    "trace": _trace,
    "jsonl": _jsonl,
}
