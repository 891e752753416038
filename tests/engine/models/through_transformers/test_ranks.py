"""Models through `transformers` on two ranks compute what they compute on one.

One other process is the second rank of all models here: to start it takes longer than the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiers import tiered
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.loader import load_model
from penstock.engine.models.through_transformers.backend import TransformersModel
from penstock.engine.parallel.ranks import ALONE, Ranks, SharedRanks, shared_file

from ..conftest import BLOCK_SIZE, run_paged
from .test_backend import config_of

TOKEN_IDS = [(7 * number) % 89 + 3 for number in range(40)]
CHUNKS = (5, 16, 1, 17, 1)
# What is special about a case → the kind of model, how many stages, fields, settings.
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "no gate": ("arcee", 1, {}, {}),
    "one matrix of queries, keys and values": ("gpt_neox", 1, {}, {}),
    "experts": ("mixtral", 1, {}, {}),
    "experts beside others": ("glm4_moe", 1, {}, {}),
    "a plan with all heads": ("olmo2", 1, {}, {}),
    "a plan with fused matrices": ("phi3", 1, {}, {}),
    "biases": ("phi", 1, {}, {}),
    "sinks": ("granite_swa", 1, {}, {}),
    "an embedding of its own kind": ("gemma2", 1, {}, {}),
    "fewer keys than ranks": ("granite", 1, {"num_key_value_heads": 1}, {}),
    "int8": ("smollm3", 1, {"intermediate_size": 128}, {"quantization": "int8"}),
    "stages": ("granite", 2, {"num_hidden_layers": 4}, {}),
    "stages with other layers": ("glm4_moe", 2, {}, {}),
}
WITH_ALL_HEADS = ("a plan with all heads", "a plan with fused matrices")
IN_TORCH = ("experts", "a plan with fused matrices", "fewer keys than ranks", "stages")


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is to compute.

    Attributes:
        by_kernels: as far as possible, not by torch.
    """

    path: Path
    settings: dict[str, Any]
    by_kernels: bool = True


def compute(job: Job, ranks: Ranks) -> tuple[TransformersModel, Tensor]:
    """The model, and the logits of all tokens."""
    config = ModelConfig(
        model_impl="transformers", dtype="float32", max_model_len=128, quantize_activations=False,
        **job.settings,
    )  # fmt: skip
    model = load_model(config, job.path, torch.device("cpu"), ranks=ranks)
    assert isinstance(model, TransformersModel)
    library = cpu_kernels(model, BLOCK_SIZE, num_threads=1) if job.by_kernels else None
    fastest(model, BLOCK_SIZE, library)
    return model, run_paged(model, TOKEN_IDS, CHUNKS)


def make_ranks(rank: int, files: list[int], pid: int, num_stages: int) -> Ranks:
    """
    Args:
        files: in memory, of process `pid`.
    """
    fds = [os.open(f"/proc/{pid}/fd/{each}", os.O_RDWR) for each in files]
    layers = ALONE if num_stages == 2 else None
    return SharedRanks(
        rank=rank, size=2, fd=fds[0], store="", layers=layers,
        stage=rank if num_stages == 2 else 0, num_stages=num_stages,
    )  # fmt: skip


def serve(jobs: Connection, pid: int) -> None:
    """Be the second rank, until `jobs` end."""
    while (given := jobs.recv()) is not None:
        job, files, num_stages = given
        try:
            compute(job, make_ranks(1, files, pid, num_stages))
        except ConfigError as error:
            jobs.send(str(error))
        else:
            jobs.send("")


OnTwoRanks = Callable[..., tuple[TransformersModel, Tensor]]


@pytest.fixture(scope="module")
def on_two_ranks() -> Iterator[OnTwoRanks]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, os.getpid()), daemon=True)
    process.start()

    def run(job: Job, *, num_stages: int = 1) -> tuple[TransformersModel, Tensor]:
        file = shared_file()
        ours.send((job, [file], num_stages))
        try:
            return compute(job, make_ranks(0, [file], os.getpid(), num_stages))
        finally:
            assert ours.poll(60)
            ours.recv()
            os.close(file)

    yield run
    ours.send(None)
    process.join()


def save(kind: str, path: Path, **fields: Any) -> None:
    """A checkpoint of random numbers."""
    config = config_of(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)


FIRST = [
    ("no gate", True), ("experts", True), ("a plan with all heads", True),
    ("a plan with fused matrices", False), ("stages", True),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "by_kernels"),
    tiered([*product(CASES, (True,)), *product(IN_TORCH, (False,))], FIRST),
)
def test_two_ranks_compute_what_one_does(
    case: str, by_kernels: bool, tmp_path: Path, on_two_ranks: OnTwoRanks
) -> None:
    kind, num_stages, fields, settings = CASES[case]
    save(kind, tmp_path, **fields)
    job = Job(tmp_path, settings, by_kernels)
    whole, expected = compute(job, ALONE)
    part, got = on_two_ranks(job, num_stages=num_stages)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert part.weight_bytes < 0.65 * whole.weight_bytes
    num_heads = [model.state_spec[0].layers[0].num_heads for model in (whole, part)]
    if case in ("fewer keys than ranks", *WITH_ALL_HEADS) or num_stages == 2:
        assert num_heads[1] == num_heads[0]
    else:
        assert 2 * num_heads[1] == num_heads[0]
    if num_stages == 2:
        assert len(part.state_spec[0].layers) == len(whole.state_spec[0].layers) // 2
    elif case == "int8" and by_kernels:  # Llama's layers: some are one call
        assert all("forward" in vars(layer) for layer in part.causal_lm.model.layers)


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "no plan": ("gpt2", 1, {}, "no plan of how ranks share GPT2LMHeadModel"),
    "no plan of stages": ("nanochat", 2, {}, "no plan of how stages share NanoChatForCausalLM"),
    "heads": (
        "arcee",
        1,
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
        "num_attention_heads is 3, which 2 ranks cannot share",
    ),
    "key heads": (
        "arcee",
        1,
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
        "num_key_value_heads is 3, which 2 ranks cannot share",
    ),
    "inner values": (
        "gpt_neox",
        1,
        {"intermediate_size": 97},
        "the output size of gpt_neox.layers.0.mlp.dense_h_to_4h is 97, which 2 ranks cannot share",
    ),
    "experts": (
        "mixtral",
        1,
        {"intermediate_size": 97},
        "the inner size of model.layers.0.mlp.experts.gate_up_proj is 97, which 2 ranks",
    ),
    "layers": ("granite", 2, {"num_hidden_layers": 1}, "num_hidden_layers is 1, fewer than stages"),
    "norms of heads": (
        "cohere",
        1,
        {"use_qk_norm": True},
        "CohereForCausalLM cannot be shared by the plan of transformers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_cannot_share_is_refused_before_weights_are_read(
    case: str, tmp_path: Path
) -> None:
    kind, num_stages, fields, message = REFUSED[case]
    config = config_of(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)  # and no weights
    file = shared_file()
    with pytest.raises(ConfigError, match=re.escape(message)):
        compute(Job(tmp_path, {}), make_ranks(0, [file], os.getpid(), num_stages))
    os.close(file)


def test_a_plan_that_we_cannot_carry_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LlamaConfig.base_model_tp_plan | {"layers.*.mlp.up_proj": "colwise_in_pairs"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    config_of("llama").save_pretrained(tmp_path)
    file = shared_file()
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM has model\.layers\.0\.mlp\.up_proj colwise_in_pairs"
    ):
        compute(Job(tmp_path, {}), make_ranks(0, [file], os.getpid(), 1))
    os.close(file)
