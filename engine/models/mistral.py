"""Mistral: config mapping only; weights are named as Llama's."""

from __future__ import annotations

from penstock.engine.models.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    DecoderChoices,
    DecoderConfig,
    read_decoder_config,
)


def read_mistral_config(fields: ConfigFields) -> DecoderConfig:
    """`MistralForCausalLM`: Llama with 8 key heads by default and one window for all layers."""
    window = fields.nullable_integer("sliding_window", 4096)
    num_layers = fields.integer("num_hidden_layers")
    return read_decoder_config(
        fields, DecoderChoices(num_kv_heads=8, windows=(window,) * num_layers)
    )
