"""A linear layer's matrix as the CPU kernels read it: in the model's dtype, or in int8."""

from __future__ import annotations

from ctypes import Structure
from typing import Protocol, TypeAlias

from torch import Tensor

from penstock.engine.weights.matrix import DenseMatrix, Matrix, QuantizedMatrix
from penstock.kernels.cpu.int8 import Int8Rows, pack_int8
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import LinearArgs, LinearInt8Args

Calls: TypeAlias = list[tuple[str, Structure]]


class CpuLinear(Protocol):
    """A matrix [out_features, in_features] and a bias."""

    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        ...

    def calls(
        self, y: Tensor, x: Tensor, num_rows: int, room: Int8Rows, *, residual: Tensor | None = None
    ) -> Calls:
        """y = x · matrix (+ bias) (+ residual, which is not y).

        Args:
            num_rows: the address of the number of rows.
            room: buffer for x in int8; free again when the calls have run.
        """
        ...


class PackedLinear:
    """A matrix in the model's dtype."""

    def __init__(self, library: CpuLibrary, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = library.pack(weight)
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def args(
        self, y: Tensor, x: Tensor, num_rows: int, *, residual: Tensor | None = None
    ) -> LinearArgs:
        """num_rows: the address of the number of rows."""
        return LinearArgs(
            y=y.data_ptr(),
            x=x.data_ptr(),
            weight=self.weight.data_ptr(),
            bias=address(self.bias),
            residual=address(residual),
            num_rows=num_rows,
            in_features=self.in_features,
            out_features=self.out_features,
        )

    def calls(
        self, y: Tensor, x: Tensor, num_rows: int, room: Int8Rows, *, residual: Tensor | None = None
    ) -> Calls:
        del room  # x is not quantized
        return [("linear", self.args(y, x, num_rows, residual=residual))]


class Int8Linear:
    """A matrix in int8, and inputs rounded to int8 just before each product."""

    def __init__(self, library: CpuLibrary, matrix: QuantizedMatrix, bias: Tensor | None) -> None:
        self.out_features, self.in_features = matrix.codes.shape
        self.weight = pack_int8(library, matrix.codes, matrix.scales)
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def calls(
        self, y: Tensor, x: Tensor, num_rows: int, room: Int8Rows, *, residual: Tensor | None = None
    ) -> Calls:
        product = LinearInt8Args(
            y=y.data_ptr(),
            x=room.values.data_ptr(),
            x_scales=room.scales.data_ptr(),
            weight=self.weight.data_ptr(),
            bias=address(self.bias),
            residual=address(residual),
            num_rows=num_rows,
            in_features=self.in_features,
            out_features=self.out_features,
        )
        return [("quantize_rows", room.args(x, num_rows)), ("linear_int8", product)]


def pack_linear(library: CpuLibrary, matrix: Matrix, bias: Tensor | None) -> CpuLinear:
    """Pack the matrix as its kernel reads it."""
    if isinstance(matrix, DenseMatrix):
        return PackedLinear(library, matrix.values, bias)
    return Int8Linear(library, matrix, bias)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
