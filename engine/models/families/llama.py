"""Llama and its near kin: RMS norms before rotary attention and a gated MLP, no other names."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.layers.rotary import NO_ROPE
from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
    read_layer_kinds,
    read_num_layers,
)


def read_llama_config(fields: ConfigFields) -> DecoderConfig:
    """`LlamaForCausalLM`: one switch each for the biases of attention and of the MLP."""
    return _read_llama(fields)


def read_arcee_config(fields: ConfigFields) -> DecoderConfig:
    """`ArceeForCausalLM`: Llama with squared ReLU and no gate."""
    config = _read_llama(fields, activation="relu2", norm_eps=1e-5)
    return replace(config, is_gated=False)


def _read_llama(
    fields: ConfigFields, *, activation: str = "silu", norm_eps: float = 1e-6
) -> DecoderConfig:
    has_attention_bias = fields.boolean("attention_bias", False)
    return read_decoder_config(
        fields,
        ConfigDefaults(
            activation=activation,
            norm_eps=norm_eps,
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
        fields, ConfigDefaults(num_kv_heads=8, windows=(window,) * num_layers)
    )


def read_qwen2_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen2ForCausalLM`: biases on queries, keys and values; windows on upper layers."""
    defaults = ConfigDefaults(num_kv_heads=32, windows=read_windows(fields), has_qkv_bias=True)
    return read_decoder_config(fields, defaults)


def read_qwen3_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen3ForCausalLM`: queries and keys are normalised per head before they are rotated."""
    has_attention_bias = fields.boolean("attention_bias", False)
    defaults = ConfigDefaults(
        num_kv_heads=32,
        head_dim=128,
        windows=read_windows(fields),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    return read_decoder_config(fields, defaults)


def read_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on, or those listed in `layer_types`, have a window."""
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.nullable_integer("sliding_window", 4096)
    first = read_num_layers(fields)
    if window is not None and "layer_types" not in fields:
        first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = read_layer_kinds(fields, lambda layer: layer >= first)
    if any(kinds) and window is None:
        raise fields.error("layer_types", "'sliding_attention' needs use_sliding_window")
    return tuple(window if has_window else None for has_window in kinds)


def read_smollm3_config(fields: ConfigFields) -> DecoderConfig:
    """`SmolLM3ForCausalLM`: every fourth layer has no rotary positions."""
    num_layers = read_num_layers(fields)
    has_attention_bias = fields.boolean("attention_bias", False)
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if "no_rope_layers" in fields:  # 1 in layers that have them
        has_rope = tuple(map(bool, fields.integers("no_rope_layers", minimum=0)))
        if len(has_rope) < num_layers:
            raise fields.error("no_rope_layers", f"names {len(has_rope)} of {num_layers} layers")
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=4,
            theta=2_000_000.0,
            is_tied=True,
            windows=read_windows(fields),
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=fields.boolean("mlp_bias", False),
        ),
    )
    ropes = tuple(config.rope if has else NO_ROPE for has in has_rope[:num_layers])
    return replace(config, layer_ropes=ropes)


def read_granite_config(fields: ConfigFields) -> DecoderConfig:
    """`GraniteForCausalLM`: Llama with factors of the embedding, the scores, what layers add, and
    the logits."""
    return replace(
        read_llama_config(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def read_seed_oss_config(fields: ConfigFields) -> DecoderConfig:
    """`SeedOssForCausalLM`: biases on queries, keys and values, seldom on others."""
    return read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=8,
            head_dim=128,
            has_qkv_bias=fields.boolean("attention_bias", True),
            has_output_bias=fields.boolean("attention_out_bias", False),
            has_mlp_bias=fields.boolean("mlp_bias", False),
        ),
    )


def read_ernie_config(fields: ConfigFields) -> DecoderConfig:
    """`Ernie4_5ForCausalLM`: pairs of neighbouring dimensions are turned."""
    has_bias = fields.boolean("use_bias", False)
    return read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=2,
            head_dim=128,
            norm_eps=1e-5,
            theta=500_000.0,
            is_tied=True,
            is_interleaved=True,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=has_bias,
        ),
    )
