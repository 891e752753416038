"""AWQ: codes of 4 bits, packed along the outputs in the order of AutoAWQ's GEMM kernel, with a
scale and a zero for each group of inputs and output.

    qweight int32 [in, out / 8]     scales [groups, out]     qzeros int32 [groups, out / 8]

Source: Lin et al., "AWQ", 2024; the layout is AutoAWQ's, version `gemm`.
"""

from __future__ import annotations

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.formats.packing import unpack
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # where the codes of an integer belong


def read_awq(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    name = f"{prefix}.qweight"
    if name not in checkpoint:
        return read_dense(checkpoint, prefix, shape)
    config = checkpoint.config.section("quantization_config")
    version = config.text("version", "gemm").lower()
    bits = config.integer("bits", config.integer("w_bit", _BITS))
    if version != "gemm" or bits != _BITS:
        raise config.error("version", f"{version!r} with {bits} bits; only 'gemm' with 4 is read")
    out, size = shape
    num_groups, _ = checkpoint.shape(f"{prefix}.scales", num_dims=2)
    group_size = checkpoint.group_size(f"{prefix}.scales", size, num_groups)
    packed = checkpoint.read(name, (size, out // 8), dtypes=("I32",))
    zeros_shape = (num_groups, out // 8)
    packed_zeros = checkpoint.read(f"{prefix}.qzeros", zeros_shape, dtypes=("I32",))
    scales = checkpoint.read(f"{prefix}.scales", (num_groups, out)).float()
    zeros = unpack(packed_zeros, _BITS, dim=1, order=_ORDER)
    return QuantizedMatrix(
        codes=unpack(packed, _BITS, dim=1, order=_ORDER).T.contiguous(),
        scales=scales.T.contiguous(),
        offsets=(zeros * scales).T.contiguous(),
        columns_per_scale=group_size,
    )
