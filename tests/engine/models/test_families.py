"""A family is a function that names its switches, and an entry in the registry; one is added."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.config_fields import ConfigFields
from penstock.engine.models.decoder_config import (
    DecoderChoices,
    DecoderConfig,
    read_decoder_config,
)
from penstock.engine.models.registry import ARCHITECTURES, Architecture

TOKENS = [5, 17, 99, 3, 42, 8, 120, 77, 60, 31, 4]


def read_seed_oss_config(fields: ConfigFields) -> DecoderConfig:
    """Llama with 128 values a head, and biases on queries, keys and values alone."""
    return read_decoder_config(
        fields,
        DecoderChoices(
            head_dim=128,
            has_qkv_bias=fields.boolean("attention_bias", True),
            has_output_bias=fields.boolean("attention_out_bias", False),
            has_mlp_bias=fields.boolean("mlp_bias", False),
        ),
    )


@pytest.mark.parametrize("options", [{}, {"attention_out_bias": True, "mlp_bias": True}])
def test_an_added_family_equals_transformers(
    options, tiny_checkpoint, reference, paged_logits, monkeypatch
):
    family = Architecture(read_config=read_seed_oss_config)
    monkeypatch.setitem(ARCHITECTURES, "SeedOssForCausalLM", family)
    path = tiny_checkpoint("SeedOssForCausalLM", **options)
    with torch.inference_mode():
        expected = reference(path)(torch.tensor([TOKENS])).logits[0]
    found = paged_logits(path, TOKENS, (4, 1, 6))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
