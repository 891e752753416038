"""Launch configuration of kernels that hold a whole row in registers: the threads per row."""

from __future__ import annotations

import triton

from penstock.kernels.gpu.tuning import Config

_MAX_BLOCK = 1 << 15  # beyond, the registers of a program do not suffice
_NUMBERS_PER_WARP = 512  # two accesses of 16 bytes for each thread, in 16-bit types
_MAX_WARPS = 16


def config_for(size: int) -> Config:
    """For rows of `size` numbers."""
    block = triton.next_power_of_2(size)
    assert block <= _MAX_BLOCK, f"rows of {size} numbers, at most {_MAX_BLOCK}"
    return {"BLOCK": block, "num_warps": min(max(block // _NUMBERS_PER_WARP, 1), _MAX_WARPS)}
