"""Google's Gemma: norms of 1 + weight, a scaled embedding; from the second on norms after blocks,
too."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
    read_layer_kinds,
    read_num_layers,
    read_rope_config,
)
from penstock.engine.models.names import WeightNames

_MAX_CAP = 1e6


def read_gemma_config(fields: ConfigFields) -> DecoderConfig:
    """`GemmaForCausalLM` (Gemma Team, 2024)."""
    config = _read(fields, num_kv_heads=16)
    if config.activation not in ("gelu", "gelu_tanh"):
        raise fields.unsupported("hidden_act", f"{config.activation!r} is not supported here")
    return replace(config, activation="gelu_tanh")  # "gelu" in early checkpoints means it, too


def read_gemma2_config(fields: ConfigFields) -> DecoderConfig:
    """`Gemma2ForCausalLM`: every other layer has a window, scores and logits a soft cap (Gemma
    Team, 2024)."""
    fields = fields.renamed(hidden_act="hidden_activation")
    has_window = read_layer_kinds(fields, lambda layer: layer % 2 == 0)
    return replace(
        _read(fields, num_kv_heads=4),
        windows=_windows(fields, has_window),
        has_post_norms=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3_config(fields: ConfigFields) -> DecoderConfig:
    """`Gemma3ForCausalLM`, its text: five layers with a window and rotary positions of their own,
    then one without; queries and keys are normalised (Gemma Team, 2025)."""
    fields = fields.renamed(hidden_act="hidden_activation")
    pattern = fields.integer("sliding_window_pattern", 6)
    has_window = read_layer_kinds(fields, lambda layer: (layer + 1) % pattern != 0)
    defaults = ConfigDefaults(num_kv_heads=4, theta=1_000_000.0)
    config = _read(fields, num_kv_heads=4)
    nested = fields.section("rope_parameters")
    is_nested = "full_attention" in nested or "sliding_attention" in nested
    wide = nested.section("full_attention") if is_nested else None
    near = nested.section("sliding_attention")  # empty in files of transformers 4
    names = {} if is_nested else {"rope_theta": "rope_local_base_freq"}
    rope = read_rope_config(fields, defaults, config.head_dim, wide)
    near_rope = read_rope_config(
        fields.renamed(**names), replace(defaults, theta=10_000.0), config.head_dim, near
    )
    return replace(
        config,
        rope=rope,
        layer_ropes=tuple(near_rope if each else rope for each in has_window),
        windows=_windows(fields, has_window),
        context_len=fields.integer("max_position_embeddings", 131_072),  # scaling included
        has_post_norms=True,
        has_qk_norm=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", None),
        logit_soft_cap=_cap(fields, "final_logit_softcapping", None),
    )


def _read(fields: ConfigFields, *, num_kv_heads: int) -> DecoderConfig:
    fields.require("use_bidirectional_attention", False)
    has_attention_bias = fields.boolean("attention_bias", False)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=num_kv_heads,
            head_dim=256,
            is_tied=True,
            activation="gelu_pytorch_tanh",
            context_len=8192,
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
        ),
    )
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def _windows(fields: ConfigFields, has_window: tuple[bool, ...]) -> tuple[int | None, ...]:
    window = fields.nullable_integer("sliding_window", 4096)
    assert len(has_window) == read_num_layers(fields)
    return tuple(window if each else None for each in has_window)


def _cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """A soft cap, which a null turns off."""
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, default, maximum=_MAX_CAP)


SANDWICH_NAMES = WeightNames(
    modules={
        "attention_post_norm": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
)
