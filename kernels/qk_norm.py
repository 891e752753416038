"""The norm that some models apply to queries and keys before rotary positions (Henry et al.,
"Query-Key Normalization for Transformers", 2020)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QKNorm(NamedTuple):
    """RMSNorm of each head, with one weight [head_dim] for all queries and one for all keys, to
    which `offset` is added."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float = 0.0
