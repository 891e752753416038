"""`penstock bench embeddings`: texts to vectors, beside Hugging Face on the same weights.

The logarithms of the texts' lengths are uniform. Hugging Face gets the texts in two ways, on all
cores: all at once, padded to the longest, and as sentence-transformers hands them over, sorted by
length, in batches, each padded. All take turns. Vectors are compared with each other, with
float64, and with those of texts alone.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.engine import LLM
from penstock.engine.config import DEMO_MODEL, DTYPES
from penstock.engine.errors import ConfigError
from penstock.engine.pooling import ModelPooling, read_pooling
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.load.machine import frozen_garbage
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table

_OURS, _AT_ONCE, _SORTED = "penstock", "Hugging Face, at once", "Hugging Face, sorted"
_NUM_ALONE = 8  # texts that are also computed alone
_NUM_EXACT = 16  # texts that are also computed in float64

Texts = Sequence[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id; no encoder")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of both")
    add("--num-texts", type=positive, default=256, help="texts at once")
    add("--lengths", type=counts, default=(16, 256), help="tokens of the shortest and the longest")
    add("--batch-size", type=positive, default=32, help="of sorted texts")
    add("--repeats", type=positive, default=3, help="runs of each, in turn")
    add("--seed", type=int, default=0, help="seed of the texts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure both; return 1 if a text's vector depends on the texts beside it."""
    with LLM(parsed.model, dtype=parsed.dtype, enable_prefix_caching=False) as llm:
        path = Path(llm.info.model_path)
        pooling = read_pooling(path, parsed.model)
        if pooling.is_encoder or "embed" not in pooling.tasks:
            raise ConfigError("--model must be a causal language model that makes embeddings")
        texts = _texts(parsed, llm.info.vocab_size)
        other = HuggingFace(path, getattr(torch, llm.info.dtype), pooling)
        sides: dict[str, Callable[[], Tensor]] = {
            _OURS: lambda: _tensor(llm.embed(texts, use_tqdm=False)),
            _AT_ONCE: lambda: other.embed(texts, len(texts)),
            _SORTED: lambda: other.embed(texts, parsed.batch_size),
        }
        with frozen_garbage():
            times, vectors = _in_turn(sides, parsed.repeats)
        alone = [_tensor(llm.embed([text], use_tqdm=False)) for text in texts[:_NUM_ALONE]]
    exact = HuggingFace(path, torch.float64, pooling).embed(texts[:_NUM_EXACT], 1)
    ours = vectors[_OURS]
    num_tokens = sum(map(len, texts))
    seconds = {name: wall_s for name, (wall_s, _) in times.items()}
    is_same = torch.equal(torch.cat(alone), ours[:_NUM_ALONE])
    figures = {
        "model": llm.info.model,
        "dtype": llm.info.dtype,
        "num_texts": len(texts),
        "num_tokens": num_tokens,
        "seconds": seconds,
        "cpu_seconds": {name: cpu_s for name, (_, cpu_s) in times.items()},
        "ratios": {name: seconds[name] / seconds[_OURS] for name in (_AT_ONCE, _SORTED)},
        "least_cosine": _least_cosine(ours, vectors[_SORTED]),
        "least_cosine_float64": {
            name: _least_cosine(each[:_NUM_EXACT], exact) for name, each in vectors.items()
        },
        "is_same_alone": is_same,
    }
    rows = [
        [
            name,
            f"{len(texts) / wall_s:,.0f}",
            f"{num_tokens / wall_s:,.0f}",
            f"{cpu_s:.1f}",
            f"{_least_cosine(vectors[name][:_NUM_EXACT], exact):.6f}",
        ]
        for name, (wall_s, cpu_s) in times.items()
    ]
    report = "\n\n".join(
        [
            f"{llm.info.model}, {llm.info.dtype}, {llm.info.device}: {len(texts)} texts of "
            f"{num_tokens:,} tokens, {seconds[_AT_ONCE] / seconds[_OURS]:.2f} times as fast as "
            f"Hugging Face with all at once, {seconds[_SORTED] / seconds[_OURS]:.2f} times as fast "
            f"as with batches of {parsed.batch_size} of similar length",
            table(["", "texts/s", "tokens/s", "CPU seconds", "least cosine with float64"], rows),
            f"The least cosine of ours and theirs is {figures['least_cosine']:.6f}. "
            f"Alone, a text has {'the same bits' if is_same else 'other bits'}.",
        ]
    )
    publish(parsed.out, "embeddings", "Embeddings", report, figures)
    return int(not is_same)


def _texts(parsed: argparse.Namespace, vocab_size: int) -> Texts:
    """Token ids."""
    rng = random.Random(parsed.seed)
    shortest, longest = min(parsed.lengths), max(parsed.lengths)
    lengths = [
        round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        for _ in range(parsed.num_texts)
    ]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _in_turn(
    sides: dict[str, Callable[[], Tensor]], repeats: int
) -> tuple[dict[str, tuple[float, float]], dict[str, Tensor]]:
    """The median seconds of each side on the clock, and of all its threads, after a run that does
    not count; and its vectors."""
    vectors = {name: call() for name, call in sides.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            began_s, used_s = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - began_s, time.process_time() - used_s))
    medians = {}
    for name, each in times.items():
        walls, cpus = zip(*each, strict=True)
        medians[name] = statistics.median(walls), statistics.median(cpus)
    return medians, vectors


def _tensor(vectors: list[list[float]]) -> Tensor:
    return torch.tensor(vectors, dtype=torch.float64)


def _least_cosine(ones: Tensor, others: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(ones, others, dim=1).min())


@dataclass(frozen=True, slots=True)
class _Batch:
    """Texts by number, padded to the longest: int64 [num_texts, num_tokens] each."""

    numbers: list[int]
    ids: Tensor
    mask: Tensor


class HuggingFace:
    """The same model in transformers."""

    def __init__(self, path: Path, dtype: torch.dtype, pooling: ModelPooling) -> None:
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._model: Any = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
        self._pooling = pooling

    @torch.inference_mode()
    def embed(self, texts: Texts, batch_size: int) -> Tensor:
        """float64 [num_texts, size]"""
        num_threads = torch.get_num_threads()  # one, beside the engine's
        torch.set_num_threads(num_usable_cores())
        try:
            found = torch.empty(len(texts), self._model.config.hidden_size, dtype=torch.float64)
            for batch in _batches(texts, batch_size):
                output = self._model(batch.ids, attention_mask=batch.mask, use_cache=False)
                found[batch.numbers] = self._pooled(output.last_hidden_state, batch.mask)
        finally:
            torch.set_num_threads(num_threads)
        return found

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        kind, lengths = self._pooling.kind, mask.sum(1)
        hidden = hidden.double()
        if kind == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        else:
            places = lengths - 1 if kind == "last" else torch.zeros_like(lengths)
            pooled = hidden[torch.arange(len(hidden)), places]
        return (
            torch.nn.functional.normalize(pooled, dim=1) if self._pooling.is_normalized else pooled
        )


def _batches(texts: Texts, batch_size: int) -> list[_Batch]:
    """The longest first; padded on the right, as for a causal model any side will do."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    batches = []
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        width = len(texts[numbers[0]])
        ids = torch.zeros(len(numbers), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):
            ids[row, : len(texts[number])] = torch.tensor(texts[number])
            mask[row, : len(texts[number])] = 1
        batches.append(_Batch(numbers, ids, mask))
    return batches
