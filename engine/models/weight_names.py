"""From our parameter names to those of Hugging Face's Llama family of checkpoints.

A fused parameter of ours is several of theirs, stacked in order.
"""

from __future__ import annotations

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def llama_weight_names(parameter: str) -> tuple[str, ...]:
    """The checkpoint's tensors that make up one parameter of the decoder."""
    if parameter.startswith("lm_head."):
        return (parameter,)
    module, _, kind = parameter.rpartition(".")
    parent, _, name = module.rpartition(".")
    prefix = f"model.{parent}." if parent else "model."
    return tuple(f"{prefix}{part}.{kind}" for part in _FUSED.get(name, (name,)))


def is_ignorable(tensor: str) -> bool:
    """A tensor that some checkpoints carry and no decoder needs: it follows from the config."""
    return tensor.endswith(("rotary_emb.inv_freq", ".attn.bias", ".masked_bias"))
