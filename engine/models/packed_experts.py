"""A mixture of experts as the CPU kernels read it, and its part of the program."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.experts import ExpertMatrices, MixtureOfExperts
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.models.packed_linear import CpuLinear, RankSums, write_rounding
from penstock.kernels.cpu.build import BuildError, cache_dir
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.program import Buffer, Place, Program
from penstock.kernels.cpu.quantized import PackedCodes, can_pack
from penstock.kernels.cpu.weight_memory import WeightMemory
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
    except BuildError as error:
        raise ModelLoadError(f"the experts are more than memory holds: {error}") from error
    _log.warning(
        "the experts take %s bytes, and memory has %s free: they are read from a file in %s",
        f"{num_bytes:,}", f"{free:,}", folder,
    )  # fmt: skip
    return WeightMemory(folder)


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """What the operations before the products leave: see `group_slots_args`. A buffer's row has
    room for all slots of a token.

    Attributes:
        num_slots, num_tiles: the two numbers of `counts`.
    """

    slots: Buffer
    places: Buffer
    tiles: Buffer
    counts: Buffer
    experts_per_token: int

    @classmethod
    def of(cls, program: Program, experts_per_token: int) -> SlotBuffers:
        def ints(name: str, size: int, dtype: torch.dtype = torch.int32) -> Buffer:
            return program.buffer(name, size, dtype)

        return cls(
            slots=ints("slots", experts_per_token),
            places=ints("slot_places", experts_per_token),
            tiles=ints("expert_tiles", 3 * experts_per_token),
            counts=ints("slot_counts", 2, torch.int64),
            experts_per_token=experts_per_token,
        )

    @property
    def num_slots(self) -> Place:
        return self.counts

    @property
    def num_tiles(self) -> Place:
        return self.counts.columns(1)

    def buffer(
        self, program: Program, name: str, size: int, dtype: torch.dtype | None = None
    ) -> Buffer:
        """Room for `size` values of each slot."""
        return program.buffer(name, size * self.experts_per_token, dtype)

    def write_gather(self, program: Program, y: Buffer, x: Buffer, row_bytes: int) -> None:
        """Add y[i] = x of the i-th sorted slot's token."""
        program.add(
            "gather_slots", y=y, x=x, slots=self.slots, num_slots=self.num_slots,
            row_bytes=row_bytes, experts_per_token=self.experts_per_token,
        )  # fmt: skip


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
        """Add y = x · the matrix of each row's expert.

        Args:
            x: its rows are the sorted slots' (is_gathered) or the tokens'.
        """
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


class WritesMLP(Protocol):
    """A packed MLP: `PackedMLP` of `cpu_decoder`."""

    @property
    def linears(self) -> tuple[CpuLinear, ...]: ...

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None) -> None: ...


class PackedMixture:
    """The matrices of `MixtureOfExperts`, and its part of the program.

    Args:
        shared_expert: the packed expert that all tokens share.
        memory: for the experts' matrices.
        sums: over the ranks that have the other parts of each expert, if there are some.

    Attributes:
        num_bytes: of all its matrices.
        num_active_weights, num_active_bytes: of those that one token needs.
    """

    def __init__(
        self,
        library: CpuLibrary,
        mixture: MixtureOfExperts,
        shared_expert: WritesMLP | None,
        memory: WeightMemory,
        sums: RankSums | None = None,
    ) -> None:
        self._config = config = mixture.config
        self._sums = sums
        gates = [mixture.gate.weight.data]
        if mixture.shared_expert_gate is not None:
            gates.append(mixture.shared_expert_gate.weight.data)
        self._num_logits, self._router_bias = sum(map(len, gates)), mixture.gate.bias
        self._router = library.pack(torch.cat(gates))  # one product gives both
        try:
            with library.packing_into(memory):
                self._gate_up_proj = PackedExperts(library, mixture.experts.gate_up_proj)
                self._down_proj = PackedExperts(library, mixture.experts.down_proj)
        except OSError as error:
            raise ModelLoadError(f"the experts are more than memory holds: {error}") from error
        self._shared_expert = shared_expert
        of_experts = (self._gate_up_proj, self._down_proj)
        shared = () if shared_expert is None else shared_expert.linears
        common = self._router.nbytes + sum(each.num_bytes for each in shared)
        self.num_bytes = common + sum(each.num_bytes for each in of_experts)
        self.num_active_bytes = common + config.experts_per_token * sum(
            each.expert_bytes for each in of_experts
        )
        self.num_active_weights = sum(
            each.in_features * each.out_features for each in shared
        ) + config.experts_per_token * sum(
            each.in_features * each.out_features for each in of_experts
        )

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None) -> None:
        """y = the experts' sum of x (+ residual)"""
        config, num_logits = self._config, self._num_logits
        count = config.experts_per_token
        slots = SlotBuffers.of(program, count)
        logits = program.buffer("router_logits", num_logits, torch.float32)
        experts = program.buffer("token_experts", count, torch.int32)
        weights = program.buffer("expert_weights", count, torch.float32)
        numbers = {"num_experts": config.num_experts, "experts_per_token": count}
        program.add(
            "linear", y=logits, x=x, weight=self._router, in_features=x.size,
            out_features=num_logits, is_float=1,
        )  # fmt: skip
        program.add(
            "route", experts=experts, weights=weights, logits=logits, stride=num_logits,
            is_normalized=config.is_normalized, bias=self._router_bias, **numbers,
        )  # fmt: skip
        program.add(
            "group_slots", slots=slots.slots, places=slots.places, tiles=slots.tiles,
            counts=slots.counts, experts=experts, **numbers,
        )  # fmt: skip
        size = self._down_proj.in_features
        gate_up = slots.buffer(program, "slot_gate_up", 2 * size)
        gated = slots.buffer(program, "slot_gated", size)
        output = slots.buffer(program, "slot_outputs", y.size)
        self._gate_up_proj.write(program, gate_up, x, slots, is_gathered=False)
        halves: dict[str, Any] = {"y": gated, "x": gate_up, "size": size}
        if config.swiglu is None:
            program.add("silu_mul", num_rows=slots.num_slots, **halves)
        else:
            alpha, limit = config.swiglu
            program.add(
                "clamped_swiglu", num_rows=slots.num_slots, alpha=alpha, limit=limit, **halves
            )
        self._down_proj.write(program, output, gated, slots, is_gathered=True)
        shared: dict[str, Any] = {}
        if self._shared_expert is not None:
            shared_output = program.buffer("shared_output", y.size)
            self._shared_expert.write(program, shared_output, x, residual=None)
            gate = logits.columns(config.num_experts)
            shared = {"shared": shared_output, "shared_logits": gate, "stride": num_logits}
        combined: dict[str, Any] = {"y": y, "residual": residual}
        if self._sums is not None:
            combined = {"y": self._sums.part(y.size)}
        program.add(
            "combine_slots", x=output, places=slots.places, weights=weights, size=y.size,
            experts_per_token=count, **combined, **shared,
        )  # fmt: skip
        if self._sums is not None:
            self._sums.write(program, y, y.size, residual)
