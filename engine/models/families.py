"""The model families: how each one's `config.json` and weight names map to the one decoder.

Only switches and names. All families name their modules as Llama's checkpoints do; a fused module
of the decoder is several of the checkpoint's, stacked in order.
"""

from __future__ import annotations

from penstock.engine.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    DecoderChoices,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
)


def read_llama_config(fields: ConfigFields) -> DecoderConfig:
    """`LlamaForCausalLM`: one switch each for the biases of attention and of the MLP."""
    has_attention_bias = fields.boolean("attention_bias", False)
    return read_decoder_config(
        fields,
        DecoderChoices(
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=fields.boolean("mlp_bias", False),
        ),
    )


def read_mistral_config(fields: ConfigFields) -> DecoderConfig:
    """`MistralForCausalLM`: Llama with 8 key heads by default and one window for all layers."""
    window = fields.nullable_integer("sliding_window", 4096)
    num_layers = read_num_layers(fields)
    return read_decoder_config(
        fields, DecoderChoices(num_kv_heads=8, windows=(window,) * num_layers)
    )


def read_qwen2_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen2ForCausalLM`: biases on queries, keys and values; windows on upper layers."""
    choices = DecoderChoices(num_kv_heads=32, windows=_windows(fields), has_qkv_bias=True)
    return read_decoder_config(fields, choices)


def read_qwen3_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen3ForCausalLM`: queries and keys are normalised per head before they are rotated."""
    has_attention_bias = fields.boolean("attention_bias", False)
    choices = DecoderChoices(
        num_kv_heads=32,
        head_dim=128,
        windows=_windows(fields),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    return read_decoder_config(fields, choices)


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on, or those listed in `layer_types`, have a window."""
    num_layers = read_num_layers(fields)
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.nullable_integer("sliding_window", 4096)
    if "layer_types" in fields:
        kinds = fields.texts("layer_types")
    else:
        first = (
            fields.integer("max_window_layers", 28, minimum=0) if window is not None else num_layers
        )
        kinds = tuple(
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(num_layers)
        )
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise fields.error(
            "layer_types",
            f"expected {num_layers} of 'full_attention' and 'sliding_attention', not {kinds}",
        )
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "'sliding_attention' needs use_sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def llama_module_names(module: str) -> tuple[str, ...]:
    """The checkpoint's modules that make up one module of the decoder."""
    if module == "lm_head":
        return (module,)
    parent, _, name = module.rpartition(".")
    prefix = f"model.{parent}." if parent else "model."
    return tuple(f"{prefix}{part}" for part in _FUSED.get(name, (name,)))


def is_ignorable(tensor: str) -> bool:
    """Whether a checkpoint's tensor is redundant, since it follows from the config, or serves
    products in FP8 that there are not."""
    return tensor.endswith(("rotary_emb.inv_freq", ".attn.bias", ".masked_bias", ".q_scale"))
