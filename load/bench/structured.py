"""`penstock bench structured`: outputs that must match a JSON Schema, on the engine alone.

Three questions, each with a table: which of a set of schemas are accepted, and how long compiling
them and their masks take; whether what ends also matches (`jsonschema` decides); and what the masks
cost, in runs with and without a grammar that take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from penstock.engine.config import DEMO_MODEL, DTYPES, DeviceConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import FinishReason, Request, SamplingParams, StructuredOutputs
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.text import Tokenizer
from penstock.engine.transport.messages import EngineInfo
from penstock.load.engine_runs import Lengths, Run, build_engine, make_requests, run_requests
from penstock.load.machine import frozen_garbage
from penstock.load.report.options import add_out, counts
from penstock.load.report.tables import publish, table
from penstock.load.workloads.json_schemas import NamedSchema, json_schemas

_PROMPT = "Answer in JSON."
_WARM_UP_TOKENS = 8
# Never ends before an output's length is reached.
_ENDLESS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A schema that was compiled, in `compile_s` seconds."""

    named: NamedSchema
    grammar: StructuredOutputs
    compile_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of weights and KV cache")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--num-schemas", type=int, default=400, help="schemas of the set")
    add("--max-tokens", type=int, default=768, help="tokens within which an output should end")
    add("--temperature", type=float, default=1.0, help="of those outputs")
    add("--num-seqs", type=counts, default=(1, 8, 32), help="sequences at once, of the speed")
    add("--prompt-tokens", type=int, default=128, help="prompt tokens per request, of the speed")
    add("--output-tokens", type=int, default=128, help="output tokens per request, of the speed")
    add("--repeats", type=int, default=3, help="runs of each number of sequences, in turn")
    add("--seed", type=int, default=0, help="seed of schemas, prompts and draws")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure all three; return 1 if an output that ended does not match its schema."""
    device = DeviceConfig(num_threads=parsed.num_threads or None)
    core, info = build_engine(parsed, "none", device)
    try:
        accepted, refused, load_s = _compile(core, parsed)
        ends, wrong, mask_s, num_masks = _outputs(core, info, accepted, parsed)
        with frozen_garbage():
            speed = _speed(core, info, parsed)
    finally:
        core.close()
    times_s = sorted(each.compile_s for each in accepted)
    figures = {
        "schemas": parsed.num_schemas,
        "accepted": len(accepted),
        "refused": dict(refused),
        "vocabulary_s": load_s,
        "compile_p50_ms": 1e3 * _percentile(times_s, 0.5),
        "compile_p99_ms": 1e3 * _percentile(times_s, 0.99),
        "mask_mean_us": 1e6 * mask_s / max(num_masks, 1),
        "ends": {reason.value: count for reason, count in ends.items()},
        "wrong": wrong,
        "speed": speed,
    }
    title = f"{info.model}, {info.dtype}, {info.device}, {info.vocab_size:,} tokens"
    report = "\n\n".join([title, *_tables(figures)])
    publish(parsed.out, "structured", "Structured outputs", report, figures)
    return int(bool(wrong))


def _compile(
    core: EngineCore, parsed: argparse.Namespace
) -> tuple[list[Accepted], Counter[str], float]:
    """The schemas that are accepted, the others by reason, and the seconds for the vocabulary."""
    began_s = time.perf_counter()
    core.grammars.compile(StructuredOutputs("regex", "a"))
    load_s = time.perf_counter() - began_s
    accepted, refused = [], Counter[str]()
    for named in json_schemas(parsed.num_schemas, seed=parsed.seed):
        began_s = time.perf_counter()
        try:
            grammar = structured_outputs(json_schema=named.schema)
            assert grammar is not None
            core.grammars.compile(grammar)
        except InvalidRequestError as error:
            refused[(error.param or str(error)).rpartition(".")[2]] += 1
        else:
            accepted.append(Accepted(named, grammar, time.perf_counter() - began_s))
    return accepted, refused, load_s


def _outputs(
    core: EngineCore, info: EngineInfo, accepted: Sequence[Accepted], parsed: argparse.Namespace
) -> tuple[Counter[FinishReason], list[str], float, int]:
    """How outputs end, the texts that ended and do not match, and the seconds of how many masks."""
    tokenizer = Tokenizer.from_directory(Path(info.model_path))
    prompt = tuple(tokenizer.encode(_PROMPT))
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for index, each in enumerate(accepted):
        params = SamplingParams(
            temperature=parsed.temperature,
            seed=parsed.seed + index,
            max_tokens=parsed.max_tokens,
            structured_outputs=each.grammar,
        )
        tokens[str(index)] = []
        core.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
    while core.has_work():
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    wrong = [
        f"{accepted[int(name)].named.kind}: {text}"
        for name, reason in reasons.items()
        if reason is FinishReason.STOP
        and not _matches(text := tokenizer.decode(tokens[name]), accepted[int(name)].named.schema)
    ]
    counters = core.scheduler.counters
    return Counter(reasons.values()), wrong, counters.masks_s, counters.num_masks


def _matches(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _speed(
    core: EngineCore, info: EngineInfo, parsed: argparse.Namespace
) -> list[dict[str, float]]:
    """Tokens per second by number of sequences, none and all of them with a grammar, in turns."""
    rng = random.Random(parsed.seed)
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    grammar = structured_outputs(json_schema=_ENDLESS)

    def run_once(has_grammar: int, count: int, lengths: Lengths) -> Run:
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        if has_grammar:
            requests = [
                msgspec.structs.replace(
                    each,
                    sampling_params=msgspec.structs.replace(
                        each.sampling_params, structured_outputs=grammar
                    ),
                )
                for each in requests
            ]
        return run_requests(core, requests, lengths)

    for which, count in product((0, 1), parsed.num_seqs):  # the first run of a shape is slow
        run_once(which, count, Lengths(prompt_tokens=8, output_tokens=_WARM_UP_TOKENS))
    rates: dict[int, list[tuple[float, float]]] = {count: [] for count in parsed.num_seqs}
    for repeat, count in product(range(parsed.repeats), parsed.num_seqs):
        first = repeat % 2
        runs = {which: run_once(which, count, lengths) for which in (first, 1 - first)}
        rates[count].append((runs[0].output_tokens_per_s, runs[1].output_tokens_per_s))
    return [
        {
            "num_seqs": count,
            "tokens_per_s": statistics.median(plain for plain, _ in pairs),
            "constrained_tokens_per_s": statistics.median(own for _, own in pairs),
            "ratio": statistics.median(own / plain for plain, own in pairs),
        }
        for count, pairs in rates.items()
    ]


def _tables(figures: dict[str, Any]) -> list[str]:
    num, accepted, ends = figures["schemas"], figures["accepted"], figures["ends"]
    compiled = table(
        ("schemas", "accepted", "vocabulary", "compile p50", "p99", "mask, mean"),
        [[
            f"{num:,}", f"{accepted / num:.1%}", f"{figures['vocabulary_s']:.2f} s",
            f"{figures['compile_p50_ms']:.1f} ms", f"{figures['compile_p99_ms']:.1f} ms",
            f"{figures['mask_mean_us']:.0f} µs",
        ]],
    )  # fmt: skip
    outputs = table(
        ("outputs", "stop", "of those invalid", "length", "grammar"),
        [[
            f"{accepted:,}", f"{ends.get('stop', 0) / accepted:.1%}", f"{len(figures['wrong'])}",
            f"{ends.get('length', 0)}", f"{ends.get('grammar', 0)}",
        ]],
    )  # fmt: skip
    speed = table(
        ("sequences", "tok/s", "with a grammar", "times"),
        [[
            f"{each['num_seqs']:,}", f"{each['tokens_per_s']:,.0f}",
            f"{each['constrained_tokens_per_s']:,.0f}", f"{each['ratio']:.2f}",
        ] for each in figures["speed"]],
    )  # fmt: skip
    refused = ", ".join(f"{name} {count}" for name, count in figures["refused"].items())
    return [compiled, f"Refused for: {refused or 'none'}.", outputs, speed]


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
