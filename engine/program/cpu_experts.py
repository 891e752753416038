"""The experts' matrices as the CPU's kernels read them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.experts import ExpertMatrices
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.program.cpu_matrices import write_rounding
from penstock.engine.program.operands import SlotBuffers
from penstock.kernels.cache_folder import NoCacheError, cache_dir
from penstock.kernels.cpu.library import CpuLibrary, Product
from penstock.kernels.cpu.quantized import PackedCodes, can_pack
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.program import Buffer, Program
from penstock.kernels.quantized_codes import QuantizedCodes

_log = logging.getLogger(__name__)
# Left free beside the experts: for KV, whose pages are not in use yet, and for a layer's codes
# before they are packed.
_RESERVED_BYTES = 3 << 30


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
