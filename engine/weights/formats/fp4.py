"""FP4 (E2M1): two codes in a byte, the first in the low bits, and a scale for each group of inputs.

NVFP4: groups of 16, scales in FP8, and one more for the whole matrix. MXFP4: groups of 32, scales
that are powers of two. Also NVIDIA's ModelOpt, which has FP8 checkpoints too.
"""

from __future__ import annotations

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.fp8 import FP8, read_fp8
from penstock.engine.weights.formats.packing import FP4, e8m0, unpack_nibbles
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix

_NV_GROUP, _MX_GROUP = 16, 32


def read_nvfp4(
    checkpoint: Checkpoint, names: tuple[str, str, str], shape: tuple[int, int], *, is_inverse: bool
) -> QuantizedMatrix:
    """
    Args:
        names: of codes, scales, and the scale of the whole.
        is_inverse: the last divides.
    """
    out, size = shape
    packed = checkpoint.read(names[0], (out, size // 2), dtypes=("U8",))
    scales_shape = (out, -(-size // _NV_GROUP))
    scales = checkpoint.read(names[1], scales_shape, dtypes=(FP8,)).float()
    whole_shape = checkpoint.shape(names[2])
    if whole_shape not in ((), (1,)):
        raise checkpoint.fault(names[2], f"has shape {list(whole_shape)}, expected []")
    whole = checkpoint.read(names[2], whole_shape).float().reshape(())
    return QuantizedMatrix(
        codes=unpack_nibbles(packed),
        scales=scales / whole if is_inverse else scales * whole,
        codebook=FP4,
        columns_per_scale=_NV_GROUP,
    )


def read_mxfp4(
    checkpoint: Checkpoint, names: tuple[str, str], shape: tuple[int, int]
) -> QuantizedMatrix:
    """
    Args:
        names: of codes and scales.
    """
    out, size = shape
    packed = checkpoint.read(names[0], (out, size // 2), dtypes=("U8",))
    scales = checkpoint.read(names[1], (out, -(-size // _MX_GROUP)), dtypes=("U8",))
    return QuantizedMatrix(
        codes=unpack_nibbles(packed),
        scales=e8m0(scales),
        codebook=FP4,
        columns_per_scale=_MX_GROUP,
    )


def read_mxfp4_experts(
    checkpoint: Checkpoint, stem: str, shape: tuple[int, int, int]
) -> QuantizedMatrix:
    """A layer's experts, one below the other, as gpt-oss has them:

        stem_blocks uint8 [num_experts, out, in / 32, 16]
        stem_scales uint8 [num_experts, out, in / 32]

    Args:
        shape: (num_experts, out_features, in_features)
    """
    groups = (*shape[:2], -(-shape[2] // _MX_GROUP))
    blocks = checkpoint.read(f"{stem}_blocks", (*groups, _MX_GROUP // 2), dtypes=("U8",))
    scales = checkpoint.read(f"{stem}_scales", groups, dtypes=("U8",))
    return QuantizedMatrix(
        codes=unpack_nibbles(blocks.flatten(2).flatten(0, 1)),
        scales=e8m0(scales.flatten(0, 1)),
        codebook=FP4,
        columns_per_scale=_MX_GROUP,
    )


def read_modelopt(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    whole = f"{prefix}.weight_scale_2"
    if whole not in checkpoint:
        return read_fp8(checkpoint, prefix, shape)
    checkpoint.ignore(f"{prefix}.input_scale")
    names = (f"{prefix}.weight", f"{prefix}.weight_scale", whole)
    return read_nvfp4(checkpoint, names, shape, is_inverse=False)
