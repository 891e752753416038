"""A layer's matrix as the CPU kernels read it: in the model's dtype, or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.layers.linear import Embedding, MatrixLayer, split_bias
from penstock.engine.models.cpu_adapters import CpuAdapters, as_cpu
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.program import Buffer, Place, Program
from penstock.kernels.cpu.quantized import PackedCodes, can_pack
from penstock.kernels.linear_quantized import PackedMatrix
from penstock.kernels.quantized_codes import QuantizedCodes


class CpuLinear(Protocol):
    """A matrix [out_features, in_features] and a bias."""

    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        ...

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        """Add y = x · matrix (+ bias).

        Args:
            y: None: to be set in the result.
            others: of the product: a residual, which is not y, to be added; num_rows.

        Returns:
            The arguments of the (last) product.
        """
        ...


class CpuTable(CpuLinear, Protocol):
    """A matrix that is one piece: an embedding, or the output head."""

    def write_lookup(self, program: Program, y: Buffer) -> None:
        """Add y[t] = the row of token t."""
        ...


class PackedLinear:
    """A matrix in the model's dtype."""

    def __init__(self, library: CpuLibrary, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = library.pack(weight)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        return program.add(
            "linear", y=y, x=x, weight=self._weight, bias=self._bias,
            in_features=self.in_features, out_features=self.out_features, **others,
        )  # fmt: skip

    def write_lookup(self, program: Program, y: Buffer) -> None:
        program.add(
            "embed", y=y, weight=self._weight, size=self.in_features,
            vocab_size=self.out_features, is_packed=1,
        )  # fmt: skip


class QuantizedLinear:
    """A quantized matrix, and inputs rounded to bytes just before each product, or as they are."""

    def __init__(self, packed: PackedCodes, order: Tensor | None, bias: Tensor | None) -> None:
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._packed, self._order, self._bias = packed, order, bias

    @property
    def num_bytes(self) -> int:
        return self._packed.weight.nbytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        packed = self._packed
        rows = {name: others[name] for name in ("num_rows",) if name in others}
        if self._order is not None:
            ordered = program.buffer("ordered", self.in_features)
            program.add(
                "permute_columns", y=ordered, x=x, indices=self._order, size=self.in_features,
                **rows,
            )  # fmt: skip
            x = ordered
        given: dict[str, Any] = {"x": x}
        blocks = {"size": self.in_features, "columns_per_scale": packed.columns_per_scale, **rows}
        if packed.in_bytes:
            given = {
                "x": program.buffer("input_bytes", packed.row_bytes, torch.uint8),
                "x_scales": program.buffer("input_scales", packed.num_blocks, torch.float32),
                "x_sums": program.buffer("input_sums", packed.num_blocks, torch.int32),
            }
            program.add(
                "quantize_blocks", bytes=given["x"], scales=given["x_scales"],
                sums=given["x_sums"], x=x, code_bits=packed.code_bits, **blocks,
            )  # fmt: skip
        elif packed.has_offsets:
            sums = program.buffer("input_float_sums", packed.num_blocks, torch.float32)
            program.add("sum_blocks", sums=sums, x=x, **blocks)
            given["x_float_sums"] = sums
        return program.add(
            "linear_quantized", y=y, bias=self._bias, **given,
            **packed.arguments(), **others,
        )  # fmt: skip

    def write_lookup(self, program: Program, y: Buffer) -> None:
        assert self._order is None, "a table's columns are in the order of the hidden state"
        program.add("embed_quantized", y=y, **self._packed.embed_arguments())


class StackedLinear:
    """Several matrices that multiply the same rows; each writes its columns of the result."""

    def __init__(self, parts: Sequence[CpuLinear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        assert y is not None, "it has several products"
        residual: Place | None = others.pop("residual", None)
        start = 0
        for part in self.parts:
            others["residual"] = residual and residual.columns(start)
            product = part.write(program, y.columns(start), x, stride=self.out_features, **others)
            start += part.out_features
        return product


class AdaptedLinear:
    """A matrix whose rows' adapters add to its products."""

    def __init__(self, linear: CpuLinear, adapters: CpuAdapters) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._linear, self._adapters = linear, adapters

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        product = self._linear.write(program, y, x, **others)
        self._adapters.write(program, y, x)
        return product


def pack_linear(library: CpuLibrary, layer: MatrixLayer, bias: Tensor | None = None) -> CpuLinear:
    """Pack the layer's matrix as its kernel reads it; the layer loses it."""
    parts = _pack_parts(library, layer, bias)
    linear = parts[0] if len(parts) == 1 else StackedLinear(parts)
    adapters = as_cpu(layer.adapters)
    return linear if adapters is None else AdaptedLinear(linear, adapters)


def pack_table(library: CpuLibrary, layer: Embedding, bias: Tensor | None = None) -> CpuTable:
    """The same of an embedding or a head."""
    (table,) = _pack_parts(library, layer, bias)
    return table


def _pack_parts(
    library: CpuLibrary, layer: MatrixLayer, bias: Tensor | None
) -> list[PackedLinear | QuantizedLinear]:
    weight, quantized, rounds_inputs = layer.weight.data, layer.quantized, layer.rounds_inputs
    layer.drop()
    if not quantized:
        return [PackedLinear(library, weight, bias)]
    return [
        _pack_codes(library, codes, each, in_bytes=rounds_inputs)
        for codes, each in zip(quantized, split_bias(bias, quantized), strict=True)
    ]


def _pack_codes(
    library: CpuLibrary, codes: PackedMatrix, bias: Tensor | None, *, in_bytes: bool
) -> PackedLinear | QuantizedLinear:
    assert isinstance(codes, QuantizedCodes), "packed for a GPU"
    if not can_pack(codes, in_bytes=in_bytes):
        return PackedLinear(library, codes.dequantize().to(library.dtype), bias)
    packed = PackedCodes(library, codes, in_bytes=in_bytes)
    return QuantizedLinear(packed, codes.order, bias)
