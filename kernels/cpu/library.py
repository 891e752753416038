"""The compiled kernels as Python calls them."""

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
LANES, MAX_HEAD_DIM = 16, 256  # as kernels.c has them
_DESCRIPTION_BYTES = 1 << 14  # enough for all threads that there can be
_DTYPES = {
    torch.float32: ("f32", ()),
    torch.float16: ("f16", ()),
    torch.bfloat16: ("b16", ("DTYPE_PAIRS",)),
}


class CpuLibrary:
    """The kernels for one dtype.

    Args:
        library: as compiled for that dtype.
        name: of the dtype in C.

    Attributes:
        num_threads: that kernels use, the caller's counted.
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
        """Let kernels use so many threads, the caller's counted; how many there are."""
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
            dtype: another than the library's, if it has the operation for that too.
            is_shared: as in `RecordedCalls.run`.
        """
        name = self._name if dtype is None else _DTYPES[dtype][0]
        call = _call(self._library, f"{operation}_{name}", args)
        self._library.pool_run(byref(call), 1, is_shared)
        self.settle()  # the arguments are the caller's

    def settle(self) -> None:
        """Wait until no thread reads what recorded calls point to."""
        self._library.pool_settle()

    @property
    def num_repeated(self) -> int:
        """Items done by another thread than the one that began them (see `pool.h`)."""
        return int(self._library.pool_num_repeated())

    @property
    def num_calls(self) -> int:
        """Calls begun so far, of all that ever ran: it grows as long as a run gets on."""
        return int(self._library.pool_num_calls())

    def describe_pool(self) -> str:
        """What the pool's threads share now, for the log of a run that does not end."""
        text = ctypes.create_string_buffer(_DESCRIPTION_BYTES)
        self._library.pool_describe(text, len(text))
        return text.value.decode()

    def record(self, calls: Sequence[tuple[str, Structure]]) -> RecordedCalls:
        """Operations with their arguments, to be run together as often as wanted."""
        return RecordedCalls(self._library, self._name, calls)


class RecordedCalls:
    """Calls that run one after the other, outside Python."""

    def __init__(self, library: CDLL, name: str, calls: Sequence[tuple[str, Structure]]) -> None:
        self._args = [args for _, args in calls]  # their memory is pointed to
        made = (_call(library, f"{operation}_{name}", args) for operation, args in calls)
        self._calls = (Call * len(calls))(*made)
        self._run = library.pool_run

    def run(self, *, is_shared: bool = True) -> None:
        """is_shared: whether the pool's threads share the work; for little of it waking them costs
        more than they do."""
        self._run(self._calls, len(self._calls), is_shared)


def _call(library: CDLL, function: str, args: Structure) -> Call:
    return Call(plan=ctypes.cast(library[function], ctypes.c_void_p), args=ctypes.addressof(args))


def load_library(dtype: torch.dtype) -> CpuLibrary | None:
    """The kernels for a dtype; None, and a line in the log, where they cannot be had."""
    try:
        isa = select_isa()
        name, defines = _DTYPES[dtype]
        library = CDLL(str(build_library(isa, (f"DTYPE={name}", *defines))))
    except (BuildError, OSError, ValueError) as error:
        _log.warning("no CPU kernels, torch computes instead, slower: %s", error)
        return None
    return CpuLibrary(library, dtype, name, isa.name)
