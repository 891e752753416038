"""A program: a list of operations and the buffers between them, recorded once and run in C.

Operations run one after the other, with no Python in between. To add one, declare its arguments in
`ops.h`, write its function in C, and add it to a program by name.
"""

from __future__ import annotations

from ctypes import Structure, byref, sizeof
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import Argument, Call, plain


@dataclass(slots=True)
class Buffer:
    """A row for each token of a step, which operations write and read.

    Attributes:
        size: number of values in a row.
        rows: [num_rows, size], once the program is recorded.
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
class _Record:
    """An operation and its arguments, which it keeps alive."""

    operation: str
    args: Structure
    arguments: dict[str, Argument | Place]

    def __str__(self) -> str:
        def describe(value: Argument | Place) -> str:
            if isinstance(value, Tensor):
                return str(list(value.shape))
            return type(value).__name__ if isinstance(value, Structure) else str(value)

        arguments = (f"{name}={describe(value)}" for name, value in self.arguments.items())
        return f"{self.operation}({', '.join(arguments)})"


class Program:
    """Operations in the order in which they run.

    Args:
        step: of another program, to share its inputs.

    Attributes:
        step: `struct step`, which all operations share: the inputs that change from step to step.
    """

    def __init__(self, library: CpuLibrary, step: Structure | None = None) -> None:
        self.step = library.structure("step") if step is None else step
        self._library = library
        self._records: list[_Record] = []
        self._buffers: dict[str, Buffer] = {}
        self._calls = (Call * 0)()
        self._run = library.run_calls

    def __str__(self) -> str:
        return "\n".join(map(str, self._records))

    def __len__(self) -> int:
        """The number of operations."""
        return len(self._records)

    def buffer(self, name: str, size: int, dtype: torch.dtype | None = None) -> Buffer:
        """The buffer of this name, made at the first call, with at least `size` values in a row.

        Args:
            dtype: if not the library's.
        """
        rows = torch.empty(0, dtype=dtype or self._library.dtype)
        buffer = self._buffers.setdefault(name, Buffer(name, size, rows))
        assert buffer.rows.dtype == rows.dtype, f"{name}: {buffer.rows.dtype}, {rows.dtype}"
        buffer.size = max(buffer.size, size)
        return buffer

    def add(self, operation: str, **arguments: Argument | Place) -> Structure:
        """Append an operation; `step` and `num_rows`, unless given, are those of the step.

        Returns:
            Its arguments in C, for those that change from step to step.

        Raises:
            KeyError: `ops.h` does not declare the operation.
            AttributeError, TypeError: it has no such argument, or one of another type.
        """
        args = self._library.structure(f"{operation}_args")
        for name in ("step", "num_rows"):
            if hasattr(type(args), name):
                arguments.setdefault(name, self.step)  # whose first member is num_tokens
        for name, value in arguments.items():
            setattr(args, name, None if isinstance(value, Place) else plain(value))
        self._records.append(_Record(operation, args, arguments))
        return args

    def record(self, num_rows: int = 0) -> None:
        """Make the program ready to run.

        Args:
            num_rows: for how many tokens the buffers have room.
        """
        for buffer in self._buffers.values():
            buffer.rows = buffer.rows.new_empty(num_rows, buffer.size)
        for record in self._records:
            for name, value in record.arguments.items():
                if isinstance(value, Place):
                    setattr(record.args, name, value.address)
        calls = [self._library.call(each.operation, each.args) for each in self._records]
        self._calls = (Call * len(calls))(*calls)

    def run(self, *, is_shared: bool = True) -> None:
        """is_shared: whether the pool's threads share the work; for little work, waking them costs
        more than it gains."""
        self._run(self._calls, len(self._calls), is_shared)

    def run_part(self, first: int, end: int, *, is_shared: bool = True) -> None:
        """Run the operations from `first` to before `end`."""
        self._run(byref(self._calls, first * sizeof(Call)), end - first, is_shared)
