"""A linear layer's matrix as the CPU kernels read it: in the model's dtype, or in int8."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.weights.matrix import DenseMatrix, Matrix, QuantizedMatrix
from penstock.kernels.cpu.int8 import pack_int8, row_bytes
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.program import Buffer, Program


class CpuLinear(Protocol):
    """A matrix [out_features, in_features] and a bias."""

    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        ...

    def write(
        self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None = None
    ) -> None:
        """Add y = x · matrix (+ bias) (+ residual, which is not y)."""
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

    def arguments(self) -> dict[str, Any]:
        """Those of `linear` that do not depend on the rows."""
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        return {"weight": self.weight, "bias": self.bias, **sizes}

    def write(
        self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None = None
    ) -> None:
        program.add("linear", y=y, x=x, residual=residual, **self.arguments())


class Int8Linear:
    """A matrix in int8, and inputs rounded to int8 just before each product."""

    def __init__(self, library: CpuLibrary, matrix: QuantizedMatrix, bias: Tensor | None) -> None:
        self.out_features, self.in_features = matrix.codes.shape
        self.weight = pack_int8(library, matrix.codes, matrix.scales[:, 0])
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def write(
        self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None = None
    ) -> None:
        values = program.buffer("int8", row_bytes(self.in_features), torch.uint8)
        scales = program.buffer("int8_scales", 1, torch.float32)
        program.add("quantize_rows", bytes=values, scales=scales, x=x, size=self.in_features)
        program.add(
            "linear_int8", y=y, x=values, x_scales=scales, weight=self.weight, bias=self.bias,
            residual=residual, in_features=self.in_features, out_features=self.out_features,
        )  # fmt: skip


def pack_linear(library: CpuLibrary, matrix: Matrix, bias: Tensor | None) -> CpuLinear:
    """Pack the matrix as its kernel reads it."""
    if isinstance(matrix, DenseMatrix):
        return PackedLinear(library, matrix.values, bias)
    return Int8Linear(library, matrix, bias)
