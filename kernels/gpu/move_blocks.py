"""Moving whole blocks in one launch: within the pool, and between it and a staging buffer.

A block consists of contiguous planes, one for each layer's keys and one for its values. Planes are
moved as the widest integers that their sizes and addresses allow, so that every bit is preserved
and a thread moves 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_BLOCK_WORDS = 1024  # of a plane, for one program
_NUM_WARPS = 4


@triton.jit
def move_planes_kernel(
    to_ptr,
    from_ptr,
    to_ids_ptr,  # int64 [n]; None: block i is the i-th
    from_ids_ptr,
    to_block_stride,  # in words, as all strides
    to_plane_stride,
    from_block_stride,
    from_plane_stride,
    num_words,  # of a plane
    BLOCK: tl.constexpr,
):
    """Program (i, p, c) moves part c of plane p of the i-th block."""
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    to_block = index
    from_block = index
    if to_ids_ptr is not None:
        to_block = tl.load(to_ids_ptr + index)
    if from_ids_ptr is not None:
        from_block = tl.load(from_ids_ptr + index)
    source = from_ptr + from_block * from_block_stride + plane * from_plane_stride
    destination = to_ptr + to_block * to_block_stride + plane * to_plane_stride
    is_inside = words < num_words
    tl.store(destination + words, tl.load(source + words, mask=is_inside), mask=is_inside)


def gather_blocks_triton(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    _move(_staged_planes(staging), _planes(pool), to_ids=None, from_ids=block_ids)


def scatter_blocks_triton(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    _move(_planes(pool), _staged_planes(staging), to_ids=block_ids, from_ids=None)


def copy_within_pool(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Block destinations[i] = block sources[i]; no block may be both."""
    planes = _planes(pool)
    _move(planes, planes, to_ids=destinations, from_ids=sources)


def _planes(pool: Tensor) -> Tensor:
    """A view [num_blocks, num_planes, numbers of a plane]."""
    return pool.flatten(3).flatten(0, 1).transpose(0, 1)


def _staged_planes(staging: Tensor) -> Tensor:
    """A view of a staging buffer: [num_blocks, num_planes, numbers of a plane]."""
    return staging.flatten(3).flatten(1, 2)


def _move(
    to_planes: Tensor, from_planes: Tensor, *, to_ids: Tensor | None, from_ids: Tensor | None
) -> None:
    """Between views as `_planes` gives them; the ids are int64 [n], None stands for 0 … n − 1."""
    to_words, from_words = _as_words(to_planes, from_planes)
    num_words = to_words.shape[2]
    num_blocks = len(to_words if to_ids is None else to_ids)
    grid = (num_blocks, to_words.shape[1], triton.cdiv(num_words, _BLOCK_WORDS))
    move_planes_kernel[grid](
        to_words,
        from_words,
        to_ids,
        from_ids,
        to_words.stride(0),
        to_words.stride(1),
        from_words.stride(0),
        from_words.stride(1),
        num_words,
        BLOCK=_BLOCK_WORDS,
        num_warps=_NUM_WARPS,
    )


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """Views of planes of equal size as integers."""
    plane_bytes = tensors[0].shape[2] * tensors[0].itemsize
    sizes = [plane_bytes, *(tensor.data_ptr() for tensor in tensors)]
    word = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))
    return [tensor.view(word) for tensor in tensors]
