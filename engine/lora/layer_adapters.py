"""What adapters add to one layer, slot by slot: for torch, and for the program of a CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.lora import (
    CHUNK,
    PackedPair,
    pack_pair,
    padded_rank,
    set_pair,
    table_of_pairs,
)
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.lora import lora_expand, lora_shrink
from penstock.kernels.program import Buffer, Place, Program
from penstock.kernels.reference.lora import LoraRows


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The update scale · B A of a matrix.

    Attributes:
        a: [rank, in_features]
        b: [out_features, rank]
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(slots=True)
class StepRows:
    """Which rows of the current step have adapters; None: none has.

    Attributes:
        num_slots: of all adapters.
    """

    num_slots: int
    rows: LoraRows | None = None

    def set(self, rows: LoraRows | None) -> None:
        self.rows = rows


class LayerAdapters(ABC):
    """The updates of one layer, slot by slot; a fused layer has one for each of its parts."""

    def write(self, program: Program, y: Place | None, x: Buffer, product: Any = None) -> None:
        """Add y += the updates of x; y None: the result of `product`."""
        raise NotImplementedError

    def write_lookup(self, program: Program, y: Buffer) -> None:
        """Add y += the updates of the tokens' rows of a table."""
        raise NotImplementedError

    @abstractmethod
    def pack(self, parts: Sequence[LoraWeights | None], memory: WeightMemory) -> Any:
        """An adapter's matrices as `install` takes them; any thread may call it. None: no part has
        one.

        Args:
            memory: the adapter's own.
        """

    @abstractmethod
    def install(self, slot: int, packed: Any) -> None:
        """Let rows of a slot have these updates from the next step on; None: none."""


class TorchAdapters(LayerAdapters):
    """
    Args:
        part_sizes, in_features: of the layer.
        rows: of the step: of all tokens, or those whose logits are computed.
        like: has the model's dtype and device.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        in_features: int,
        *,
        num_slots: int,
        max_rank: int,
        rows: StepRows,
        like: Tensor,
    ) -> None:
        self._rows, self._sizes = rows, list(part_sizes)
        num_parts = len(self._sizes)
        self._a = like.new_zeros(num_parts, num_slots, max_rank, in_features)
        self._b = [like.new_zeros(num_slots, size, max_rank) for size in self._sizes]
        self._scales = torch.zeros(num_parts, num_slots, device=like.device)
        self._is_held = [False] * num_slots

    def pack(
        self,
        parts: Sequence[LoraWeights | None],
        memory: WeightMemory,  # noqa: ARG002 (the slots' tensors hold them)
    ) -> Sequence[LoraWeights | None] | None:
        return parts if any(parts) else None

    def install(self, slot: int, packed: Sequence[LoraWeights | None] | None) -> None:
        if self._is_held[slot]:
            self._a[:, slot] = 0
            for b in self._b:
                b[slot] = 0
        self._is_held[slot] = packed is not None
        for part, pair in enumerate(packed or ()):
            if pair is not None:
                rank = len(pair.a)
                self._a[part, slot, :rank] = pair.a
                self._b[part][slot, :, :rank] = pair.b
                self._scales[part, slot] = pair.scale

    def write(self, program: Program, y: Place | None, x: Buffer, product: Any = None) -> None:  # noqa: ARG002
        hidden = program.buffer("lora_hidden", 0)
        program.add("lora_shrink", h=hidden, x=x, pairs=self)
        program.add("lora_expand", y=y, h=hidden, pairs=self)

    def write_lookup(self, program: Program, y: Buffer) -> None:
        hidden = program.buffer("lora_hidden", 0)
        program.add("lora_lookup", h=hidden, pairs=self)
        program.add("lora_expand", y=y, h=hidden, pairs=self)

    def shrink(self, x: Tensor) -> list[Tensor]:
        """x [num_rows, in_features] → A x of each part; nothing where no row has an adapter."""
        rows = self._rows.rows
        return [] if rows is None else [lora_shrink(x, rows, a) for a in self._a]

    def look_up(self, token_ids: Tensor) -> list[Tensor]:
        """The same of a table's rows."""
        rows = self._rows.rows
        return [] if rows is None else [self._a[0, rows.slots, :, token_ids[rows.order]]]

    def expand(self, y: Tensor, hidden: list[Tensor]) -> None:
        """y [num_rows, out_features] += scale · B h, part beside part"""
        rows = self._rows.rows
        if rows is None:
            return
        parts = torch.split(y, self._sizes, dim=1)
        for columns, h, b, scales in zip(parts, hidden, self._b, self._scales, strict=True):
            lora_expand(columns, h, rows, b, scales)


class CpuRows(StepRows):
    """Which rows of a step have adapters, as a record that the operations of a program read."""

    def __init__(self, num_slots: int, library: CpuLibrary) -> None:
        super().__init__(num_slots)
        self.structure = library.structure("lora_rows")

    def set(self, rows: LoraRows | None) -> None:
        super().set(rows)  # keeps the memory alive
        self.structure.num_groups = 0 if rows is None else len(rows.groups)
        if rows is not None:
            self.structure.order = rows.order.data_ptr()
            self.structure.groups = rows.groups.data_ptr()


class CpuAdapters(LayerAdapters):
    """The updates of one layer in a program; a slot points to the matrices of its adapter."""

    def __init__(
        self,
        part_sizes: Sequence[int],
        in_features: int,
        *,
        num_slots: int,
        max_rank: int,
        rows: CpuRows,
        is_table: bool = False,
    ) -> None:
        self._sizes = torch.tensor(part_sizes)
        self._in_features, self._max_rank, self._rows = in_features, padded_rank(max_rank), rows
        self._is_table = is_table
        self._pairs = table_of_pairs(num_slots, len(part_sizes))

    def pack(
        self, parts: Sequence[LoraWeights | None], memory: WeightMemory
    ) -> Sequence[PackedPair | None] | None:
        if not any(parts):
            return None
        return [
            None
            if part is None
            else pack_pair(part.a, part.b, part.scale, memory=memory, is_lookup=self._is_table)
            for part in parts
        ]

    def install(self, slot: int, packed: Sequence[PackedPair | None] | None) -> None:
        for part in range(len(self._sizes)):
            set_pair(self._pairs, slot, part, None if packed is None else packed[part])

    def write(
        self, program: Program, y: Place | None, x: Buffer, product: Structure | None = None
    ) -> None:
        num_chunks = -(-self._in_features // CHUNK)
        hidden = self._hidden(program, num_chunks)
        program.add(
            "lora_shrink", h=hidden, x=x, pairs=self._pairs, rows=self._rows.structure,
            in_features=self._in_features, num_parts=len(self._sizes), max_rank=self._max_rank,
        )  # fmt: skip
        self._write_expand(program, y, hidden, num_chunks, product)

    def write_lookup(self, program: Program, y: Buffer) -> None:
        hidden = self._hidden(program, 1)
        program.add(
            "lora_lookup", h=hidden, pairs=self._pairs, rows=self._rows.structure,
            max_rank=self._max_rank,
        )  # fmt: skip
        self._write_expand(program, y, hidden, 1, None)

    def _hidden(self, program: Program, num_chunks: int) -> Buffer:
        size = len(self._sizes) * num_chunks * self._max_rank
        return program.buffer("lora_hidden", size, torch.float32)

    def _write_expand(
        self,
        program: Program,
        y: Place | None,
        hidden: Buffer,
        num_chunks: int,
        product: Structure | None,
    ) -> None:
        program.add(
            "lora_expand", y=y, h=hidden, pairs=self._pairs, rows=self._rows.structure,
            product=product, part_sizes=self._sizes, num_parts=len(self._sizes),
            num_chunks=num_chunks, max_rank=self._max_rank, stride=int(self._sizes.sum()),
        )  # fmt: skip
