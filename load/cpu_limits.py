"""What limits a model on this machine's CPU: the rates of reading memory and of multiplying.

A product is one multiplication and its addition.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.engine.models.registry import read_model_config
from penstock.engine.transport.messages import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The machine's limits, with as many threads as the kernels have."""

    read_bytes_per_s: float
    products_per_s: float

    def bound_s(self, num_bytes: float, num_products: float) -> float:
        """The least time in which this can be read and multiplied."""
        return max(num_bytes / self.read_bytes_per_s, num_products / self.products_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """The matrices that a step reads: all but an embedding that is not the head. Norms and biases
    are too few to count."""

    num_in_layers: int  # each multiplies every token
    num_in_head: int  # each multiplies a token after which one is drawn
    num_bytes: int


def read_weights(info: EngineInfo) -> ReadWeights:
    _, config = read_model_config(Path(info.model_path))
    itemsize: int = getattr(torch, info.dtype).itemsize
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    table = config.vocab_size * config.hidden_size
    num_read = config.num_layers * layer + table
    num_bytes = num_read * itemsize
    if info.quantization != "none":
        num_bytes = info.weight_bytes * num_read // (num_read + (0 if config.is_tied else table))
    return ReadWeights(
        num_in_layers=config.num_layers * layer, num_in_head=table, num_bytes=num_bytes
    )


def duration_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
