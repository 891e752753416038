"""Packs a model, with its experts, for the CPU's kernels, and lets its program meet those of other
ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.experts import ExpertMatrices, Router
from penstock.engine.layers.linear import Embedding, MatrixLayer, split_bias
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.parallel.ranks import Link, Ranks, SharedRanks
from penstock.engine.program.cpu_matrices import (
    CpuMatrix,
    PackedLinear,
    PackedRouter,
    PlainTable,
    QuantizedLinear,
    StackedLinear,
    write_rounding,
)
from penstock.engine.program.operands import Lookup, Operand, SlotBuffers, Table
from penstock.kernels.cache_folder import NoCacheError, cache_dir
from penstock.kernels.cpu.library import CpuLibrary, Product
from penstock.kernels.cpu.quantized import PackedCodes, can_pack
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.linear_quantized import PackedMatrix
from penstock.kernels.program import Buffer, Place, Program
from penstock.kernels.quantized_codes import QuantizedCodes

_log = logging.getLogger(__name__)
# Left free beside the experts: for KV, whose pages are not in use yet, and for a layer's codes
# before they are packed.
_RESERVED_BYTES = 3 << 30


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
        """As in `CpuMeeting`."""
        num_values, self._turn = num_rows * size, 0
        if not self._places or self._places[0].shape[1] < num_values:
            num_bytes = self._ranks.size * num_values * self._dtype.itemsize
            self._places = tuple(
                self._ranks.memory.region(num_bytes).view(self._dtype).view(self._ranks.size, -1)
                for _ in range(2)
            )

    def part(self, _: Program, size: int) -> Buffer:
        own = self._places[self._turn][self._ranks.rank]
        rows = len(own) // size
        return Buffer("rank_part", size, own[: rows * size].view(rows, size))

    def parts(self) -> dict[str, Any]:
        parts = self._places[self._turn]
        self._turn ^= 1
        return {"parts": parts, "part_stride": parts.shape[1], "ranks": self._structure}


class StageLink:
    """Hidden states from one stage to the next in a program."""

    def __init__(self, library: CpuLibrary, link: Link) -> None:
        self._link, self._dtype = link, library.dtype
        self._structure = link.structure(library)
        self._slots = torch.empty(0)

    def begin(self, num_rows: int, size: int) -> None:
        """As in `CpuMeeting`."""
        self._slots = self._link.slots(num_rows * size * self._dtype.itemsize)

    def write_send(self, program: Program, x: Buffer) -> None:
        program.add("send_rows", x=x, size=x.size, **self._arguments())

    def write_receive(self, program: Program, y: Buffer) -> None:
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
        self.size, self._library = size, library
        self._ranks, self._dtype = ranks, library.dtype
        self._structure = ranks.structure(library)
        self._part_size = -(-size // ranks.size)
        self._places: list[Tensor] = []  # [ranks, rows · part_size] each; the last two are in use
        self._turn = 0

    def write(
        self, program: Program, y: Place | None, table: Table, x: Buffer, **rows: Any
    ) -> tuple[tuple[Structure, Structure], Structure]:
        product = table.write(program, None, x, stride=self._part_size, **rows)
        gather = program.add(
            "gather_ranks", y=y, ranks=self._structure, size=self.size, part_size=self._part_size,
            **rows,
        )  # fmt: skip
        return (product, gather), self._library.structure("linear_args", **rows)

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


class CpuMeeting:
    """Where a program meets those of other ranks: in memory that they share.

    Args:
        vocab_size: of the whole model.
        is_normed_over_heads: queries and keys are, over those of all ranks.
    """

    def __init__(
        self, library: CpuLibrary, ranks: Ranks, vocab_size: int, *, is_normed_over_heads: bool
    ) -> None:
        self.sums = self.squares = self.gather = self.before = self.after = None
        layers = ranks.layers
        if isinstance(layers, SharedRanks):
            self.sums = RankSums(library, layers)
            self.gather = RankGather(library, layers, vocab_size)
            if is_normed_over_heads:
                self.squares = RankSums(library, layers, torch.float32)
        if isinstance(ranks, SharedRanks):
            self.before, self.after = (
                None if each is None else StageLink(library, each)
                for each in (ranks.before, ranks.after)
            )

    def begin(self, num_rows: int, size: int) -> None:
        """Before a program whose buffers have room for so many rows is written."""
        for each in (self.sums, self.before, self.after):
            if each is not None:
                each.begin(num_rows, size)
        if self.squares is not None:
            self.squares.begin(num_rows, 2)


class CpuBackend:
    """
    Args:
        expected_bytes: of experts that are still to be read.

    Attributes:
        products: the kinds of products with what was packed.
    """

    def __init__(self, library: CpuLibrary, meeting: CpuMeeting, expected_bytes: int = 0) -> None:
        self.meeting = meeting
        self.products: set[Product] = set()
        self._library = library
        self._expert_memory = memory_for_experts(library, expected_bytes)

    def pack(self, layer: MatrixLayer) -> Operand:
        operand = pack_matrix(self._library, layer)
        self.products |= operand.products
        return operand

    def pack_head(self, layer: Embedding) -> Table:
        (table,) = _pack_parts(self._library, layer)
        self.products |= table.products
        return table

    def pack_table(self, layer: Embedding) -> Lookup:
        return self.pack_head(layer) if layer.quantized else PlainTable(layer.weight)

    def pack_router(self, gates: Sequence[Router]) -> PackedRouter:
        return PackedRouter(self._library, torch.cat([each.weight.data for each in gates]))

    def pack_experts(self, matrices: ExpertMatrices) -> PackedExperts:
        try:
            with self._library.packing_into(self._expert_memory):
                experts = PackedExperts(self._library, matrices)
        except OSError as error:
            raise ModelLoadError(f"the experts are more than memory holds: {error}") from error
        self.products |= experts.products
        return experts


def pack_matrix(library: CpuLibrary, layer: MatrixLayer) -> CpuMatrix:
    """Pack the layer's matrix as its kernel reads it; the layer loses it."""
    parts = _pack_parts(library, layer)
    return parts[0] if len(parts) == 1 else StackedLinear(parts)


def _pack_parts(library: CpuLibrary, layer: MatrixLayer) -> list[PackedLinear | QuantizedLinear]:
    bias = layer.bias
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


def memory_for_experts(library: CpuLibrary, num_bytes: int) -> WeightMemory:
    """The memory that this many bytes of experts are packed into: the other weights', or a file if
    that is too short."""
    free = free_cpu_bytes() if num_bytes else 0
    if not num_bytes or num_bytes <= free - _RESERVED_BYTES:
        return library.memory
    try:
        folder = cache_dir()
    except NoCacheError as error:
        raise ModelLoadError(f"the experts are more than memory holds: {error}") from error
    _log.warning(
        "the experts take %s bytes, and memory has %s free: they are read from a file in %s",
        f"{num_bytes:,}", f"{free:,}", folder,
    )  # fmt: skip
    return WeightMemory(folder)


class PackedExperts:
    """One matrix of each expert, in the model's dtype or quantized, all in one layout.

    Args:
        matrices: loses its matrices.
    """

    def __init__(self, library: CpuLibrary, matrices: ExpertMatrices) -> None:
        matrices.load()
        self._num_experts = matrices.num_experts
        self.in_features = matrices.in_features
        self.out_features = matrices.out_features // matrices.num_experts
        self._orders = matrices.orders
        self._itemsize = library.dtype.itemsize
        self._codes: PackedCodes | None = None  # of one of them
        self._bias = matrices.bias
        codes, in_bytes = matrices.quantized, matrices.rounds_inputs
        weights = list(torch.split(matrices.weight.data, self.out_features))
        matrices.drop()
        if not codes:
            self._weights = [library.pack(weight) for weight in weights]
        else:
            (whole,) = codes
            assert isinstance(whole, QuantizedCodes), "packed for a GPU"
            parts = [
                whole.part(slice(start, start + self.out_features))
                for start in range(0, whole.out_features, self.out_features)
            ]
            if can_pack(whole, in_bytes=in_bytes):
                packed = [PackedCodes(library, part, in_bytes=in_bytes) for part in parts]
                self._codes, self._weights = packed[0], [each.weight for each in packed]
            else:
                self._weights = [
                    library.pack(part.dequantize().to(library.dtype)) for part in parts
                ]
        kind: Product = "dense"
        if self._codes is not None:
            kind = "bytes" if in_bytes else "exact"
        self.products = frozenset({kind})
        self._addresses = torch.tensor([weight.data_ptr() for weight in self._weights])

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return self._weights[0].nbytes

    def write(
        self, program: Program, y: Buffer, x: Buffer, slots: SlotBuffers, *, is_gathered: bool
    ) -> None:
        codes = self._codes
        rows: dict[str, Any] = {
            "tiles": slots.tiles, "num_tiles": slots.num_tiles, "weights": self._addresses,
            "bias": self._bias,
        }  # fmt: skip
        num_rows: dict[str, Any] = {"num_rows": slots.num_slots} if is_gathered else {}
        if not is_gathered and (codes is None or self._orders is not None or not codes.in_bytes):
            gathered = slots.buffer(program, "slot_inputs", self.in_features)
            slots.write_gather(program, gathered, x, self.in_features * self._itemsize)
            x, is_gathered, num_rows = gathered, True, {"num_rows": slots.num_slots}
        if codes is None:
            program.add(
                "experts_linear", y=y, x=x, in_features=self.in_features,
                out_features=self.out_features, **rows,
            )  # fmt: skip
            return
        if self._orders is not None:
            ordered = slots.buffer(program, "ordered_slots", self.in_features)
            program.add(
                "permute_slots", y=ordered, x=x, indices=self._orders, tiles=slots.tiles,
                num_tiles=slots.num_tiles, size=self.in_features,
            )  # fmt: skip
            x = ordered
        given: dict[str, Any] = {"x": x}
        blocks = {"size": self.in_features, "columns_per_scale": codes.columns_per_scale}
        if codes.in_bytes:
            given = self._write_bytes(program, x, codes, slots, num_rows | blocks, is_gathered)
        elif codes.has_offsets:
            sums = slots.buffer(program, "slot_float_sums", codes.num_blocks, torch.float32)
            program.add("sum_blocks", sums=sums, x=x, **blocks, **num_rows)
            given["x_float_sums"] = sums
        program.add("experts_linear_quantized", y=y, **given, **codes.arguments(), **rows)

    def _write_bytes(
        self, program: Program, x: Buffer, codes: PackedCodes, slots: SlotBuffers,
        blocks: dict[str, Any], is_gathered: bool,
    ) -> dict[str, Buffer]:  # fmt: skip
        """Add the rounding of x to bytes: of the tokens', whose bytes are then gathered."""
        sizes = codes.rounded_rows
        given = {name: slots.buffer(program, f"slot_{name}", *size) for name, size in sizes.items()}
        rounded = given if is_gathered else {
            name: program.buffer(f"token_{name}", *size) for name, size in sizes.items()
        }  # fmt: skip
        write_rounding(program, x, codes, rounded, **blocks)
        if not is_gathered:
            for name, (size, dtype) in sizes.items():
                slots.write_gather(program, given[name], rounded[name], size * dtype.itemsize)
        return given
