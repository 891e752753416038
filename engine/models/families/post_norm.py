"""Families that normalise what blocks add to the stream: OLMo 2, EXAONE 4, and GLM-4, which does it
before blocks, too. OLMo 1, whose norms have no weights, and GLM are beside their successors."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.layers.rotary import NO_ROPE
from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
    read_layer_kinds,
)
from penstock.engine.models.names import WeightNames


def read_olmo_config(fields: ConfigFields) -> DecoderConfig:
    """`OlmoForCausalLM`: Llama with layer norms without weights (Groeneveld et al., 2024)."""
    fields = fields.renamed(rms_norm_eps="")  # always the default
    limit = fields.optional_number("clip_qkv", maximum=1e6)
    return replace(_read_olmo(fields), norm="layer", qkv_limit=limit)


OLMO_NAMES = WeightNames(
    modules={"norm": (), "input_layernorm": (), "post_attention_layernorm": ()},
)


def read_olmo2_config(fields: ConfigFields) -> DecoderConfig:
    """`Olmo2ForCausalLM`: norms after blocks, none before; queries and keys are normalised over all
    heads (OLMo Team, 2025)."""
    return replace(
        _read_olmo(fields),
        has_pre_norms=False,
        has_post_norms=True,
        has_qk_norm=True,
        qk_norm="row",
    )


def _read_olmo(fields: ConfigFields) -> DecoderConfig:
    has_bias = fields.boolean("attention_bias", False)
    return read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5, context_len=2048, has_qkv_bias=has_bias, has_output_bias=has_bias
        ),
    )


POST_NORM_NAMES = WeightNames(
    modules={
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
)


def read_exaone4_config(fields: ConfigFields) -> DecoderConfig:
    """`Exaone4ForCausalLM`: where layers with a window alternate with others, only they have rotary
    positions (LG AI Research, 2025)."""
    window = fields.nullable_integer("sliding_window", 4096)
    pattern = 1
    if window is not None and "layer_types" not in fields:
        pattern = fields.integer("sliding_window_pattern", 4)
    has_window = read_layer_kinds(
        fields, lambda layer: window is not None and (layer + 1) % pattern != 0
    )
    config = read_decoder_config(
        fields, ConfigDefaults(norm_eps=1e-5, context_len=2048, has_qk_norm=True)
    )
    ropes = tuple(config.rope if window is None or each else NO_ROPE for each in has_window)
    return replace(
        config,
        has_pre_norms=False,
        has_post_norms=True,
        layer_ropes=ropes,
        windows=tuple(window if each else None for each in has_window),
    )


def read_glm_config(fields: ConfigFields) -> DecoderConfig:
    """`GlmForCausalLM`, GLM-4 of 2024 and GLM-Edge: Llama with biases; half of each head is turned,
    in pairs of neighbours (GLM Team, 2024)."""
    return read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=2,
            head_dim=128,
            norm_eps=1.5625e-07,
            context_len=131_072,
            rotary_factor=0.5,
            is_interleaved=True,
            has_qkv_bias=fields.boolean("attention_bias", True),
        ),
    )


GLM_NAMES = WeightNames(modules={"mlp.gate_up_proj": ("mlp.gate_up_proj",)})


def read_glm4_config(fields: ConfigFields) -> DecoderConfig:
    """`Glm4ForCausalLM`, GLM-4 of 2025: the same with norms after blocks, too."""
    return replace(read_glm_config(fields), has_post_norms=True)


GLM4_NAMES = WeightNames(
    modules={
        **GLM_NAMES.modules,
        "attention_post_norm": ("post_self_attn_layernorm",),
        "mlp_post_norm": ("post_mlp_layernorm",),
    },
)
