"""Llama: config mapping only. Its names of weights are `weight_names.llama_weight_names`."""

from __future__ import annotations

from penstock.engine.models.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    DecoderChoices,
    DecoderConfig,
    read_decoder_config,
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
