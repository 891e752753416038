"""FP8 (E4M3): one tensor `weight`, and scales for all of it, for each row, or for each block.

    weight_scale         [], [1], [out] or [out, 1]     also as `weight_scale_inv`
    weight_scale_inv     [ceil(out / 128), ceil(in / 128)], by `weight_block_size`: DeepSeek's

`*_inv` is DeepSeek's name: numbers are multiplied by it all the same.
"""

from __future__ import annotations

from torch import Tensor

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix

FP8 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point", "weight_zero_point")


def read_fp8(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    name = next((each for kind in _SCALES if (each := f"{prefix}.{kind}") in checkpoint), None)
    if name is None:
        return read_dense(checkpoint, prefix, shape)
    codes = checkpoint.read(f"{prefix}.weight", shape, dtypes=(FP8,))
    config = checkpoint.config.section("quantization_config")
    block = config.integers("weight_block_size") if "weight_block_size" in config else None
    return scaled(checkpoint, name, codes, block)


def scaled(
    checkpoint: Checkpoint, name: str, codes: Tensor, block: tuple[int, ...] | None
) -> QuantizedMatrix:
    """Codes with the scales in the tensor `name`: of all, of each row, or of blocks.

    Args:
        block: rows and columns of a block, for scales of two dimensions.
    """
    checkpoint.ignore(*(f"{name.rpartition('.')[0]}.{each}" for each in _OF_ACTIVATIONS))
    out, size = codes.shape
    shape = checkpoint.shape(name)
    scales = checkpoint.read(name, shape).float()
    if scales.numel() == 1:
        rows_per_scale, columns_per_scale = out, size
        scales = scales.reshape(1, 1)
    elif shape in ((out,), (out, 1)):
        rows_per_scale, columns_per_scale = 1, size
        scales = scales.reshape(out, 1)
    elif block is not None and len(block) == 2 and shape == _num_blocks((out, size), block):
        rows_per_scale, columns_per_scale = block
    else:
        raise checkpoint.fault(
            name, f"has shape {list(shape)} for a matrix {out} × {size}, blocks of {block}"
        )
    return QuantizedMatrix(
        codes=codes,
        scales=scales,
        rows_per_scale=rows_per_scale,
        columns_per_scale=columns_per_scale,
    )


def _num_blocks(shape: tuple[int, int], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
