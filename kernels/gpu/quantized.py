"""Quantized weights as the Triton kernels read them; packed once, when a model is loaded.

Nothing here needs Triton, so that the engine can name the type without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantized_codes import QuantizedCodes, scale_blocks

WIDTH = 64  # columns that a kernel takes at once from bytes with two codes each
FLOAT8 = torch.float8_e4m3fn
_BYTE_ZERO = 128  # of codes of 8 bits, whose levels are signed bytes
_NUM_PROBED_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCodes:
    """A matrix of numbers level · scale - offset.

    Attributes:
        codes: of 4 bits: uint8 [out_features, blocks of 128 columns · 64], where byte j of a block
            has the code of its column j and, in the upper half, of its column 64 + j. Of 8 bits:
            the levels, int8 or float8_e4m3fn [out_features, in_features].
        scales: [ceil(in_features / columns_per_scale), out_features], so that neighbouring programs
            read neighbouring numbers; in float32, or in 16 bits where that loses nothing.
        offsets: of the same shape; None: zeros.
        zero: subtracted from a code of 4 bits.
        table: float32 [16], the levels of codes of 4 bits; None: code - zero.
        order: int64 [in_features], the input that each column multiplies; None: column j, input j.
        factors: of each column, as in `QuantizedCodes`.
        has_library: torch can multiply its bytes with rows of bytes on this device.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    in_features: int
    columns_per_scale: int
    zero: int = 0
    table: Tensor | None = None
    order: Tensor | None = None
    factors: Tensor | None = None
    has_library: bool = False

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def is_float8(self) -> bool:
        return self.codes.dtype == FLOAT8

    @property
    def num_blocks(self) -> int:
        return self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (
            self.codes, self.scales, self.offsets, self.table, self.order, self.factors
        )  # fmt: skip
        return sum(each.nbytes for each in tensors if each is not None)

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features], in the order of inputs."""
        levels = self.codes.float()
        if self.bits == 4:
            halves = self.codes.view(self.out_features, -1, 1, WIDTH)
            codes = torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)[:, : self.in_features]
            levels = codes.float() - self.zero if self.table is None else self.table[codes.long()]
        scales, offsets = (
            None if each is None else each.T.float() for each in (self.scales, self.offsets)
        )
        assert scales is not None
        numbers = scale_blocks(levels, scales, offsets, self.columns_per_scale, self.order)
        return numbers if self.factors is None else numbers.mul_(self.factors)


def pack_codes(matrix: QuantizedCodes, like: Tensor) -> GpuCodes:
    """
    Args:
        like: has the device of the result, and the dtype of the rows it will be multiplied with.
    """
    matrix = _on_device(matrix, like.device)
    scales, offsets = matrix.scales, matrix.offsets
    if matrix.bits == 4:
        codes = _pack_nibbles(matrix.codes)
    elif matrix.is_float8:
        codes = matrix.codes.view(FLOAT8).contiguous()
    else:
        codes = (matrix.codes ^ _BYTE_ZERO).view(torch.int8).contiguous()
        if matrix.zero != _BYTE_ZERO:
            moved = scales * (matrix.zero - _BYTE_ZERO)
            offsets = moved if offsets is None else offsets + moved
    packed = GpuCodes(
        codes=codes,
        scales=_narrow(scales).T.contiguous(),
        offsets=None if offsets is None else _narrow(offsets).T.contiguous(),
        in_features=matrix.in_features,
        columns_per_scale=min(matrix.columns_per_scale, matrix.in_features),
        zero=matrix.zero if matrix.bits == 4 else 0,
        table=matrix.table,
        order=matrix.order,
        factors=matrix.factors,
    )
    return replace(packed, has_library=_has_library(packed, like))


def product_in_torch(values: Tensor, scales: Tensor, matrix: GpuCodes, like: Tensor) -> Tensor:
    """values [num_rows, in_features] times the matrix, of which each row has one scale, by torch.

    Args:
        values: of the matrix's type.
        scales: float32 [num_rows], of the values.
        like: has the dtype of a product of floats.

    Returns:
        int32 sums without any scale; or, of floats, the product with all scales.

    Raises:
        RuntimeError: this device, or torch's build, has no such product.
    """
    if matrix.codes.dtype == torch.int8:
        return torch._int_mm(values, matrix.codes.T)
    product: Tensor = torch._scaled_mm(
        values,
        matrix.codes.T,
        scale_a=scales[:, None],
        scale_b=matrix.scales,
        out_dtype=like.dtype,
    )
    return product


def _has_library(matrix: GpuCodes, like: Tensor) -> bool:
    """Whether `product_in_torch` works, from trying: the rules differ by card and by version.

    As of torch 2.11: `_int_mm` takes more than 16 rows, and sizes that are multiples of 8;
    `_scaled_mm` with a scale for each row takes multiples of 16, from compute capability 8.9 on,
    and returns bfloat16, or on some cards float32.
    """
    if matrix.bits == 4 or matrix.num_blocks > 1 or matrix.offsets is not None:
        return False
    alignment = 16 if matrix.is_float8 else 8
    if matrix.in_features % alignment or matrix.out_features % alignment:
        return False
    values = matrix.codes.new_zeros(_NUM_PROBED_ROWS, matrix.in_features)
    scales = torch.ones(_NUM_PROBED_ROWS, device=like.device)
    try:
        product_in_torch(values, scales, matrix, like).sum().item()  # waits for late errors
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _on_device(matrix: QuantizedCodes, device: torch.device) -> QuantizedCodes:
    names = ("codes", "scales", "offsets", "table", "order", "factors")
    tensors = {name: getattr(matrix, name) for name in names}
    return replace(
        matrix, **{key: each.to(device) for key, each in tensors.items() if each is not None}
    )


def _pack_nibbles(codes: Tensor) -> Tensor:
    """codes uint8 [out_features, in_features] below 16, padded with zeros; see `GpuCodes`."""
    padded = F.pad(codes, (0, -codes.shape[1] % (2 * WIDTH)))
    halves = padded.view(len(codes), -1, 2, WIDTH)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _narrow(values: Tensor) -> Tensor:
    """Many numbers in 16 bits, if they are the same: those of most checkpoints are."""
    for dtype in (torch.float16, torch.bfloat16):
        if values.shape[1] > 1 and torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values
