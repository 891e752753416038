"""Our decoder against transformers': the same logits for every architecture and option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiers import tiered

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
NUM_TOKENS = 45
CHUNKINGS = {
    "whole": [45],
    "chunks": [7, 1, 16, 4, 3, 14],
    "prefill and decode": [30] + [1] * 15,
}


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0} | values}


def _short(**values: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 32} | values


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama one key head": (LLAMA, {"num_key_value_heads": 1}),
    "llama every head a key head": (LLAMA, {"num_key_value_heads": 4}),
    "llama wide heads": (LLAMA, {"head_dim": 32}),
    "llama theta": (LLAMA, _rope("default", rope_theta=500.0)),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral window": (MISTRAL, {"sliding_window": 9}),
    "mistral wide heads": (MISTRAL, {"sliding_window": 64, "head_dim": 32}),
    "qwen2": (QWEN2, {}),
    "qwen2 tied": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2 window above": (
        QWEN2,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2 window by type": (
        QWEN2,
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": (QWEN3, {}),
    "qwen3 tied": (QWEN3, {"tie_word_embeddings": True}),
    "qwen3 biases": (QWEN3, {"attention_bias": True}),
    "qwen3 window": (
        QWEN3,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "head_dim": 32},
    ),
    "linear": (LLAMA, _short(**_rope("linear", factor=4.0))),
    "dynamic": (LLAMA, _short(**_rope("dynamic", factor=4.0))),
    "yarn": (
        QWEN2,
        _short(**_rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    ),
    "yarn options": (
        LLAMA,
        _short(
            **_rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=16,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=0.4,
                truncate=False,
            )
        ),
    ),
    "yarn attention factor": (
        LLAMA,
        _short(
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.9)
        ),
    ),
    "llama3": (
        LLAMA,
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
}
HALVES = [(QWEN2, "bfloat16"), (QWEN3, "float16"), (LLAMA, "float16"), (MISTRAL, "bfloat16")]
# How frequencies are scaled is in `layers/test_rotary` too.
FIRST = (
    "llama",
    "llama biases",
    "llama one key head",
    "mistral window",
    "qwen2 tied",
    "qwen2 window above",
    "qwen3 window",
    "dynamic",
    "yarn options",
)


def _token_ids(num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 160, (num_tokens,), generator=generator).tolist()


@torch.inference_mode()
def _expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("variant", tiered(VARIANTS, FIRST))
def test_float32_logits(variant, tiny_checkpoint, reference, paged_logits):
    architecture, overrides = VARIANTS[variant]
    path = tiny_checkpoint(architecture, **overrides)
    expected = _expected(reference(path), _token_ids())
    assert expected.std() > 0.5
    for chunks in CHUNKINGS.values():
        logits = paged_logits(path, _token_ids(), chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "dtype"), tiered(HALVES, HALVES[:2]))
def test_half_precision_is_as_exact_as_transformers(
    architecture, dtype, tiny_checkpoint, reference, paged_logits
):
    path = tiny_checkpoint(architecture, dtype=dtype)
    exact = _expected(reference(path), _token_ids())
    theirs = _expected(reference(path, dtype), _token_ids())
    ours = paged_logits(path, _token_ids(), CHUNKINGS["prefill and decode"])
    our_error, their_error = ((logits - exact).pow(2).mean().sqrt() for logits in (ours, theirs))
    assert our_error < 1.25 * their_error


@pytest.mark.parametrize("num_prompt", [20, 40])
def test_dynamic_rotary_grows_as_in_single_steps(
    num_prompt, tiny_checkpoint, reference, paged_logits
):
    """Chunks and order of computation do not matter; only the prompt's length does."""
    path = tiny_checkpoint(LLAMA, **_short(**_rope("dynamic", factor=4.0)))
    token_ids = _token_ids(60)
    model = reference(path)
    with torch.inference_mode():
        output = model(torch.tensor([token_ids[:num_prompt]]), use_cache=True)
        rows = [output.logits[0]]
        for token_id in token_ids[num_prompt:]:
            output = model(torch.tensor([[token_id]]), past_key_values=output.past_key_values)
            rows.append(output.logits[0])
    expected = torch.cat(rows)
    for chunks in ([num_prompt] + [1] * (60 - num_prompt), [60], [11, 13, 30, 6]):
        logits = paged_logits(path, token_ids, chunks, num_prompt=num_prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_configs_of_transformers_4(tmp_path: Path, tiny_checkpoint, reference, paged_logits):
    """`rope_theta` and `rope_scaling` beside each other, the kind as `type`, `torch_dtype`."""
    path = tiny_checkpoint(LLAMA, **_short(**_rope("linear", factor=4.0, rope_theta=500.0)))
    old = tmp_path / "old"
    shutil.copytree(path, old)
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert rope == {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    config |= {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "torch_dtype": config.pop("dtype"),
    }
    (old / "config.json").write_text(json.dumps(config))
    expected = _expected(reference(path), _token_ids())
    logits = paged_logits(old, _token_ids(), CHUNKINGS["whole"])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_sharded_checkpoint(is_tied, tiny_checkpoint, paged_logits):
    single = tiny_checkpoint(LLAMA, tie_word_embeddings=is_tied)
    sharded = tiny_checkpoint(LLAMA, tie_word_embeddings=is_tied, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    logits = [paged_logits(path, _token_ids(), [45]) for path in (single, sharded)]
    assert torch.equal(*logits)
