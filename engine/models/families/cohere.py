"""Families with layer norms and a gated MLP: Cohere's Command, and StableLM."""

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
from penstock.engine.models.names import EACH_HEAD, WeightNames


def read_cohere_config(fields: ConfigFields) -> DecoderConfig:
    """`CohereForCausalLM`, Command R: attention and MLP side by side after one norm, which has no
    bias."""
    return _read_cohere(fields, theta=500_000.0, has_qk_norm=fields.boolean("use_qk_norm", False))


def read_cohere2_config(fields: ConfigFields) -> DecoderConfig:
    """`Cohere2ForCausalLM`, Command R7B and A: layers with a window have rotary positions, every
    fourth has neither."""
    window = fields.integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", 4)
    has_window = read_layer_kinds(fields, lambda layer: (layer + 1) % pattern != 0)
    config = _read_cohere(fields, theta=10_000.0, has_qk_norm=False)
    return replace(
        config,
        windows=tuple(window if each else None for each in has_window),
        layer_ropes=tuple(config.rope if each else NO_ROPE for each in has_window),
    )


def _read_cohere(fields: ConfigFields, *, theta: float, has_qk_norm: bool) -> DecoderConfig:
    fields = fields.renamed(rms_norm_eps="layer_norm_eps")
    has_attention_bias = fields.boolean("attention_bias", False)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            theta=theta,
            is_tied=True,
            context_len=8192,
            is_interleaved=True,
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
            has_qk_norm=has_qk_norm,
        ),
    )
    return replace(
        config,
        norm="layer",
        is_parallel=True,
        has_mlp_norm=False,
        qk_norm="layer",
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def read_stablelm_config(fields: ConfigFields) -> DecoderConfig:
    """`StableLmForCausalLM`: heads partly turned, one block after the other or side by side
    (Bellagente et al., 2024)."""
    fields = fields.renamed(rms_norm_eps="layer_norm_eps")
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            context_len=4096,
            rotary_factor=0.25,
            has_qkv_bias=fields.boolean("use_qkv_bias", False),
            has_qk_norm=fields.boolean("qk_layernorm", False),
        ),
    )
    is_parallel = fields.boolean("use_parallel_residual", False)
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel,
        qk_norm="layer",
    )


STABLELM_NAMES = WeightNames(
    modules={
        "self_attn.q_norm": (f"self_attn.q_layernorm.norms.{EACH_HEAD}",),
        "self_attn.k_norm": (f"self_attn.k_layernorm.norms.{EACH_HEAD}",),
    },
)
