"""Adapters in the program of a CPU: records after each product that they change."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure

import torch

from penstock.engine.lora.layer_adapters import LayerAdapters, LoraWeights, StepRows
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
from penstock.kernels.program import Buffer, Place, Program
from penstock.kernels.reference.lora import LoraRows


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
