"""GPT-2 and those that followed it: layer norms, MLPs without a gate, biases."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    ConfigDefaults,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
)
from penstock.engine.models.names import WeightNames

_GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}


def read_gpt2_config(fields: ConfigFields) -> DecoderConfig:
    """`GPT2LMHeadModel`: learned positions (Radford et al., 2019)."""
    fields = fields.renamed(**_GPT2_FIELDS)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("scale_attn_weights", True)
    fields.require("add_cross_attention", False)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            intermediate_size=4 * fields.integer("hidden_size"),
            norm_eps=1e-5,
            is_tied=True,
            activation="gelu_new",
            context_len=1024,
            has_rope=False,
            has_qkv_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
        ),
    )
    return replace(
        config, norm="layer", has_norm_bias=True, is_gated=False, has_position_table=True
    )


GPT2_NAMES = WeightNames(
    root="transformer.",
    layers="h",
    modules={
        "embed_tokens": ("wte",),
        "embed_positions": ("wpe",),
        "norm": ("ln_f",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn",),
        "self_attn.qkv_proj": ("attn.c_attn",),
        "self_attn.o_proj": ("attn.c_proj",),
        "post_attention_layernorm": ("ln_2",),
        "mlp.up_proj": ("mlp.c_fc",),
        "mlp.down_proj": ("mlp.c_proj",),
    },
    is_transposed=True,
)


def read_gpt_bigcode_config(fields: ConfigFields) -> DecoderConfig:
    """`GPTBigCodeForCausalLM`, such as StarCoder: GPT-2 whose heads share one key and value (Li et
    al., 2023)."""
    fields.require("multi_query", True)
    return replace(read_gpt2_config(fields.renamed(num_key_value_heads="")), num_kv_heads=1)


GPT_BIGCODE_NAMES = replace(GPT2_NAMES, is_transposed=False)


def read_gptj_config(fields: ConfigFields) -> DecoderConfig:
    """`GPTJForCausalLM`: attention and MLP side by side after one norm (Wang and Komatsuzaki,
    2021)."""
    fields = fields.renamed(**_GPT2_FIELDS)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            intermediate_size=4 * fields.integer("hidden_size"),
            norm_eps=1e-5,
            activation="gelu_new",
            context_len=2048,
            is_interleaved=True,
            has_mlp_bias=True,
        ),
    )
    rotary_dim = fields.integer("rotary_dim", 64, maximum=config.head_dim)
    if rotary_dim % 2:
        raise fields.error("rotary_dim", f"pairs need an even size, not {rotary_dim}")
    return replace(
        config,
        rope=replace(config.rope, rotary_dim=rotary_dim),
        norm="layer",
        has_norm_bias=True,
        is_parallel=True,
        has_mlp_norm=False,
        is_gated=False,
        has_head_bias=True,
    )


GPTJ_NAMES = WeightNames(
    root="transformer.",
    layers="h",
    modules={
        "embed_tokens": ("wte",),
        "norm": ("ln_f",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn",),
        "self_attn.o_proj": ("attn.out_proj",),
        "mlp.up_proj": ("mlp.fc_in",),
        "mlp.down_proj": ("mlp.fc_out",),
    },
)


def read_gpt_neox_config(fields: ConfigFields) -> DecoderConfig:
    """`GPTNeoXForCausalLM`, such as Pythia: side by side, with a norm each (Black et al., 2022)."""
    fields = fields.renamed(rms_norm_eps="layer_norm_eps", partial_rotary_factor=_first(fields))
    if "rotary_emb_base" in fields:
        fields = fields.renamed(rope_theta="rotary_emb_base")
    has_attention_bias = fields.boolean("attention_bias", True)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            activation="gelu",
            rotary_factor=0.25,
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=True,
        ),
    )
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_parallel=fields.boolean("use_parallel_residual", True),
        is_gated=False,
    )


def _first(fields: ConfigFields) -> str:
    return "rotary_pct" if "rotary_pct" in fields else "partial_rotary_factor"


GPT_NEOX_NAMES = WeightNames(
    root="gpt_neox.",
    head="embed_out",
    modules={
        "embed_tokens": ("embed_in",),
        "norm": ("final_layer_norm",),
        "self_attn": ("attention",),
        "self_attn.qkv_proj": ("attention.query_key_value",),
        "self_attn.o_proj": ("attention.dense",),
        "mlp.up_proj": ("mlp.dense_h_to_4h",),
        "mlp.down_proj": ("mlp.dense_4h_to_h",),
    },
    is_by_head=True,
)


def read_opt_config(fields: ConfigFields) -> DecoderConfig:
    """`OPTForCausalLM`: learned positions, of which the first two serve padding (Zhang et al.,
    2022). The 350 M model, which normalises after its blocks, is not supported."""
    fields = fields.renamed(intermediate_size="ffn_dim", hidden_act="activation_function")
    fields.require("do_layer_norm_before", True)
    fields.require("_remove_final_layer_norm", False)
    fields.require("layer_norm_elementwise_affine", True)
    has_bias = fields.boolean("enable_bias", True)
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            is_tied=True,
            activation="relu",
            context_len=2048,
            has_rope=False,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=has_bias,
        ),
    )
    if fields.integer("word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise fields.unsupported("word_embed_proj_dim", "projected embeddings are not supported")
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_gated=False,
        has_position_table=True,
        first_position=2,
    )


OPT_NAMES = WeightNames(
    root="model.decoder.",
    modules={
        "norm": ("final_layer_norm",),
        "input_layernorm": ("self_attn_layer_norm",),
        "self_attn.o_proj": ("self_attn.out_proj",),
        "post_attention_layernorm": ("final_layer_norm",),
        "mlp.up_proj": ("fc1",),
        "mlp.down_proj": ("fc2",),
    },
)


def read_starcoder2_config(fields: ConfigFields) -> DecoderConfig:
    """`Starcoder2ForCausalLM`: rotary positions and few key heads (Lozhkov et al., 2024)."""
    fields = fields.renamed(rms_norm_eps="norm_epsilon")
    has_bias = fields.boolean("use_bias", True)
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            num_kv_heads=2,
            norm_eps=1e-5,
            is_tied=True,
            activation="gelu_pytorch_tanh",
            windows=(window,) * read_num_layers(fields),
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=has_bias,
        ),
    )
    return replace(config, norm="layer", has_norm_bias=True, is_gated=False)


STARCODER2_NAMES = WeightNames(
    modules={"mlp.up_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)},
)
