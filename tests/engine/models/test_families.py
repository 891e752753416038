"""Every family against transformers: the same logits, in torch and by the CPU's kernels."""

from __future__ import annotations

import pytest
import torch
from tests.engine.model_families import FAMILIES

NUM_TOKENS = 45
CHUNKS = [16, 1, 13, *[1] * 15]


def _token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def _expected(reference, name, path, dtype="float32") -> torch.Tensor:
    # The eager attention of Falcon in transformers 5 adds ALiBi twice.
    model = reference(path, dtype, "sdpa" if name == "falcon rw" else "eager")
    return model(torch.tensor([_token_ids()]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits(name, tiny_checkpoint, reference, paged_logits):
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, **options)
    expected = _expected(reference, name, path)
    assert expected.std() > 0.3
    for chunks in ([NUM_TOKENS], CHUNKS):
        found = paged_logits(path, _token_ids(), chunks)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
