"""Rotary frequencies against transformers' `modeling_rope_utils`, parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.engine.layers.rotary import (
    RopeConfig,
    attention_factor,
    dynamic_frequencies,
    inverse_frequencies,
    theta_frequencies,
)

CONTEXT = 2048


def _theirs(head_dim: int, seq_len: int | None = None, **rope: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=CONTEXT, rope_parameters=dict(rope)
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 20.0, "beta_slow": 3.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
    ],
)
def test_frequencies_equal_transformers(rope, theta, head_dim):
    original = 512 if rope["rope_type"] in ("yarn", "llama3") else CONTEXT
    extra = {"original_max_position_embeddings": original} if original != CONTEXT else {}
    frequencies, scale = _theirs(head_dim, rope_theta=theta, **extra, **rope)
    config = RopeConfig(theta=theta, original_max_position_embeddings=original, **rope)
    torch.testing.assert_close(
        inverse_frequencies(config, head_dim), frequencies, rtol=1e-6, atol=0
    )
    assert attention_factor(config) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("head_dim", [16, 128])
def test_dynamic_frequencies_follow_the_length(head_dim):
    config = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=CONTEXT)
    lengths = torch.tensor([1, 2047, 2048, 2049, 5000, 8192])
    rows = dynamic_frequencies(config, head_dim, lengths)
    for length, row in zip(lengths, rows, strict=True):
        theirs, _ = _theirs(
            head_dim, seq_len=length, rope_type="dynamic", rope_theta=10_000.0, factor=4.0
        )
        torch.testing.assert_close(row, theirs, rtol=1e-6, atol=0)
    plain = theta_frequencies(10_000.0, head_dim)
    torch.testing.assert_close(rows[:3], plain.expand(3, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [2048, 2049])
def test_longrope_follows_the_longest_sequence_that_there_may_be(length):
    factors = {
        "short_factor": [1 + i / 9 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
    theirs, scale = _theirs(
        16, length, rope_type="longrope", rope_theta=1e4, factor=8.0,
        original_max_position_embeddings=CONTEXT, **factors,
    )  # fmt: skip
    config = RopeConfig(
        rope_type="longrope", factor=8.0, original_max_position_embeddings=CONTEXT,
        short_factors=tuple(factors["short_factor"]), long_factors=tuple(factors["long_factor"]),
    ).within(length)  # fmt: skip
    torch.testing.assert_close(inverse_frequencies(config, 16), theirs, rtol=1e-6, atol=0)
    assert attention_factor(config) == pytest.approx(scale, rel=1e-12)


class _OfOneDevice(TorchDispatchMode):
    """Every tensor that an operation takes or gives is on this device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor):
                assert each.device.type == self._device, f"{operation} with a {each.device} tensor"
        return result


def test_dynamic_frequencies_take_no_tensor_from_the_host():
    """Else no step of such a model could be captured as a CUDA graph."""
    config = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=CONTEXT)
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    with _OfOneDevice("meta"):
        dynamic_frequencies(config, 16, lengths)
