"""Families whose MLPs are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
    read_experts_config,
    read_layer_kinds,
    read_num_layers,
)
from penstock.engine.models.families.llama import (
    read_granite_config,
    read_mistral_config,
    read_windows,
)
from penstock.engine.models.names import WeightNames


def read_mixtral_config(fields: ConfigFields) -> DecoderConfig:
    """`MixtralForCausalLM`: Mistral with experts in every layer."""
    experts = read_experts_config(fields, num_experts="num_local_experts", size="intermediate_size")
    return replace(read_mistral_config(fields), experts=experts)


MIXTRAL_NAMES = WeightNames(
    modules={
        "mlp.gate": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up_proj": (
            "block_sparse_moe.experts.w1",
            "block_sparse_moe.experts.w3",
        ),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.w2",),
    }
)


def read_qwen2_moe_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen2MoeForCausalLM`: Qwen2 with experts, of which all tokens share one."""
    defaults = ConfigDefaults(
        num_kv_heads=16,
        windows=read_windows(fields),
        has_qkv_bias=fields.boolean("qkv_bias", True),
    )
    experts = read_experts_config(
        fields,
        num_experts=_num_experts(fields),
        size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
        experts_per_token=4,
        is_normalized=fields.boolean("norm_topk_prob", False),
    )
    return replace(read_decoder_config(fields, defaults), experts=experts)


def read_qwen3_moe_config(fields: ConfigFields) -> DecoderConfig:
    """`Qwen3MoeForCausalLM`: Qwen3 with experts, and one window for all layers."""
    has_attention_bias = fields.boolean("attention_bias", False)
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.nullable_integer("sliding_window", 4096)
    defaults = ConfigDefaults(
        num_kv_heads=4,
        windows=(window,) * read_num_layers(fields),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    experts = read_experts_config(
        fields,
        num_experts=_num_experts(fields),
        size="moe_intermediate_size",
        experts_per_token=8,
        is_normalized=fields.boolean("norm_topk_prob", False),
    )
    return replace(read_decoder_config(fields, defaults), experts=experts)


def read_olmoe_config(fields: ConfigFields) -> DecoderConfig:
    """`OlmoeForCausalLM`: Llama with experts, whose queries and keys are normalised as a whole."""
    has_attention_bias = fields.boolean("attention_bias", False)
    defaults = ConfigDefaults(
        norm_eps=1e-5,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
    )
    experts = read_experts_config(
        fields,
        num_experts="num_experts",
        size="intermediate_size",
        experts_per_token=8,
        is_normalized=fields.boolean("norm_topk_prob", False),
    )
    return replace(
        read_decoder_config(fields, defaults),
        qk_norm="row",
        qkv_limit=fields.optional_number("clip_qkv", maximum=1e6),
        experts=experts,
    )


def read_granite_moe_config(fields: ConfigFields) -> DecoderConfig:
    """`GraniteMoeForCausalLM`: Granite with experts in every layer."""
    experts = read_experts_config(fields, num_experts="num_local_experts", size="intermediate_size")
    return replace(read_granite_config(fields), experts=experts)


GRANITE_MOE_NAMES = WeightNames(
    modules={
        "mlp.gate": ("block_sparse_moe.router.layer",),
        "mlp.experts.gate_up_proj": ("block_sparse_moe.input_linear",),
        "mlp.experts.down_proj": ("block_sparse_moe.output_linear",),
    }
)


def read_gpt_oss_config(fields: ConfigFields) -> DecoderConfig:
    """`GptOssForCausalLM`: every second layer has a window, each head a sink, and experts have
    biases and a clamped activation."""
    window = fields.integer("sliding_window", 128)
    kinds = read_layer_kinds(fields, lambda layer: layer % 2 == 0)
    has_bias = fields.boolean("attention_bias", True)
    defaults = ConfigDefaults(
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        windows=tuple(window if has_window else None for has_window in kinds),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    experts = read_experts_config(
        fields, num_experts="num_local_experts", size="intermediate_size", experts_per_token=4
    )
    swiglu = (fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    experts = experts and replace(experts, has_bias=True, swiglu=swiglu)
    return replace(read_decoder_config(fields, defaults), has_sinks=True, experts=experts)


GPT_OSS_NAMES = WeightNames(modules={"mlp.gate": ("mlp.router",)})


def _num_experts(fields: ConfigFields) -> str:
    """The field's name: transformers 5 renames it where there is no shared expert."""
    return "num_local_experts" if "num_local_experts" in fields else "num_experts"
