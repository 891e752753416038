"""bitsandbytes: 4 bits (`nf4` or `fp4`), 64 numbers in a row with a scale, which may be quantized
itself; or int8 with a scale for each output.

    weight                  uint8 [out · in / 2, 1], the first number in the high bits
    weight.absmax           float32 [blocks], or uint8 with the three below
    weight.nested_absmax    float32 [blocks / 256]     weight.nested_quant_map  float32 [256]
    weight.quant_map        float32 [16]
    weight.quant_state.bitsandbytes__nf4    JSON as bytes: blocksize, shape, nested_offset, …

    weight int8 [out, in]   SCB float32 [out]: 127 times the scale

Source: Dettmers et al., "QLoRA", 2023, and "LLM.int8()", 2022.
"""

from __future__ import annotations

import json

from torch import Tensor

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.formats.packing import unpack_nibbles
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix

_STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")


def read_bitsandbytes(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    name = f"{prefix}.weight"
    state_name = next(
        (each for kind in _STATES if (each := f"{name}.quant_state.{kind}") in checkpoint), None
    )
    if state_name is not None:
        return _read_4bit(checkpoint, name, state_name, shape)
    if f"{prefix}.SCB" not in checkpoint:
        return read_dense(checkpoint, prefix, shape)
    codes = checkpoint.read(name, shape, dtypes=("I8",))
    scales = checkpoint.read(f"{prefix}.SCB", shape[:1]) / 127
    checkpoint.ignore(f"{prefix}.weight_format")
    return QuantizedMatrix(codes=codes, scales=scales[:, None], columns_per_scale=shape[1])


def _read_4bit(
    checkpoint: Checkpoint, name: str, state_name: str, shape: tuple[int, int]
) -> Matrix:
    out, size = shape
    state = _state(checkpoint, state_name)
    block, stored = state.integer("blocksize"), state.integers("shape")
    if stored != shape:
        raise checkpoint.fault(state_name, f"says the shape {list(stored)}, expected {list(shape)}")
    if size % block:
        raise checkpoint.fault(state_name, f"says blocks of {block}, which rows of {size} are not")
    packed = checkpoint.read(name, (out * size // 2, 1), dtypes=("U8",))
    codebook = checkpoint.read(f"{name}.quant_map", (16,)).float()
    scales = _scales(checkpoint, name, state, out * size // block)
    return QuantizedMatrix(
        codes=unpack_nibbles(packed.reshape(out, size // 2), high_first=True),
        scales=scales.reshape(out, size // block),
        codebook=codebook,
        columns_per_scale=block,
    )


def _scales(checkpoint: Checkpoint, name: str, state: ConfigFields, num: int) -> Tensor:
    absmax = f"{name}.absmax"
    if f"{name}.nested_absmax" not in checkpoint:
        return checkpoint.read(absmax, (num,)).float()
    block = state.integer("nested_blocksize")
    codes = checkpoint.read(absmax, (num,), dtypes=("U8",)).long()
    values = checkpoint.read(f"{name}.nested_quant_map", (256,)).float()
    largest = checkpoint.read(f"{name}.nested_absmax", (-(-num // block),)).float()
    offset = state.number("nested_offset", minimum=-1e6)
    return values[codes] * largest.repeat_interleave(block)[:num] + offset


def _state(checkpoint: Checkpoint, name: str) -> ConfigFields:
    written = checkpoint.read(name, checkpoint.shape(name), dtypes=("U8",))
    try:
        state = json.loads(bytes(written.flatten().tolist()))
    except ValueError as error:
        raise checkpoint.fault(name, f"is no JSON: {error}") from error
    if not isinstance(state, dict):
        raise checkpoint.fault(name, "is no JSON object")
    return ConfigFields(state, path=checkpoint.path, within=name)
