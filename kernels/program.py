"""A program: a list of records, and the buffers between them. What a model computes is written once
as such a list; an interpreter runs it.

    writer ──► records ──┬─► kernels.cpu.program      one call of C for a whole step
                         └─► kernels.torch_program    a function of torch or Triton for each record

A record is an operation's name and its arguments, which `cpu/ops.h` declares. To add an operation,
declare it there, write its function in C and in `torch_operations`, and add records by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(slots=True)
class Buffer:
    """A row for each token of a step, which operations write and read.

    Attributes:
        size: number of values in a row.
        rows: [num_rows, size], where it has a place of its own in memory.
    """

    name: str
    size: int
    rows: Tensor

    def __str__(self) -> str:
        return self.name

    def columns(self, start: int) -> Columns:
        return Columns(self, start)

    @property
    def address(self) -> int:
        return self.rows.data_ptr()


@dataclass(frozen=True, slots=True)
class Columns:
    """A buffer's rows from a column on."""

    buffer: Buffer
    start: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:]"

    def columns(self, start: int) -> Columns:
        return Columns(self.buffer, self.start + start)

    @property
    def address(self) -> int:
        return self.buffer.address + self.start * self.buffer.rows.itemsize


Place: TypeAlias = Buffer | Columns


@dataclass(frozen=True, slots=True)
class Record:
    """An operation and its arguments.

    Attributes:
        args: their structure in C, if C runs them.
    """

    operation: str
    arguments: dict[str, Any]
    args: Any = None

    def __str__(self) -> str:
        def describe(value: Any) -> str:
            if isinstance(value, Tensor):
                return str(list(value.shape))
            is_plain = value is None or isinstance(value, int | float | Buffer | Columns)
            return str(value) if is_plain else type(value).__name__

        arguments = (f"{name}={describe(value)}" for name, value in self.arguments.items())
        return f"{self.operation}({', '.join(arguments)})"


class Program(ABC):
    """Records in the order in which they run.

    Args:
        dtype: of buffers, unless they say another one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.records: list[Record] = []
        self._buffers: dict[str, Buffer] = {}

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))

    def __len__(self) -> int:
        """The number of records."""
        return len(self.records)

    def buffer(self, name: str, size: int, dtype: torch.dtype | None = None) -> Buffer:
        """The buffer of this name, made at the first call, with at least `size` values in a row."""
        rows = torch.empty(0, dtype=dtype or self.dtype)
        buffer = self._buffers.setdefault(name, Buffer(name, size, rows))
        assert buffer.rows.dtype == rows.dtype, f"{name}: {buffer.rows.dtype}, {rows.dtype}"
        buffer.size = max(buffer.size, size)
        return buffer

    @abstractmethod
    def add(self, operation: str, **arguments: Any) -> Any:
        """Append a record.

        Returns:
            What may be changed of its arguments from step to step.

        Raises:
            KeyError: `ops.h` does not declare the operation.
            AttributeError, TypeError: it has no such argument, or one of another type.
        """
