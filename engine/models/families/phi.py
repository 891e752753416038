"""Microsoft's Phi."""

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


def read_phi_config(fields: ConfigFields) -> DecoderConfig:
    """`PhiForCausalLM`, Phi-1 to Phi-2: attention and MLP side by side after one norm, heads partly
    turned."""
    fields = fields.renamed(rms_norm_eps="layer_norm_eps")
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            activation="gelu_new",
            context_len=2048,
            rotary_factor=0.5,
            has_qkv_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
            has_qk_norm=fields.boolean("qk_layernorm", False),
        ),
    )
    return replace(
        config,
        norm="layer",
        has_norm_bias=True,
        is_parallel=True,
        has_mlp_norm=False,
        is_gated=False,
        has_head_bias=True,
        qk_norm="layer",
        has_qk_norm_bias=True,
    )


PHI_NAMES = WeightNames(
    modules={
        "norm": ("final_layernorm",),
        "self_attn.o_proj": ("self_attn.dense",),
        "self_attn.q_norm": ("self_attn.q_layernorm",),
        "self_attn.k_norm": ("self_attn.k_layernorm",),
        "mlp.up_proj": ("mlp.fc1",),
        "mlp.down_proj": ("mlp.fc2",),
    },
)


def read_phi3_config(fields: ConfigFields) -> DecoderConfig:
    """`Phi3ForCausalLM`, Phi-3 and Phi-4: Llama with fused matrices; longrope in those with
    128 k tokens."""
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    config = read_decoder_config(
        fields,
        ConfigDefaults(
            norm_eps=1e-5,
            context_len=4096,
            rotary_factor=1.0,
            windows=(window,) * read_num_layers(fields),
        ),
    )
    if config.rope.rope_type not in ("default", "longrope"):
        raise fields.unsupported("rope_scaling", f"{config.rope.rope_type!r} is not supported here")
    return config


PHI3_NAMES = WeightNames(
    modules={
        "self_attn.qkv_proj": ("self_attn.qkv_proj",),
        "mlp.gate_up_proj": ("mlp.gate_up_proj",),
    },
)
