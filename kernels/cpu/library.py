"""Python interface of the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import CDLL, Structure, byref
from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.kernels.cpu.build import (
    BuildError,
    build_library,
    read_source,
    shipped_library,
)
from penstock.kernels.cpu.isa import select_isa
from penstock.kernels.cpu.structures import Argument, Call, plain, read_structures
from penstock.kernels.cpu.weight_memory import WeightMemory

_log = logging.getLogger(__name__)
LANES, MAX_HEAD_DIM = 16, 256  # as in kernels.c
# Of rows by dense weights; by quantized ones, of rows that are rounded to bytes or exact.
Product = Literal["dense", "bytes", "exact"]
PRODUCTS: tuple[Product, ...] = get_args(Product)  # in the order of `verify_rows` in kernels.c
_DESCRIPTION_BYTES = 1 << 14  # enough for the maximum number of threads
# The dtypes' names in C, and what their kernels are compiled with besides.
_DTYPES: dict[torch.dtype, tuple[str, tuple[str, ...]]] = {
    torch.float32: ("f32", ()),
    torch.float16: ("f16", ()),
    torch.bfloat16: ("b16", ("DTYPE_PAIRS",)),
}


def pair_of(dtype: torch.dtype) -> int:
    """How many numbers lie side by side in the cache and in packed weights."""
    return 2 if dtype == torch.bfloat16 else 1


def unpack_keys(keys: Tensor, pair: int) -> Tensor:
    """Blocks of keys [num_blocks, block_size, num_kv_heads, head_dim] whose numbers have the order
    of attention.inc.c, in that of their dimensions."""
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    packed = keys.view(num_blocks, num_kv_heads, head_dim // pair, block_size, pair)
    return packed.permute(0, 3, 1, 2, 4).reshape(keys.shape)


def unpack_values(values: Tensor, pair: int) -> Tensor:
    """Blocks of values [num_blocks, block_size, num_kv_heads, head_dim] whose numbers have the
    order of attention.inc.c, in that of their dimensions."""
    num_blocks, block_size, num_kv_heads, head_dim = values.shape
    packed = values.view(num_blocks, num_kv_heads, block_size // pair, head_dim, pair)
    return packed.permute(0, 2, 4, 1, 3).reshape(values.shape)


class CpuLibrary:
    """The kernels for one dtype.

    Args:
        library: compiled for that dtype.
        name: of the dtype in C.
        variant: of the library's kernels, where it was shipped with several.

    Attributes:
        num_threads: used by kernels, including the caller's.
        group_lanes: columns of a group of quantized weights.
        memory: for packed weights.
        run_calls: `pool_run` of `pool.h`.
    """

    def __init__(
        self, library: CDLL, dtype: torch.dtype, name: str, isa: str, variant: str | None = None
    ) -> None:
        self.dtype = dtype
        self.isa = isa
        self.run_calls = library.pool_run
        self._library = library
        self._structures = read_structures(read_source("ops.h"))
        self._plans: dict[str, int | None] = {}  # addresses of functions that were looked up
        self.num_threads = 1
        self._suffix = f"_{variant}" if variant else ""
        self._name = name + self._suffix
        self.group_lanes = ctypes.c_int64.in_dll(library, f"group_lanes_{self._name}").value
        rows = (ctypes.c_int64 * len(PRODUCTS)).in_dll(library, f"verify_rows_{self._name}")
        self._verify_rows: dict[Product, int] = dict(zip(PRODUCTS, rows, strict=True))
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

    def num_verify_rows(self, products: Collection[Product]) -> int:
        """How many rows of a model with such products take little more time than one."""
        return min(self._verify_rows[each] for each in products or PRODUCTS)

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

    @contextmanager
    def packing_into(self, memory: WeightMemory) -> Iterator[None]:
        """What is packed meanwhile lies in this memory."""
        own, self.memory = self.memory, memory
        try:
            yield
        finally:
            self.memory = own

    def structure(self, name: str, **members: Argument) -> Structure:
        """A structure of `ops.h`, to be kept, as what its members point to, until it is used.

        Raises:
            KeyError: there is none of this name.
            AttributeError, TypeError: it has no such member, or one of another type.
        """
        plain_members = {member: plain(value) for member, value in members.items()}
        return self._structures[name](**plain_members)

    def call(self, operation: str, args: Structure, dtype: torch.dtype | None = None) -> Call:
        """The call of an operation; args: its structure, to be kept by the caller."""
        name = self._name if dtype is None else _DTYPES[dtype][0] + self._suffix
        function = f"{operation}_{name}"
        if function not in self._plans:
            self._plans[function] = ctypes.cast(self._library[function], ctypes.c_void_p).value
        return Call(plan=self._plans[function], args=ctypes.addressof(args))

    def run(
        self,
        operation: str,
        *,
        dtype: torch.dtype | None = None,
        is_shared: bool = True,
        **arguments: Argument,
    ) -> None:
        """Run one operation now.

        Args:
            dtype: if not the library's own; the library must have the operation for it.
            is_shared: as in `Program.run`.
            arguments: the members of its structure in `ops.h`; those left out are zero.
        """
        args = self.structure(f"{operation}_args", **arguments)
        self.run_calls(byref(self.call(operation, args, dtype)), 1, is_shared)
        self.settle()  # the caller may free what the arguments point to

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


def load_library(dtype: torch.dtype) -> CpuLibrary | None:
    """The kernels for a dtype; None, with a warning in the log, if they cannot be built."""
    try:
        isa = select_isa()
        name, defines = _DTYPES[dtype]
        shipped = shipped_library(isa, name)
        if shipped:
            return CpuLibrary(CDLL(str(shipped[0])), dtype, name, isa.name, shipped[1])
        library = CDLL(str(build_library(isa, (f"DTYPE={name}", *defines))))
    except (BuildError, OSError, ValueError) as error:
        _log.warning("no CPU kernels, torch computes instead, slower: %s", error)
        return None
    return CpuLibrary(library, dtype, name, isa.name)
