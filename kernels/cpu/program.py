"""A program that runs in C: recorded once, and run with no Python between the operations."""

from __future__ import annotations

from ctypes import Structure, byref, sizeof
from typing import Any

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import Call, plain
from penstock.kernels.program import Buffer, Columns, Program, Record


class CpuProgram(Program):
    """
    Args:
        step: of another program, to share its inputs.

    Attributes:
        step: `struct step`, which all operations share: the inputs that change from step to step.
    """

    def __init__(self, library: CpuLibrary, step: Structure | None = None) -> None:
        super().__init__(library.dtype)
        self.step = library.structure("step") if step is None else step
        self._library = library
        self._calls = (Call * 0)()
        self._run = library.run_calls

    def add(self, operation: str, **arguments: Any) -> Structure:
        """Append a record; `step` and `num_rows`, unless given, are those of the step.

        Returns:
            Its arguments in C, for those that change from step to step.
        """
        args = self._library.structure(f"{operation}_args")
        for name in ("step", "num_rows"):
            if hasattr(type(args), name):
                arguments.setdefault(name, self.step)  # whose first member is num_tokens
        for name, value in arguments.items():
            setattr(args, name, None if isinstance(value, Buffer | Columns) else plain(value))
        self.records.append(Record(operation, arguments, args))
        return args

    def record(self, num_rows: int = 0) -> None:
        """Make the program ready to run.

        Args:
            num_rows: for how many tokens the buffers have room.
        """
        for buffer in self._buffers.values():
            buffer.rows = buffer.rows.new_empty(num_rows, buffer.size)
        for record in self.records:
            for name, value in record.arguments.items():
                if isinstance(value, Buffer | Columns):
                    setattr(record.args, name, value.address)
        calls = [self._library.call(each.operation, each.args) for each in self.records]
        self._calls = (Call * len(calls))(*calls)

    def run(self, *, is_shared: bool = True) -> None:
        """is_shared: whether the pool's threads share the work; for little work, waking them costs
        more than it gains."""
        self._run(self._calls, len(self._calls), is_shared)

    def run_part(self, first: int, end: int, *, is_shared: bool = True) -> None:
        """Run the operations from `first` to before `end`."""
        self._run(byref(self._calls, first * sizeof(Call)), end - first, is_shared)
