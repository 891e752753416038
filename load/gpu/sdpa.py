"""torch's own attention on KV that lies side by side: the rival of our kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.load.gpu.bench import Bench

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Run = Callable[[], Tensor]


def fastest_sdpa(bench: Bench, runs: dict[str, Run]) -> tuple[str, float]:
    """The fastest of some ways to ask for the same, over all backends: its name and seconds."""
    seconds = {}
    for form, run in runs.items():
        for name, backend in _BACKENDS.items():
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # they tell what a backend cannot do
                try:
                    seconds[f"{name}, {form}"] = bench.timer.median_s(run)
                except RuntimeError:  # it cannot do this
                    continue
    return min(seconds.items(), key=lambda item: item[1])


def decode_runs(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Run]:
    """query [batch, num_heads, head_dim]; keys, values [batch, context, num_kv_heads, head_dim].

    The heads that share a KV head may stand in the place of query positions.
    """
    batch, _, num_kv_heads, head_dim = keys.shape
    by_head = query[:, :, None]  # [batch, num_heads, 1, head_dim]
    grouped = query.view(batch, num_kv_heads, -1, head_dim)  # [batch, num_kv_heads, group, …]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return {
        "grouped": lambda: F.scaled_dot_product_attention(grouped, keys, values),
        "GQA": lambda: F.scaled_dot_product_attention(by_head, keys, values, enable_gqa=True),
    }


def prefill_runs(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Run]:
    """query [length, num_heads, head_dim]; keys, values [length, num_kv_heads, head_dim]."""
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    return {
        "GQA": lambda: F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True
        )
    }
