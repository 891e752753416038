"""Matrices as the CPU's kernels read them: in the model's dtype, or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary, Product
from penstock.kernels.cpu.quantized import PackedCodes
from penstock.kernels.program import Buffer, Place, Program


class PackedLinear:
    """A matrix in the model's dtype."""

    products: frozenset[Product] = frozenset({"dense"})

    def __init__(self, library: CpuLibrary, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = library.pack(weight)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        return program.add(
            "linear", y=y, x=x, weight=self._weight, bias=self._bias,
            in_features=self.in_features, out_features=self.out_features, **others,
        )  # fmt: skip

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        program.add(
            "embed", y=y, weight=self._weight, size=self.in_features,
            vocab_size=self.out_features, is_packed=1, **ids,
        )  # fmt: skip


class QuantizedLinear:
    """A quantized matrix, and inputs rounded to bytes just before each product, or as they are."""

    def __init__(
        self, packed: PackedCodes, bias: Tensor | None, *, order: Tensor | None,
        factors: Tensor | None,
    ) -> None:  # fmt: skip
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._packed, self._bias = packed, bias
        self.products: frozenset[Product] = frozenset({"bytes" if packed.in_bytes else "exact"})
        self._order, self._factors = order, factors

    @property
    def num_bytes(self) -> int:
        return self._packed.weight.nbytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        packed = self._packed
        rows = {name: others[name] for name in ("num_rows",) if name in others}
        if self._order is not None:
            ordered = program.buffer("ordered", self.in_features)
            program.add(
                "permute_columns", y=ordered, x=x, indices=self._order, size=self.in_features,
                **rows,
            )  # fmt: skip
            x = ordered
        if self._factors is not None:
            scaled = program.buffer("scaled", self.in_features)
            program.add(
                "scale_columns", y=scaled, x=x, factors=self._factors, size=self.in_features,
                **rows,
            )  # fmt: skip
            x = scaled
        given: dict[str, Any] = {"x": x}
        blocks = {"size": self.in_features, "columns_per_scale": packed.columns_per_scale, **rows}
        if packed.in_bytes:
            given = {
                name: program.buffer(f"input_{name}", *size)
                for name, size in packed.rounded_rows.items()
            }
            write_rounding(program, x, packed, given, **blocks)
        elif packed.has_offsets:
            sums = program.buffer("input_float_sums", packed.num_blocks, torch.float32)
            program.add("sum_blocks", sums=sums, x=x, **blocks)
            given["x_float_sums"] = sums
        return program.add(
            "linear_quantized", y=y, bias=self._bias, **given,
            **packed.arguments(), **others,
        )  # fmt: skip

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        assert self._order is None, "a table's columns are in the order of the hidden state"
        assert self._factors is None, "a table's numbers are looked up"
        program.add("embed_quantized", y=y, **ids, **self._packed.embed_arguments())


def write_rounding(
    program: Program, x: Buffer, packed: PackedCodes, rounded: Mapping[str, Buffer], **blocks: Any
) -> None:
    """Add the rounding of x to bytes, block by block.

    Args:
        rounded: where they go, by the names of `PackedCodes.rounded_rows`.
        blocks: other arguments of `quantize_blocks`.
    """
    program.add(
        "quantize_blocks", bytes=rounded["x"], scales=rounded["x_scales"],
        sums=rounded["x_sums"], float_sums=rounded.get("x_float_sums"),
        outlier_columns=rounded.get("outlier_columns"),
        outlier_values=rounded.get("outlier_values"), most_outliers=packed.most_outliers,
        x=x, code_bits=packed.code_bits, zero=packed.zero, **blocks,
    )  # fmt: skip


class StackedLinear:
    """Several matrices that multiply the same rows; each writes its columns of the result."""

    def __init__(self, parts: Sequence[CpuMatrix]) -> None:
        self.parts = parts
        self.in_features: int = parts[0].in_features
        self.out_features: int = sum(part.out_features for part in parts)
        self.products: frozenset[Product] = frozenset().union(*(each.products for each in parts))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        assert y is not None, "it has several products"
        residual: Place | None = others.pop("residual", None)
        start = 0
        for part in self.parts:
            others["residual"] = residual and residual.columns(start)
            product = part.write(program, y.columns(start), x, stride=self.out_features, **others)
            start += part.out_features
        return product


CpuMatrix: TypeAlias = PackedLinear | QuantizedLinear | StackedLinear


class PlainTable:
    """An embedding that is no output head, as it is."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        program.add("embed", y=y, weight=self._table, size=y.size, **ids)


class PackedRouter:
    """A few rows whose products are float32."""

    def __init__(self, library: CpuLibrary, weight: Tensor) -> None:
        self._shape, self._weight = weight.shape, library.pack(weight)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def write(self, program: Program, y: Buffer, x: Buffer) -> None:
        out_features, in_features = self._shape
        program.add(
            "linear", y=y, x=x, weight=self._weight, in_features=in_features,
            out_features=out_features, is_float=1,
        )  # fmt: skip
