"""Sixteen prompts of mixed length, an engine for them, and what `transformers` answers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core

VOCAB_SIZE = 160
NUM_NEW = 24
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "experts": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
SCHEDULES = {
    "whole": (SchedulerConfig(max_num_batched_tokens=512, enable_chunked_prefill=False), 400),
    "chunked": (SchedulerConfig(max_num_batched_tokens=33), 400),
    "two in flight": (SchedulerConfig(max_num_batched_tokens=33, max_steps_in_flight=2), 400),
    "small pool": (SchedulerConfig(max_num_batched_tokens=64), 24),
}
CPU = DeviceConfig(device="cpu")
NEAR_TIE = 1e-4  # a first divergence is excused only where the top two logits are this close


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    lengths = [1, 2, 5, 15, 16, 17, 31, 32, 33, 47, 64, 80, 96, 100, 120, 150]
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
        core.scheduler.blocks.check_integrity()
    assert core.scheduler.blocks.tiers.device.num_held == 0
    return tokens


def engine(
    path: Path,
    schedule: SchedulerConfig,
    num_blocks: int,
    *,
    device: DeviceConfig = CPU,
) -> EngineCore:
    core, info = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32"),
            cache=CacheConfig(num_blocks=num_blocks),
            scheduler=schedule,
            device=device,
        )
    )
    assert info.device.startswith(device.device)
    return core


def requests(params: SamplingParams) -> list[Request]:
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(prompt),
            sampling_params=replace(params, seed=index),
            arrival_s=float(index),
        )
        for index, prompt in enumerate(prompts())
    ]


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """`transformers` reads a GGUF file several times for a tokenizer and a model, and makes an
    array of each number and text of the vocabulary: slices of a memory map take most of the
    time."""
    read = gguf.GGUFReader

    @functools.cache
    def in_memory(path: Path) -> gguf.GGUFReader:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
            return read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", in_memory)
        yield


def reference_tokens(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Any]:
    """The reference's model and its greedy tokens, once per architecture."""
    known: dict[str, Any] = {}

    def generate(name: str) -> Any:
        if name not in known:
            architecture, overrides = ARCHITECTURES[name]
            path = tiny_checkpoint(architecture, **overrides)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            tokens = [
                model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=NUM_NEW,
                    do_sample=False,
                    pad_token_id=0,
                )[0, len(prompt) :].tolist()
                for prompt in prompts()
            ]
            known[name] = (path, model, tokens)
        return known[name]

    return generate


def excuse(model: Any, prompt: list[int], got: list[int], expected: list[int]) -> float:
    """The reference's gap between its top two logits where the two first differ."""
    place = next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
        min(len(got), len(expected)),
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    top = logits.topk(2).values
    return float(top[0] - top[1])


def check_greedy_parity(
    name: str,
    schedule: str,
    expected_tokens: Callable[[str], Any],
    *,
    device: DeviceConfig = CPU,
) -> None:
    """Assert that the engine's greedy tokens are the reference's, near ties apart."""
    path, model, expected = expected_tokens(name)
    core = engine(path, *SCHEDULES[schedule], device=device)
    tokens = run(core, requests(SamplingParams(temperature=0.0, max_tokens=NUM_NEW)))
    num_excused = 0
    for index, prompt in enumerate(prompts()):
        if tokens[f"r{index}"] != expected[index]:
            gap = excuse(model, prompt, tokens[f"r{index}"], expected[index])
            print(f"{name}, {schedule}, prompt {index}: top two logits differ by {gap:.2e}")
            assert gap < NEAR_TIE
            num_excused += 1
    assert num_excused <= sum(map(len, expected)) / 10_000
    assert (core.scheduler.counters.num_preemptions > 0) == (schedule == "small pool")


def expected_tokens(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """The likeliest tokens of `transformers`, so many whatever ends an answer."""
    with torch.inference_mode():
        tokens: list[int] = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    return tokens
