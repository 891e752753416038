"""GPTQ: codes of 2, 4 or 8 bits, packed along the inputs, with a scale and a zero for each group of
inputs (`g_idx` says which) and output.

    qweight int32 [in · bits / 32, out]     scales [groups, out]
    qzeros  int32 [groups, out · bits / 32]     g_idx int32 [in]

Zeros are stored minus one, but as they are in `checkpoint_format: gptq_v2`. With `desc_act` the
inputs of a group are anywhere, so they are sorted by group.

Source: Frantar et al., "GPTQ", 2023; the layout is AutoGPTQ's and GPTQModel's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.formats.packing import unpack
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix


def read_gptq(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    name = f"{prefix}.qweight"
    if name not in checkpoint:
        return read_dense(checkpoint, prefix, shape)
    out, size = shape
    bits = _bits(checkpoint, name, size)
    num_groups, _ = checkpoint.shape(f"{prefix}.scales", num_dims=2)
    group_size = checkpoint.group_size(f"{prefix}.scales", size, num_groups)
    packed = checkpoint.read(name, (size * bits // 32, out), dtypes=("I32",))
    codes = unpack(packed, bits, dim=0).T
    scales = checkpoint.read(f"{prefix}.scales", (num_groups, out)).float()
    zeros_shape = (num_groups, out * bits // 32)
    packed_zeros = checkpoint.read(f"{prefix}.qzeros", zeros_shape, dtypes=("I32",))
    zeros = unpack(packed_zeros, bits, dim=1).float()
    config = checkpoint.config.section("quantization_config")
    version = config.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise config.error("checkpoint_format", f"{version!r} is not supported")
    if version == "gptq":
        zeros += 1
    permutation = permutation_of(checkpoint, f"{prefix}.g_idx", size, group_size)
    if permutation is not None:
        codes = codes[:, permutation]
    return QuantizedMatrix(
        codes=codes.contiguous(),
        scales=scales.T.contiguous(),
        offsets=(zeros * scales).T.contiguous(),
        columns_per_scale=group_size,
        permutation=permutation,
    )


def _bits(checkpoint: Checkpoint, name: str, size: int) -> int:
    rows, _ = checkpoint.shape(name, num_dims=2)
    bits = rows * 32 // size
    if bits not in (2, 4, 8) or size * bits % 32:
        raise checkpoint.fault(name, f"has {rows} rows for {size} inputs: not 2, 4 or 8 bits each")
    return bits


def permutation_of(checkpoint: Checkpoint, name: str, size: int, group_size: int) -> Tensor | None:
    """The inputs in the order of their groups; None if they are in it."""
    if name not in checkpoint:
        return None
    groups = checkpoint.read(name, (size,), dtypes=("I32", "I64"))
    expected = torch.arange(size) // group_size
    if torch.equal(groups.long(), expected):
        return None
    permutation = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[permutation], expected):
        raise checkpoint.fault(name, f"does not name {group_size} inputs for each group")
    return permutation
