"""The residual stream, as norms carry it from layer to layer."""

from __future__ import annotations

import torch

from penstock.engine.layers.norm import RMSNorm


def test_the_stream_begins_with_what_is_added_first():
    norm = RMSNorm(16, 1e-6)
    norm.weight.data = torch.randn(16, generator=torch.Generator().manual_seed(0))
    first, second = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    normed, stream = norm.add(first, None)
    assert torch.equal(stream, first)
    assert torch.equal(normed, norm(first))
    normed, stream = norm.add(second, stream)
    assert torch.equal(stream, first + second)
    assert torch.equal(normed, norm(first + second))
