"""A layer's matrix as the CPU kernels read it: in the model's dtype, or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.layers.linear import Embedding, MatrixLayer, split_bias
from penstock.engine.lora.cpu_adapters import CpuAdapters, as_cpu
from penstock.engine.parallel.ranks import Link, SharedRanks
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

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        """Add y[t] = the row of token t.

        Args:
            ids: `first_id` and `num_ids`, where the table does not have all.
        """
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
        self._order, self._factors = order, factors

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


class RankSums:
    """Sums over the ranks in a program.

    Args:
        dtype: of the parts; None: the library's.

    Two places in shared memory take turns, so that a rank that writes its part of the next sum does
    not change what another one still reads of the last.
    """

    def __init__(
        self, library: CpuLibrary, ranks: SharedRanks, dtype: torch.dtype | None = None
    ) -> None:
        self._ranks, self._dtype = ranks, dtype or library.dtype
        self._structure = ranks.structure(library)
        self._places: tuple[Tensor, ...] = ()  # [ranks, rows · size] each
        self._turn = 0

    def begin(self, num_rows: int, size: int) -> None:
        """Before a program whose buffers have room for so many rows is written."""
        num_values, self._turn = num_rows * size, 0
        if not self._places or self._places[0].shape[1] < num_values:
            num_bytes = self._ranks.size * num_values * self._dtype.itemsize
            self._places = tuple(
                self._ranks.memory.region(num_bytes).view(self._dtype).view(self._ranks.size, -1)
                for _ in range(2)
            )

    def part(self, size: int) -> Buffer:
        """Where the next sum's operations write this rank's part."""
        own = self._places[self._turn][self._ranks.rank]
        rows = len(own) // size
        return Buffer("rank_part", size, own[: rows * size].view(rows, size))

    def parts(self) -> dict[str, Any]:
        """The arguments of an operation that meets the other ranks, and reads all parts; the next
        one has another place."""
        parts = self._places[self._turn]
        self._turn ^= 1
        return {"parts": parts, "part_stride": parts.shape[1], "ranks": self._structure}

    def write(self, program: Program, y: Place, size: int, residual: Place | None = None) -> None:
        """Add y = the sum of all ranks' parts (+ residual)."""
        program.add("sum_ranks", y=y, residual=residual, size=size, **self.parts())


class StageLink:
    """Hidden states from one stage to the next in a program."""

    def __init__(self, library: CpuLibrary, link: Link) -> None:
        self._link, self._dtype = link, library.dtype
        self._structure = link.structure(library)
        self._slots = torch.empty(0)

    def begin(self, num_rows: int, size: int) -> None:
        """As in `RankSums`."""
        self._slots = self._link.slots(num_rows * size * self._dtype.itemsize)

    def write_send(self, program: Program, x: Buffer) -> None:
        """Add the sending of x, by the one rank of its stage that does."""
        program.add("send_rows", x=x, size=x.size, **self._arguments())

    def write_receive(self, program: Program, y: Buffer) -> None:
        """Add y = what the stage before sent."""
        program.add("receive_rows", y=y, size=y.size, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {
            "slots": self._slots, "ranks": self._structure, "num_slots": len(self._slots),
            "slot_stride": self._slots.shape[1] // self._dtype.itemsize,
        }  # fmt: skip


class RankGather:
    """The logits of all ranks, of which each has a part of the vocabulary.

    Attributes:
        size: of the vocabulary.
    """

    def __init__(self, library: CpuLibrary, ranks: SharedRanks, size: int) -> None:
        self.size = size
        self._ranks, self._dtype = ranks, library.dtype
        self._structure = ranks.structure(library)
        self._part_size = -(-size // ranks.size)
        self._places: list[Tensor] = []  # [ranks, rows · part_size] each; the last two are in use
        self._turn = 0

    def write(
        self, program: Program, table: CpuTable, x: Buffer, num_rows: int
    ) -> tuple[Structure, Structure]:
        """Add this rank's logits, and then all; the arguments of both."""
        product = table.write(program, None, x, num_rows=num_rows, stride=self._part_size)
        gather = program.add(
            "gather_ranks", num_rows=num_rows, ranks=self._structure, size=self.size,
            part_size=self._part_size,
        )  # fmt: skip
        return product, gather

    def point(self, written: tuple[Structure, Structure], logits: Tensor) -> None:
        """Let the operations of `write` end in these rows."""
        product, gather = written
        num_rows = len(logits)
        num_values = num_rows * self._part_size
        if not self._places or self._places[-1].shape[1] < num_values:
            num_values = 1 << max(num_values - 1, 0).bit_length()
            num_bytes = self._ranks.size * num_values * self._dtype.itemsize
            self._places += [
                self._ranks.memory.region(num_bytes).view(self._dtype).view(self._ranks.size, -1)
                for _ in range(2)
            ]
        self._turn ^= 1
        parts = self._places[-1 - self._turn]
        product.y = parts[self._ranks.rank].data_ptr()
        gather.y, gather.parts, gather.part_stride = (
            logits.data_ptr(), parts.data_ptr(), parts.shape[1]
        )  # fmt: skip


class SummedLinear:
    """A matrix of which each rank has some columns."""

    def __init__(self, linear: CpuLinear, sums: RankSums) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._linear, self._sums = linear, sums

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Structure:
        assert y is not None, "the sum is not the product"
        residual: Place | None = others.pop("residual", None)
        product = self._linear.write(program, self._sums.part(self.out_features), x, **others)
        self._sums.write(program, y, self.out_features, residual)
        return product


def pack_linear(
    library: CpuLibrary,
    layer: MatrixLayer,
    bias: Tensor | None = None,
    *,
    sums: RankSums | None = None,
) -> CpuLinear:
    """Pack the layer's matrix as its kernel reads it; the layer loses it.

    Args:
        sums: over the ranks that share the model, if some do.
    """
    parts = _pack_parts(library, layer, bias)
    linear: CpuLinear = parts[0] if len(parts) == 1 else StackedLinear(parts)
    adapters = as_cpu(layer.adapters)
    if adapters is not None:
        linear = AdaptedLinear(linear, adapters)
    return linear if sums is None or layer.ranks.size == 1 else SummedLinear(linear, sums)


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
    return QuantizedLinear(packed, bias, order=codes.order, factors=codes.factors)
