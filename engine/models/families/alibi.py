"""Bloom and MPT, whose positions are distances (ALiBi), and Falcon, some of whose are."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
)
from penstock.engine.models.names import WeightNames


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8i/n) for the largest power of two n; heads beyond take every other slope of 2n heads
    (Press et al., "Train Short, Test Long", 2022, §3)."""
    num_even = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / num_even) for i in range(1, num_even + 1)]
    slopes += [2.0 ** (-4.0 * i / num_even) for i in range(1, 2 * (num_heads - num_even), 2)]
    return tuple(slopes)


def read_bloom_config(fields: ConfigFields) -> DecoderConfig:
    """`BloomForCausalLM`: the embedding is normalised (BigScience, 2022)."""
    own = {
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
    }
    fields = fields.renamed(
        rms_norm_eps="layer_norm_epsilon",
        **{name: other for name, other in own.items() if name not in fields},
    )
    fields.require("apply_residual_connection_post_layernorm", False)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            intermediate_size=4 * fields.integer("hidden_size"),
            norm_eps=1e-5,
            is_tied=True,
            activation="gelu_new",
            context_len=2048,
            has_rope=False,
            has_qkv_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
        ),
    )
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_gated=False,
        has_embedding_norm=True,
        alibi_slopes=alibi_slopes(config.num_heads),
    )


_BY_HEAD = {
    "embed_tokens": ("word_embeddings",),
    "norm": ("ln_f",),
    "self_attn": ("self_attention",),
    "self_attn.qkv_proj": ("self_attention.query_key_value",),
    "self_attn.o_proj": ("self_attention.dense",),
    "mlp.up_proj": ("mlp.dense_h_to_4h",),
    "mlp.down_proj": ("mlp.dense_4h_to_h",),
}
BLOOM_NAMES = WeightNames(
    root="transformer.",
    layers="h",
    modules={**_BY_HEAD, "embed_norm": ("word_embeddings_layernorm",)},
    is_by_head=True,
)


def read_mpt_config(fields: ConfigFields) -> DecoderConfig:
    """`MptForCausalLM`: norms and matrices without biases (MosaicML, 2023)."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
        rms_norm_eps="layer_norm_epsilon",
    )
    attention = fields.section("attn_config")
    fields.require("no_bias", True)
    fields.require("logit_scale", None)
    attention.require("alibi", True)
    attention.require("qk_ln", False)
    attention.require("prefix_lm", False)
    if attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise attention.error("attn_type", "only 'multihead_attention' is supported")
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            intermediate_size=fields.integer("expansion_ratio", 4) * fields.integer("hidden_size"),
            norm_eps=1e-5,
            is_tied=True,
            activation="gelu",
            context_len=2048,
            has_rope=False,
        ),
    )
    steepest = attention.number("alibi_bias_max", 8.0)
    return replace(
        config,
        norm="layer",
        is_gated=False,
        qkv_limit=attention.optional_number("clip_qkv", maximum=1e6),
        attention_scale=attention.optional_number("softmax_scale", maximum=1e6),
        alibi_slopes=_mpt_slopes(config.num_heads, steepest),
    )


def _mpt_slopes(num_heads: int, steepest: float) -> tuple[float, ...]:
    """Every other one of those of the next power of two, from the second on."""
    num_all = 1 << math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-steepest * i / num_all) for i in range(1, num_all + 1)]
    if num_all != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])


MPT_NAMES = WeightNames(
    root="transformer.",
    layers="blocks",
    modules={
        "embed_tokens": ("wte",),
        "norm": ("norm_f",),
        "input_layernorm": ("norm_1",),
        "self_attn": ("attn",),
        "self_attn.qkv_proj": ("attn.Wqkv",),
        "self_attn.o_proj": ("attn.out_proj",),
        "post_attention_layernorm": ("norm_2",),
        "mlp.up_proj": ("ffn.up_proj",),
        "mlp.down_proj": ("ffn.down_proj",),
    },
)


def read_falcon_config(fields: ConfigFields) -> DecoderConfig:
    """`FalconForCausalLM`: side by side, after one norm or two; its first models one after the
    other, with ALiBi (Almazrouei et al., 2023)."""
    fields = fields.renamed(
        rms_norm_eps="layer_norm_epsilon",
        intermediate_size="ffn_hidden_size",
        hidden_act="activation",
        num_key_value_heads="num_kv_heads",
    )
    is_new = fields.boolean("new_decoder_architecture", False)
    is_parallel = is_new or fields.boolean("parallel_attn", True)
    has_alibi, has_bias = fields.boolean("alibi", False), fields.boolean("bias", False)
    if not is_new and fields.boolean("multi_query", True):
        fields = fields.renamed(num_key_value_heads="")  # it may name another number
        num_kv_heads = 1
    else:
        num_kv_heads = fields.integer("num_attention_heads")
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=num_kv_heads,
            intermediate_size=4 * fields.integer("hidden_size"),
            norm_eps=1e-5,
            is_tied=True,
            activation="gelu",
            context_len=2048,
            has_rope=not has_alibi,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=has_bias,
        ),
    )
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    # Added before the scores are scaled, and in bfloat16.
    slopes = torch.tensor(alibi_slopes(config.num_heads)).bfloat16() * config.head_dim**-0.5
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel or (is_new and num_norms == 2),
        is_gated=False,
        alibi_slopes=tuple(slopes.tolist()) if has_alibi else (),
    )


FALCON_NAMES = WeightNames(
    root="transformer.",
    layers="h",
    modules=_BY_HEAD,
    alternatives={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
    is_by_head=True,
)
