"""Python interface of the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import CDLL, Structure, byref

import torch
from torch import Tensor

from penstock.kernels.cpu.build import BuildError, build_library
from penstock.kernels.cpu.isa import select_isa
from penstock.kernels.cpu.structures import Call
from penstock.kernels.cpu.weight_memory import WeightMemory

_log = logging.getLogger(__name__)
LANES, MAX_HEAD_DIM = 16, 256  # as in kernels.c
_DESCRIPTION_BYTES = 1 << 14  # enough for the maximum number of threads
_DTYPES = {
    torch.float32: ("f32", ()),
    torch.float16: ("f16", ()),
    torch.bfloat16: ("b16", ("DTYPE_PAIRS",)),
}


class CpuLibrary:
    """The kernels for one dtype.

    Args:
        library: compiled for that dtype.
        name: of the dtype in C.

    Attributes:
        num_threads: used by kernels, including the caller's.
        memory: for packed weights.
    """

    def __init__(self, library: CDLL, dtype: torch.dtype, name: str, isa: str) -> None:
        self.dtype = dtype
        self.isa = isa
        self._library = library
        self.num_threads = 1
        self._name = name
        self.memory = WeightMemory()
        library.pool_run.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
        library.pool_run.restype = library.pool_settle.restype = None
        library.pool_num_repeated.restype = library.pool_num_calls.restype = ctypes.c_long
        library.pool_describe.argtypes = (ctypes.c_char_p, ctypes.c_long)
        library.pool_describe.restype = None

    def start_threads(self, num_threads: int) -> int:
        """Start threads, so that kernels use `num_threads`, including the caller's; the number
        that there are."""
        self.num_threads = int(self._library.pool_start(num_threads))
        return self.num_threads

    def pack(self, weight: Tensor) -> Tensor:
        """weight [out_features, in_features] in the layout of `linear.inc.c`; one dimension."""
        out_features, in_features = weight.shape
        weight = weight.contiguous()
        num_values = -(-out_features // LANES) * LANES * in_features
        packed = self.memory.allocate(num_values * self.dtype.itemsize).view(self.dtype)
        self._library[f"pack_{self._name}"](
            ctypes.c_void_p(packed.data_ptr()),
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int64(in_features),
            ctypes.c_int64(out_features),
        )
        return packed

    def run(
        self,
        operation: str,
        args: Structure,
        *,
        dtype: torch.dtype | None = None,
        is_shared: bool = True,
    ) -> None:
        """Run one operation now.

        Args:
            dtype: if not the library's own; the library must have the operation for it.
            is_shared: as in `RecordedCalls.run`.
        """
        name = self._name if dtype is None else _DTYPES[dtype][0]
        call = _call(self._library, f"{operation}_{name}", args)
        self._library.pool_run(byref(call), 1, is_shared)
        self.settle()  # the caller may free the arguments

    def settle(self) -> None:
        """Wait until no thread reads memory that recorded calls point to."""
        self._library.pool_settle()

    @property
    def num_repeated(self) -> int:
        """Items finished by another thread than the one that started them (see `pool.h`)."""
        return int(self._library.pool_num_repeated())

    @property
    def num_calls(self) -> int:
        """Calls started so far in all runs; grows while a run makes progress."""
        return int(self._library.pool_num_calls())

    def describe_pool(self) -> str:
        """The state shared by the pool's threads, for the log when a run hangs."""
        text = ctypes.create_string_buffer(_DESCRIPTION_BYTES)
        self._library.pool_describe(text, len(text))
        return text.value.decode()

    def record(self, calls: Sequence[tuple[str, Structure]]) -> RecordedCalls:
        """Record operations with their arguments, to be run together repeatedly."""
        return RecordedCalls(self._library, self._name, calls)


class RecordedCalls:
    """Calls that run one after the other, outside Python."""

    def __init__(self, library: CDLL, name: str, calls: Sequence[tuple[str, Structure]]) -> None:
        self._args = [args for _, args in calls]  # keeps the memory alive
        made = (_call(library, f"{operation}_{name}", args) for operation, args in calls)
        self._calls = (Call * len(calls))(*made)
        self._run = library.pool_run

    def run(self, *, is_shared: bool = True) -> None:
        """is_shared: whether the pool's threads share the work; for little work, waking them costs
        more than it gains."""
        self._run(self._calls, len(self._calls), is_shared)


def _call(library: CDLL, function: str, args: Structure) -> Call:
    return Call(plan=ctypes.cast(library[function], ctypes.c_void_p), args=ctypes.addressof(args))


def load_library(dtype: torch.dtype) -> CpuLibrary | None:
    """The kernels for a dtype; None, with a warning in the log, if they cannot be built."""
    try:
        isa = select_isa()
        name, defines = _DTYPES[dtype]
        library = CDLL(str(build_library(isa, (f"DTYPE={name}", *defines))))
    except (BuildError, OSError, ValueError) as error:
        _log.warning("no CPU kernels, torch computes instead, slower: %s", error)
        return None
    return CpuLibrary(library, dtype, name, isa.name)
