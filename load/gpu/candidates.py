"""Launch configurations worth trying, and the search for the fastest.

Each replaces some of what a launcher chooses by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from penstock.kernels.gpu.tuning import Config
from penstock.load.gpu.timing import Timer

DECODE: tuple[Config, ...] = tuple(
    {"BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_n, num_warps, num_stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4))
)
PREFILL: tuple[Config, ...] = tuple(
    {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
)
# Of DECODE, for where there is no time for all.
FEW_DECODE: tuple[Config, ...] = (
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
)


def sampling(own: Config) -> tuple[Config, ...]:
    """Over what the launcher chooses for a vocabulary."""
    return tuple(
        {**own, "BLOCK": block, "num_warps": num_warps}
        for block, num_warps in product((1024, 2048, 4096, 8192), (4, 8, 16))
    )


def seconds_of(timer: Timer, call: Callable[[], object]) -> float:
    """Seconds of a call; infinite if its configuration takes more than the device has."""
    triton = importlib.import_module("triton")  # not before it is known whether to interpret
    try:
        return timer.median_s(call)
    except triton.OutOfResources:
        return float("inf")


def fastest_s(timer: Timer, run: Callable[..., object], configs: Sequence[Config]) -> float:
    """Seconds with the best of them, or with what the launcher chooses, if that is faster."""
    return min(seconds_of(timer, partial(run, config=config)) for config in (None, *configs))
