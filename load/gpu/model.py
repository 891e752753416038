"""The random checkpoint for decode steps and whole workloads.

It is only a `config.json`: the weights follow from a seed (`--load-format dummy`), so that the
engine and Hugging Face make the same ones.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.config import ModelConfig
from penstock.engine.layers.linear import Linear
from penstock.engine.models.loader import load_model
from penstock.engine.models.registry import read_model_config
from penstock.engine.runner.kv_cache import KVShape
from penstock.load.gpu.bench import Sizes
from penstock.load.workloads.lengths import TraceSpec, make_trace


@contextmanager
def checkpoint(sizes: Sizes) -> Iterator[ModelConfig]:
    """The model's configuration for the engine, valid during the block."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes.model), encoding="utf-8")
        yield ModelConfig(model=folder, load_format="dummy")


def kv_shape(sizes: Sizes, *, dtype: torch.dtype) -> KVShape:
    """One block of the model's KV pool."""
    return KVShape(
        num_layers=sizes.model["num_hidden_layers"],
        block_size=sizes.attention.block_size,
        num_kv_heads=sizes.model["num_key_value_heads"],
        head_size=sizes.model["head_dim"],
        dtype=dtype,
    )


def num_weights_read(path: Path) -> int:
    """Numbers of the weights that a step must read: all but the embedding, which is looked up."""
    _, config = read_model_config(path)
    query, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    attention = config.hidden_size * 2 * (query + kv)
    mlp = 3 * config.hidden_size * config.intermediate_size
    layer = attention + mlp + 2 * config.hidden_size
    return config.num_layers * layer + config.hidden_size * (config.vocab_size + 1)


def hugging_face_model(config: ModelConfig, device: torch.device) -> Any:
    """`transformers`' model with the same weights that the engine makes for `config`."""
    path = Path(config.model)
    decoder = load_model(config, path, device)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(path), dtype=decoder.dtype
        )
    model.load_state_dict(_checkpoint_tensors(decoder, path), assign=True)
    model.generation_config.eos_token_id = None  # else it would stand in where none is given
    return model.eval()


def free_memory() -> None:
    """Release unused memory, above all that of models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _checkpoint_tensors(decoder: torch.nn.Module, model_path: Path) -> dict[str, torch.Tensor]:
    """The decoder's weights by their names in a checkpoint: fused matrices in their parts."""
    architecture, _ = read_model_config(model_path)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in decoder.named_parameters():
        path, _, kind = name.rpartition(".")
        module = decoder.get_submodule(path)
        sizes = list(module.part_sizes) if isinstance(module, Linear) else [len(parameter)]
        names = (f"{each}.{kind}" for each in architecture.names(path))
        tensors.update(zip(names, torch.split(parameter.data, sizes), strict=True))
    return tensors


# Requests as they come to a server, for engines that run in this process.
#
# Random tokens of ShareGPT-like lengths; none ends before its length.


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    index: int  # by its arrival, from 0
    prompt: tuple[int, ...]
    num_output_tokens: int


def make_jobs(spec: TraceSpec, *, vocab_size: int, seed: int) -> list[Job]:
    """The jobs of a trace. Seeds change tokens, not lengths."""
    rng, tokens = random.Random(seed), range(vocab_size)
    return [
        Job(
            index,
            prompt=tuple(rng.choices(tokens, k=request.num_prompt_tokens)),
            num_output_tokens=request.num_output_tokens,
        )
        for index, request in enumerate(make_trace(spec))
    ]


def by_prompt(jobs: Sequence[Job]) -> list[Job]:
    """Sorted by prompt length, which callers know."""
    return sorted(jobs, key=lambda job: len(job.prompt))


def by_output(jobs: Sequence[Job]) -> list[Job]:
    """Sorted by output length, so that a batch ends at once; no caller knows it."""
    return sorted(jobs, key=lambda job: job.num_output_tokens)


def batches(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Static batches of neighbours, in random order, so that the first ones are representative."""
    starts = list(range(0, len(jobs), size))
    random.Random(0).shuffle(starts)
    for start in starts:
        yield list(jobs[start : start + size])
