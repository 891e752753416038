"""Writes a twin of a GGUF model: the same function, weights that lie on no quantizer's grid.

    python -m tests.support.off_grid_twin SmolLM2-135M-Instruct.Q4_1.gguf DIRECTORY

Weights that come from a file in few bits lie on the grid of its quantizer, which flatters or
punishes another one. This folds the norms of a Llama model into the matrices after them, and turns
pairs of channels of the residual stream by random angles, which the matrices around it undo.
Magnitudes and outliers stay nearly as they were. It needs the package `accelerate`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

_PROMPT = "The three primary colors are red, blue and"
_MAX_ANGLE = 0.6


def turned(weights: dict[str, Tensor], hidden_size: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The twin's weights, with a head of its own, in float64."""
    turn = _rotation(hidden_size, seed)
    result = dict(weights)
    for name, values in weights.items():
        if not name.startswith("model.layers."):
            continue
        layer, kind = ".".join(name.split(".")[:3]), name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            result[name] = values * weights[f"{layer}.input_layernorm.weight"] @ turn
        elif kind in ("gate_proj", "up_proj"):
            result[name] = values * weights[f"{layer}.post_attention_layernorm.weight"] @ turn
        elif kind in ("o_proj", "down_proj"):
            result[name] = turn.T @ values
        elif kind.endswith("layernorm"):
            result[name] = torch.ones_like(values)
    table = weights["model.embed_tokens.weight"]
    result["lm_head.weight"] = table * weights["model.norm.weight"] @ turn
    result["model.embed_tokens.weight"] = table @ turn
    result["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    return result


def _rotation(size: int, seed: int) -> Tensor:
    """Of random pairs of channels, float64 [size, size], orthogonal."""
    torch.manual_seed(seed)
    order = torch.randperm(size)
    angles = (torch.rand(size // 2, dtype=torch.double) * 2 - 1) * _MAX_ANGLE
    first, second = order[: size // 2], order[size // 2 :]
    turn = torch.eye(size, dtype=torch.double)
    turn[first, first] = turn[second, second] = angles.cos()
    turn[first, second], turn[second, first] = angles.sin(), -angles.sin()
    return turn


def main(source: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    weights = {name: values.detach().double() for name, values in model.state_dict().items()}
    settings = {
        key: value for key, value in model.config.to_dict().items() if "quantization" not in key
    }
    twin = LlamaForCausalLM(LlamaConfig(**settings | {"tie_word_embeddings": False}))
    made = turned(weights, model.config.hidden_size)
    twin.load_state_dict({name: values.float() for name, values in made.items()})
    ids = tokenizer(_PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (model(ids).logits - twin(ids).logits).abs().max().item()
    print(f"largest difference of logits: {difference:.1e}")
    twin.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
