"""A program that torch and Triton run, a function for each record.

A buffer is whatever tensor was written to it last, and is dropped after the last record that reads
it. `y = … + residual` is only added when it is read: an RMS norm adds and normalises in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.cpu.build import read_source
from penstock.kernels.cpu.structures import read_structures
from penstock.kernels.program import Buffer, Columns, Program, Record
from penstock.kernels.torch_operations import OPERATIONS, Sum, TorchStep

# What a buffer holds: rows, or what only torch's operations understand (`SlotGroups`).
Value: TypeAlias = Any
Rows: TypeAlias = dict[str, Value]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """
    Attributes:
        constants: arguments that are no buffers.
        reads: arguments that are, and whether a `Sum` is given as it is.
        writes: places of the results, in the function's order.
        residual: is added to the one result.
        dropped: buffers that no later record reads.
    """

    run: Callable[..., Any]
    constants: dict[str, Any]
    reads: tuple[tuple[str, Any, bool], ...]
    writes: tuple[Buffer | Columns, ...]
    residual: Buffer | None
    dropped: tuple[str, ...]


class TorchProgram(Program):
    """
    Args:
        dtype: of rows.

    Attributes:
        num_run: records that were run so far.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._compiled: list[_Compiled] = []
        self.num_run = 0

    def add(self, operation: str, **arguments: Any) -> Record:
        declared = _declared()[f"{operation}_args"]
        for name in arguments:
            getattr(declared, name)  # as in C, none can be misspelt
        record = Record(operation, arguments)
        self.records.append(record)
        return record

    def compile(self, kept: Collection[Buffer] = ()) -> None:
        """Make the program ready to run.

        Args:
            kept: buffers that are wanted when it has run.
        """
        needed = {each.name for each in kept}
        compiled = []
        for record in reversed(self.records):
            found = OPERATIONS[record.operation]
            given = record.arguments
            reads = tuple(
                (name, given[name], name in found.takes_sums and isinstance(given[name], Buffer))
                for name in found.accepts
                if isinstance(given.get(name), Buffer | Columns)
            )
            writes = tuple(given[name] for name in found.writes)
            residual = given.get("residual")
            read = {_buffer(each).name for _, each, _ in reads}
            if residual is not None:
                read.add(residual.name)
            written = {_buffer(each).name for each in writes}
            dropped = tuple((read | written) - needed)
            whole = {each.name for each in writes if isinstance(each, Buffer)}
            needed = (needed - whole) | read
            constants = {
                name: given[name]
                for name in found.accepts
                if name in given and not isinstance(given[name], Buffer | Columns)
            }
            compiled.append(_Compiled(found.run, constants, reads, writes, residual, dropped))
        self._compiled = compiled[::-1]

    def run(self, step: TorchStep, rows: Rows, *, first: int = 0, end: int | None = None) -> None:
        """Run the records from `first` to before `end` (None: all that follow).

        Args:
            rows: what buffers hold, before and after.
        """
        for each in self._compiled[first:end]:
            given = {
                name: rows[place.name] if takes_sums else read(rows, place)
                for name, place, takes_sums in each.reads
            }
            result = each.run(step, **each.constants, **given)
            if len(each.writes) == 1:
                (place,) = each.writes
                if each.residual is not None:
                    result = Sum(result, read(rows, each.residual))
                _write(rows, place, result)
            else:
                for place, value in zip(each.writes, result or (), strict=True):
                    _write(rows, place, value)
            for name in each.dropped:
                rows.pop(name, None)
            self.num_run += 1

    def numbers_of(self, operation: str) -> list[int]:
        """The numbers of the records with this operation."""
        return [number for number, each in enumerate(self.records) if each.operation == operation]


class PoolProgram:
    """A program that is written again when the KV pool is another one.

    Args:
        write: adds all records for a pool; returns the buffers that are wanted when it has run.
    """

    def __init__(
        self, dtype: torch.dtype, write: Callable[[TorchProgram, Tensor], Sequence[Buffer]]
    ) -> None:
        self._dtype, self._write = dtype, write
        self._program = TorchProgram(dtype)
        self._written_for: tuple[object, ...] = ()
        self._num_run = 0

    def of(self, kv_pool: Tensor) -> TorchProgram:
        """The program for this pool."""
        # A pool of another shape may begin at the same address; an empty one has none.
        pool = (kv_pool.data_ptr(), kv_pool.shape)
        if pool != self._written_for:
            self._num_run = self.num_run
            self._program = TorchProgram(self._dtype)
            self._program.compile(self._write(self._program, kv_pool))
            self._written_for = pool
        return self._program

    @property
    def num_run(self) -> int:
        """Records that were run so far, for whatever pool."""
        return self._num_run + self._program.num_run


def read(rows: Rows, place: Buffer | Columns) -> Value:
    """What a place holds, its sum added."""
    value = rows[_buffer(place).name]
    if isinstance(value, Sum):
        value = value.value()
    return value if isinstance(place, Buffer) else value[:, place.start :]


def _write(rows: Rows, place: Buffer | Columns, value: Value) -> None:
    if isinstance(place, Buffer):
        rows[place.name] = value
        return
    buffer = place.buffer
    if buffer.name not in rows:
        rows[buffer.name] = value.new_empty(len(value), buffer.size)
    rows[buffer.name][:, place.start : place.start + value.shape[1]] = value


def _buffer(place: Buffer | Columns) -> Buffer:
    return place if isinstance(place, Buffer) else place.buffer


@functools.cache
def _declared() -> dict[str, Any]:
    return dict(read_structures(read_source("ops.h")))
