"""`penstock bench quantization`: a model's own dtype compared with quantized weights, on the CPU.

It measures how far logits move, on conversations whose wordings the demo model was not
trained on, and the engine's tokens per second, beside the most that this machine's memory and
instructions allow. Machines drift, so all run in turn and a figure is the median of the ratios of
neighbouring runs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    QUANTIZATIONS,
    DeviceConfig,
    ModelConfig,
    Quantization,
)
from penstock.engine.demo.evaluate import Case, held_out_answers
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.model_files import resolve_model
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.engine.transport.messages import EngineInfo
from penstock.kernels.cpu.library import load_library
from penstock.kernels.paged_layout import PagedLayout
from penstock.load.cpu_limits import Ceilings, products_per_s, read_weights
from penstock.load.engine_runs import Lengths, Phase, Run, build_engine, make_requests, run_requests
from penstock.load.machine import frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts
from penstock.load.report.tables import publish, table, table_of

_BLOCK_SIZE = 16
_TURNS_BEFORE = 5
# What is summed over texts.
_COMPARED = (
    "squared change", "squares", "tokens", "same", "tokens of answers", "same in answers", "loss",
    "quantized loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """A conversation; the last answer begins at `answer_start`."""

    token_ids: list[int]
    answer_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The errors over all texts.

    `relative_error` is the root mean square of the logits' change ÷ that of the logits, both about
    their mean in each position, since a shift of all logits changes nothing. Perplexities are those
    of answers.
    """

    quantization: str
    num_texts: int
    num_tokens: int
    relative_error: float
    same_top_share: float  # positions whose likeliest token stayed the same ÷ all
    answer_same_top_share: float  # the same of the tokens of answers
    perplexity: float
    quantized_perplexity: float


def held_out_texts(path: Path, *, num_texts: int, seed: int, context_len: int) -> list[Text]:
    """Conversations of six turns that fit the model's context; lines of text without a chat
    template. Raises ConfigError if none fits."""
    tokenizer, template = Tokenizer.from_directory(path), ChatTemplate.from_directory(path)
    rng = random.Random(seed)
    cases = list(held_out_answers(rng, num_before=_TURNS_BEFORE))
    rng.shuffle(cases)

    def texts() -> Iterator[Text]:
        for case in cases:
            prompt = tokenizer.encode(_prompt(template, case), add_special_tokens=False)
            answer = tokenizer.encode(case[1].assistant, add_special_tokens=False)
            if len(prompt) + len(answer) <= context_len:
                yield Text(prompt + answer, len(prompt))

    chosen = list(islice(texts(), num_texts))
    if not chosen:
        raise ConfigError(f"no text fits a context of {context_len} tokens")
    return chosen


def _prompt(template: ChatTemplate, case: Case) -> str:
    """The conversation up to the last answer."""
    conversation, turn = case
    messages = [
        {"role": role, "content": content}
        for each in (*conversation.turns, turn)
        for role, content in (("user", each.user), ("assistant", each.assistant))
    ][:-1]
    try:
        return template.render(messages)
    except InvalidRequestError:  # there is none
        return "".join(f"{message['content']}\n" for message in messages)


@torch.inference_mode()
def measure_errors(
    path: Path,
    quantization: Quantization,
    *,
    dtype: str,
    texts: Sequence[Text],
    num_threads: int | None,
    quantize_activations: bool = True,
) -> Errors:
    """Run every text through the model on the CPU, in its own dtype and quantized."""
    as_it_is, quantized = (
        _load(path, dtype, each, num_threads, quantize_activations=quantize_activations)
        for each in ("none", quantization)
    )
    pool = _pool(as_it_is, max(len(text.token_ids) for text in texts))
    totals = dict.fromkeys(_COMPARED, 0.0)
    for text in texts:
        exact, rounded = (_logits(model, pool, text.token_ids) for model in (as_it_is, quantized))
        for name, value in zip(_COMPARED, _compare(exact, rounded, text), strict=True):
            totals[name] += value
    return Errors(
        quantization=quantization,
        num_texts=len(texts),
        num_tokens=int(totals["tokens"]),
        relative_error=math.sqrt(totals["squared change"] / totals["squares"]),
        same_top_share=totals["same"] / totals["tokens"],
        answer_same_top_share=totals["same in answers"] / totals["tokens of answers"],
        perplexity=math.exp(totals["loss"] / totals["tokens of answers"]),
        quantized_perplexity=math.exp(totals["quantized loss"] / totals["tokens of answers"]),
    )


def _compare(exact: Tensor, rounded: Tensor, text: Text) -> tuple[float, ...]:
    """The `_COMPARED` sums of one text's logits [num_tokens, vocab_size]."""
    answers = slice(text.answer_start - 1, -1)  # where they are predicted
    answer = torch.tensor(text.token_ids[text.answer_start :])
    is_same = exact.argmax(1) == rounded.argmax(1)
    return (
        _squares(rounded - exact),
        _squares(exact),
        float(len(is_same)),
        float(is_same.sum()),
        float(len(answer)),
        float(is_same[answers].sum()),
        float(F.cross_entropy(exact[answers], answer, reduction="sum")),
        float(F.cross_entropy(rounded[answers], answer, reduction="sum")),
    )


def _squares(rows: Tensor) -> float:
    """The sum of squares about each row's mean."""
    return float((rows - rows.mean(1, keepdim=True)).square().sum())


def _load(
    path: Path,
    dtype: str,
    quantization: Quantization,
    num_threads: int | None,
    *,
    quantize_activations: bool,
) -> LanguageModel:
    config = ModelConfig(
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,
        quantize_activations=quantize_activations,
    )
    decoder = load_model(config, path, torch.device("cpu"))
    library = cpu_kernels(decoder, _BLOCK_SIZE, num_threads=num_threads)
    return fastest(decoder, _BLOCK_SIZE, library)


def _pool(model: LanguageModel, num_tokens: int) -> Tensor:
    """A KV pool for `num_tokens`, as `KVShape.allocate` makes it."""
    shape = KVShape.of(model.kv_spec, _BLOCK_SIZE)
    return shape.allocate(shape.num_blocks_for(num_tokens), torch.device("cpu"))


def _logits(model: LanguageModel, pool: Tensor, token_ids: Sequence[int]) -> Tensor:
    """float64 [num_tokens, vocab_size] of one sequence, computed at once."""
    num_tokens = len(token_ids)
    positions = torch.arange(num_tokens)
    context = ForwardContext(
        kv_pool=pool,
        layout=PagedLayout(
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=torch.arange(pool.shape[2], dtype=torch.int32)[None],
            slot_mapping=positions,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
        ),
        positions=positions,
        prompt_lens=torch.full_like(positions, num_tokens),
    )
    return model.logits(model(torch.tensor(token_ids), context)).double()


# -- the command --------------------------------------------------------------------------------

# By number of sequences: of each round, a run of each kind of weights.
Rounds: TypeAlias = dict[int, list[dict[Quantization, Run]]]
# By kind of weights: the best of all rounds.
KindCeilings: TypeAlias = dict[Quantization, Ceilings]

_WARM_UP_TOKENS = 8
_NOTES = """\
Error: root mean square of the logits' change, by that of the logits. Same top: positions whose
likeliest token stayed. Perplexity: of answers in conversations not trained on; of random weights it
says nothing. tok/s: output tokens of a whole run, medians; times: medians of the ratios to the own
dtype's runs beside them, of the whole run, of its prompts and of the steps in which all sequences
decode.
At most: tokens by the time to read the matrices once (nothing else: no KV, no activations) or to
multiply, whichever is longer. MB and products are those of a decode step, or of all prompts, of
which only the last tokens meet the head; attention's are not counted. Before each round all threads
read memory, and multiply a matrix in the L2 cache by the same kernels: the best rates count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of everything that is not quantized")
    add(
        "--quantizations",
        type=_kinds,
        default="int8,int4",
        help=f"which to compare, comma-separated: {', '.join(_KINDS)}",
    )
    add(
        "--no-quantize-activations",
        dest="quantize_activations",
        action="store_false",
        help="multiply with inputs as they are",
    )
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--num-texts", type=int, default=20, help="texts on which logits are compared")
    add(
        "--num-seqs",
        type=counts,
        default="1,8,32",
        help="numbers of concurrent sequences, comma-separated",
    )
    add("--prompt-tokens", type=int, default=128, help="prompt tokens per request")
    add("--output-tokens", type=int, default=64, help="output tokens per request")
    add("--repeats", type=int, default=3, help="runs of each number of sequences, in turn")
    add("--seed", type=int, default=0, help="seed of texts and prompts")
    add_out(parser)


_KINDS = tuple(each for each in QUANTIZATIONS if each != "none")


def _kinds(text: str) -> tuple[Quantization, ...]:
    """
    Raises:
        ValueError: one is unknown.
    """
    return tuple(_KINDS[_KINDS.index(name)] for name in text.split(","))


def run(parsed: argparse.Namespace) -> int:
    """Measure all; print and write the tables."""
    path = resolve_model(ModelConfig(model=parsed.model), weights=True)
    device = DeviceConfig(device="cpu", num_threads=parsed.num_threads or None)
    kinds: tuple[Quantization, ...] = ("none", *parsed.quantizations)
    rounds_inputs = parsed.quantize_activations
    cores = {
        kind: build_engine(parsed, kind, device, quantize_activations=rounds_inputs)
        for kind in kinds
    }
    infos = {kind: info for kind, (_, info) in cores.items()}
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    try:
        with frozen_garbage():
            rounds, ceilings = _measure_speed(cores, lengths, parsed)
    finally:
        for core, _ in cores.values():
            core.close()
    info = infos["none"]
    texts = held_out_texts(
        path, num_texts=parsed.num_texts, seed=parsed.seed, context_len=info.max_model_len
    )
    errors = [
        measure_errors(
            path,
            kind,
            dtype=parsed.dtype,
            texts=texts,
            num_threads=parsed.num_threads or None,
            quantize_activations=parsed.quantize_activations,
        )
        for kind in parsed.quantizations
    ]
    title = f"{info.model} in {info.dtype} and quantized, CPU threads: {info.num_threads}"
    figures = _figures(rounds, infos)
    limits = _limits(rounds, infos, ceilings)
    tables = [_error_table(errors), _speed_table(figures)]
    if limits:
        tables += [_ceiling_line(ceilings), _limit_table(limits)]
    report = "\n\n".join([title, *tables, _NOTES])
    data = {
        "model": info.model,
        "errors": [asdict(each) for each in errors],
        "speed": figures,
        "ceilings": {kind: asdict(each) for kind, each in ceilings.items()},
        "limits": limits,
    }
    publish(parsed.out, "quantization", "quantization", report, data)
    return 0


def _measure_speed(
    cores: Mapping[Quantization, tuple[EngineCore, EngineInfo]],
    lengths: Lengths,
    parsed: argparse.Namespace,
) -> tuple[Rounds, KindCeilings]:
    """Runs of each kind of weights, by number of sequences; which is first alternates, and all
    numbers run once before any runs again."""
    rng = random.Random(parsed.seed)

    def run_once(kind: Quantization, count: int, lengths: Lengths) -> Run:
        core, info = cores[kind]
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        return run_requests(core, requests, lengths)

    warm_up = replace(lengths, output_tokens=min(_WARM_UP_TOKENS, lengths.output_tokens))
    for kind, count in product(cores, parsed.num_seqs):  # the first run of a shape is slow
        run_once(kind, count, warm_up)
    rounds: Rounds = {count: [] for count in parsed.num_seqs}
    ceilings: KindCeilings = {}
    for repeat in range(parsed.repeats):
        _raise_ceilings(ceilings, {kind: info for kind, (_, info) in cores.items()}, parsed)
        order = list(cores)[:: 1 if repeat % 2 else -1]
        for count in parsed.num_seqs:
            rounds[count].append({kind: run_once(kind, count, lengths) for kind in order})
    return rounds, ceilings


def _raise_ceilings(
    ceilings: KindCeilings, infos: Mapping[Quantization, EngineInfo], parsed: argparse.Namespace
) -> None:
    """Measure the ceilings again and keep the best; none without the C kernels, or of a checkpoint
    that is quantized already."""
    dtype, num_threads = infos["none"].dtype, infos["none"].num_threads
    library = load_library(getattr(torch, dtype))
    if library is None:
        return
    library.start_threads(num_threads)
    with MemoryReader(num_threads) as reader:
        read = reader.measure()
    for kind in (kind for kind, info in infos.items() if info.quantization == kind):
        multiplied = products_per_s(library, kind, in_bytes=parsed.quantize_activations)
        best = ceilings.get(kind, Ceilings(read_bytes_per_s=0.0, products_per_s=0.0))
        ceilings[kind] = Ceilings(
            read_bytes_per_s=max(read, best.read_bytes_per_s),
            products_per_s=max(multiplied, best.products_per_s),
        )


def _error_table(errors: Sequence[Errors]) -> str:
    columns: dict[str, Callable[[Errors], str]] = {
        "weights": lambda each: each.quantization,
        "texts": lambda each: f"{each.num_texts:,}",
        "tokens": lambda each: f"{each.num_tokens:,}",
        "error": lambda each: f"{each.relative_error:.2%}",
        "same top": lambda each: f"{each.same_top_share:.2%}",
        "in answers": lambda each: f"{each.answer_same_top_share:.2%}",
        "perplexity": lambda each: f"{each.perplexity:,.4f}",
        "quantized": lambda each: f"{each.quantized_perplexity:,.4f}",
    }
    return table_of(errors, columns)


def _speed_table(figures: Sequence[Mapping[str, Any]]) -> str:
    header = ("weights", "MB", "sequences", "tok/s", "times", "prefill times", "decode times")
    rows = [
        [
            each["quantization"],
            f"{each['weight_bytes'] / 1e6:,.1f}",
            f"{each['num_seqs']:,}",
            f"{each['tokens_per_s']:,.0f}",
            *(f"{each[name]:.2f}" for name in _RATES),
        ]
        for each in figures
    ]
    return table(header, rows)


def _figures(rounds: Rounds, infos: Mapping[Quantization, EngineInfo]) -> list[dict[str, Any]]:
    return [
        {
            "num_seqs": count,
            "quantization": kind,
            "weight_bytes": info.weight_bytes,
            "tokens_per_s": statistics.median(runs[kind].output_tokens_per_s for runs in each),
            **{
                name: statistics.median(rate(runs[kind]) / rate(runs["none"]) for runs in each)
                for name, rate in _RATES.items()
            },
        }
        for count, each in rounds.items()
        for kind, info in infos.items()
    ]


_RATES: dict[str, Callable[[Run], float]] = {
    "ratio": lambda run: run.output_tokens_per_s,
    "prefill_ratio": lambda run: run.prefill_tokens_per_s,
    "decode_ratio": lambda run: run.decode_tokens_per_s,
}


# -- how near that is to the machine's limits ----------------------------------------------------


def _limits(
    rounds: Rounds, infos: Mapping[Quantization, EngineInfo], ceilings: KindCeilings
) -> list[dict[str, Any]]:
    """The speed that the ceilings allow, and the runs' median: of each phase, number of sequences
    and kind of weights that has ceilings."""
    speeds: dict[Phase, Callable[[Run], float]] = {
        "decode": lambda run: run.decode_tokens_per_s,
        "prefill": lambda run: run.prefill_tokens_per_s,
    }
    weights = {kind: read_weights(infos[kind]) for kind in ceilings}
    limits = []
    for (phase, speed), (count, each), kind in product(speeds.items(), rounds.items(), ceilings):
        runs, read = [runs[kind] for runs in each], weights[kind]
        # Of a decode step, or of all prompts.
        num_tokens = count * (runs[0].lengths.prompt_tokens if phase == "prefill" else 1)
        num_products = num_tokens * read.num_in_layers + count * read.num_in_head
        bound = num_tokens / ceilings[kind].bound_s(read.num_bytes, num_products)
        reached = statistics.median(map(speed, runs))
        limits.append(
            {
                "quantization": kind,
                "phase": phase,
                "num_seqs": count,
                "num_tokens": num_tokens,
                "num_bytes": read.num_bytes,
                "num_products": num_products,
                "tokens_per_s": reached,
                "bound_tokens_per_s": bound,
                "share": reached / bound,
            }
        )
    return limits


def _ceiling_line(ceilings: KindCeilings) -> str:
    read = max(each.read_bytes_per_s for each in ceilings.values()) / 1e9
    products = (f"{kind} {each.products_per_s / 1e9:,.0f}" for kind, each in ceilings.items())
    return f"Memory is read at {read:.1f} GB/s. Products a nanosecond: {', '.join(products)}."


def _limit_table(limits: Sequence[Mapping[str, Any]]) -> str:
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "weights": lambda each: each["quantization"],
        "phase": lambda each: each["phase"],
        "sequences": lambda each: f"{each['num_seqs']:,}",
        "MB": lambda each: f"{each['num_bytes'] / 1e6:,.1f}",
        "M products": lambda each: f"{each['num_products'] / 1e6:,.1f}",
        "tok/s": lambda each: f"{each['tokens_per_s']:,.0f}",
        "at most": lambda each: f"{each['bound_tokens_per_s']:,.0f}",
        "share": lambda each: f"{each['share']:.0%}",
    }
    return table_of(limits, columns)
