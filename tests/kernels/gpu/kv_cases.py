"""Slots, caches and scales for the operations that store keys and values."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .tensors import FP8, nans

HEAD_DIMS = [32, 64, 80, 96, 112, 128, 192, 256]
NUM_FREE = 3  # slots that no token of a step goes to


@st.composite
def slot_lists(draw: st.DrawFn, max_tokens: int = 6) -> list[int]:
    """Slots of a step's tokens, distinct but for padding (−1)."""
    is_padding = draw(st.lists(st.booleans(), min_size=1, max_size=max_tokens))
    slots = iter(draw(st.permutations(range(len(is_padding) + NUM_FREE))))
    return [-1 if padding else next(slots) for padding in is_padding]


def empty_cache(
    slots: list[int], block_size: int, heads: tuple[int, int], *, dtype: torch.dtype, device: str
) -> Tensor:
    """[num_blocks, block_size, num_kv_heads, head_dim] of NaN, with room for every slot.

    heads: num_kv_heads, head_dim
    """
    num_blocks = (len(slots) + NUM_FREE) // block_size + 1
    return nans(num_blocks, block_size, *heads, dtype=dtype, device=device)


def exact_in_fp8(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Finite numbers of FP8, as `dtype`: the interpreter does not round to FP8 as a GPU does."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0x7F, shape, dtype=torch.uint8, generator=generator)
    signs = torch.randint(2, shape, dtype=torch.uint8, generator=generator) << 7
    return (bits | signs).view(FP8).to(dtype).to(device)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether caches hold the same; NaNs may differ in what means nothing, their sign."""
    if a.dtype == FP8:
        return torch.equal(a.float().nan_to_num(1e9), b.float().nan_to_num(1e9))
    integers: dict[int, Any] = {2: torch.int16, 4: torch.int32}
    return torch.equal(a.view(integers[a.itemsize]), b.view(integers[b.itemsize]))


def fp8_scales(num_kv_heads: int, has_one_scale: bool, device: str) -> tuple[Tensor, Tensor]:
    """Powers of two, by which numbers scale exactly."""
    powers = torch.arange(num_kv_heads, device=device) % 3 - 1
    scales = torch.exp2(powers), torch.exp2(-powers)
    return (scales[0][0], scales[1][0]) if has_one_scale else scales
