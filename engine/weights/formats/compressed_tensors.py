"""compressed-tensors, as llm-compressor writes it: which of its schemes a module has is seen by its
tensors.

    weight_packed int32     `pack-quantized`: 4 or 8 bits along the inputs, half of the range added,
                            with weight_scale [out, groups], perhaps weight_zero_point, packed along
                            the outputs, and weight_g_idx [in]
    weight_packed uint8     `nvfp4-pack-quantized` with weight_global_scale, else `mxfp4-…`
    weight int8, float8     `int-quantized`, `float-quantized`: a scale for all, for each row, group
                            or block
    weight alone            a module that was not quantized (`ignore`)
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.formats.fp4 import read_mxfp4, read_nvfp4
from penstock.engine.weights.formats.fp8 import FP8, scaled
from penstock.engine.weights.formats.gptq import permutation_of
from penstock.engine.weights.formats.packing import unpack
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix

_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "weight_shape")


def read_compressed_tensors(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    config = checkpoint.config.section("quantization_config")
    if "transform_config" in config:
        raise config.error("transform_config", "rotated weights are not supported")
    checkpoint.ignore(*(f"{prefix}.{each}" for each in _OF_ACTIVATIONS))
    packed, scale = f"{prefix}.weight_packed", f"{prefix}.weight_scale"
    if packed in checkpoint:
        if checkpoint.dtype(packed) == "U8":
            whole = f"{prefix}.weight_global_scale"
            if whole in checkpoint:
                return read_nvfp4(checkpoint, (packed, scale, whole), shape, is_inverse=True)
            return read_mxfp4(checkpoint, (packed, scale), shape)
        return _read_packed(checkpoint, prefix, shape)
    if scale not in checkpoint:
        return read_dense(checkpoint, prefix, shape)
    codes = checkpoint.read(f"{prefix}.weight", shape, dtypes=("I8", FP8))
    if codes.dtype == torch.int8:
        return _read_int8(checkpoint, prefix, codes)
    return scaled(checkpoint, scale, codes, _block(config))


def _block(config: ConfigFields) -> tuple[int, ...] | None:
    """The size of blocks in the first group of modules that has them."""
    groups = config.section("config_groups")
    for name in groups:
        weights = groups.section(name).section("weights")
        if "block_structure" in weights:
            return weights.integers("block_structure")
    return None


def _read_packed(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> QuantizedMatrix:
    out, size = shape
    name = f"{prefix}.weight_packed"
    _, columns = checkpoint.shape(name, num_dims=2)
    bits = columns * 32 // size
    if bits not in (4, 8) or size * bits % 32:
        raise checkpoint.fault(name, f"has {columns} columns for {size} inputs: not 4 or 8 bits")
    codes = unpack(checkpoint.read(name, (out, columns), dtypes=("I32",)), bits, dim=1)
    scales, group_size = _scales(checkpoint, f"{prefix}.weight_scale", shape)
    half = 1 << (bits - 1)
    zeros: Tensor | int = half
    zero_name = f"{prefix}.weight_zero_point"
    if zero_name in checkpoint:
        zeros = _zeros(checkpoint, zero_name, scales.shape, bits) + half
    permutation = permutation_of(checkpoint, f"{prefix}.weight_g_idx", size, group_size)
    if permutation is not None:
        codes = codes[:, permutation].contiguous()
    return QuantizedMatrix(
        codes=codes,
        scales=scales,
        offsets=zeros * scales,
        columns_per_scale=group_size,
        permutation=permutation,
    )


def _read_int8(checkpoint: Checkpoint, prefix: str, codes: Tensor) -> QuantizedMatrix:
    out, size = codes.shape
    name, zero_name = f"{prefix}.weight_scale", f"{prefix}.weight_zero_point"
    scales, group_size = _scales(checkpoint, name, (out, size))
    offsets = None
    if zero_name in checkpoint:
        offsets = _zeros(checkpoint, zero_name, scales.shape, 8) * scales
        offsets = offsets if offsets.any() else None
    return QuantizedMatrix(
        codes=codes, scales=scales, offsets=offsets, columns_per_scale=group_size
    )


def _scales(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[Tensor, int]:
    """Scales [out, groups], and the size of a group."""
    out, size = shape
    stored = checkpoint.shape(name)
    scales = checkpoint.read(name, stored).float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(out, 1).contiguous(), size
    if stored == (out,):
        return scales.reshape(out, 1), size
    if len(stored) != 2 or stored[0] != out:
        raise checkpoint.fault(name, f"has shape {list(stored)} for a matrix {out} × {size}")
    return scales, checkpoint.group_size(name, size, stored[1])


def _zeros(checkpoint: Checkpoint, name: str, shape: torch.Size, bits: int) -> Tensor:
    """Zero points [out, groups], as signed numbers."""
    out, groups = shape
    if checkpoint.dtype(name) == "I32":
        rows = -(-out * bits // 32)
        packed = checkpoint.read(name, (rows, groups), dtypes=("I32",))
        return unpack(packed, bits, dim=0)[:out].float() - (1 << (bits - 1))
    stored = checkpoint.shape(name)
    if stored not in ((), (1,), (1, 1), (out,), (out, 1), (out, groups)):
        raise checkpoint.fault(name, f"has shape {list(stored)}, expected {[out, groups]}")
    zeros = checkpoint.read(name, stored, dtypes=("I8",)).float()
    return zeros.reshape(-1, zeros.shape[-1] if zeros.dim() > 1 else 1).expand(out, groups)
