"""What the records of a model point to: matrices, packed for whatever runs them.

A backend packs a layer's matrix to an operand, which adds the records of its products. What
adapters and other ranks add to a product is written here, once for all backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.engine.layers.experts import ExpertMatrices, Router
from penstock.engine.layers.linear import Embedding, Linear, MatrixLayer
from penstock.engine.lora.layer_adapters import LayerAdapters
from penstock.kernels.program import Buffer, Place, Program


class Operand(Protocol):
    """A matrix [out_features, in_features] and a bias."""

    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        ...

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        """Add y = x · matrix (+ bias).

        Args:
            y: None: to be set in the result.
            others: of the product: a residual, which is not y, to be added; num_rows.

        Returns:
            The arguments of the (last) product.
        """
        ...


class Lookup(Protocol):
    """A table of one vector per token."""

    @property
    def num_bytes(self) -> int: ...

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        """Add y[t] = the row of token t.

        Args:
            ids: `first_id` and `num_ids`, where the table does not have all.
        """
        ...


class Table(Operand, Lookup, Protocol):
    """A matrix that is one piece: the output head, and a table."""


class RouterOperand(Protocol):
    """A few rows whose products are float32."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, program: Program, y: Buffer, x: Buffer) -> None: ...


class ExpertsOperand(Protocol):
    """A matrix of each expert.

    Attributes:
        in_features, out_features, expert_bytes: of one expert.
    """

    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int: ...

    @property
    def expert_bytes(self) -> int: ...

    def write(
        self, program: Program, y: Buffer, x: Buffer, slots: SlotBuffers, *, is_gathered: bool
    ) -> None:
        """Add y = x · the matrix of each row's expert.

        Args:
            x: its rows are the sorted slots' (is_gathered) or the tokens'.
        """
        ...


class Sums(Protocol):
    """Sums over the ranks that have the other parts."""

    def part(self, program: Program, size: int) -> Buffer:
        """Where the next sum's records write this rank's part."""
        ...

    def parts(self) -> dict[str, Any]:
        """The arguments of a record that meets the other ranks, and reads all parts; the next one
        has another place."""
        ...


def write_sum(
    sums: Sums, program: Program, y: Place, size: int, residual: Place | None = None
) -> None:
    """Add y = the sum of all ranks' parts (+ residual)."""
    program.add("sum_ranks", y=y, residual=residual, size=size, **sums.parts())


class Link(Protocol):
    """From one stage to the next."""

    def write_receive(self, program: Program, y: Buffer) -> None:
        """Add y = what the stage before sent."""
        ...

    def write_send(self, program: Program, x: Buffer) -> None:
        """Add the sending of x, by the one rank of its stage that does."""
        ...


class LogitsGather(Protocol):
    """The logits of all ranks, of which each has a part of the vocabulary."""

    def write(
        self, program: Program, y: Place | None, table: Table, x: Buffer, **rows: Any
    ) -> tuple[Any, Any]:
        """Add this rank's logits, and then y = all; the arguments of both, and those in which `y`
        says where all are."""
        ...


class Meeting(Protocol):
    """Where a program meets those of other ranks.

    Attributes:
        sums: of products; None: nobody has other parts.
        squares: float32, of queries and keys.
        gather: None: this rank has all logits.
        before, after: None: this rank has no such link.
    """

    @property
    def sums(self) -> Sums | None: ...
    @property
    def squares(self) -> Sums | None: ...
    @property
    def gather(self) -> LogitsGather | None: ...
    @property
    def before(self) -> Link | None: ...
    @property
    def after(self) -> Link | None: ...


class Backend(Protocol):
    """Packs a model's layers for what runs their program; may take their matrices from them."""

    @property
    def meeting(self) -> Meeting: ...

    def pack(self, layer: MatrixLayer) -> Operand: ...

    def pack_head(self, layer: Embedding) -> Table: ...

    def pack_table(self, layer: Embedding) -> Lookup:
        """Of one that is no head."""
        ...

    def pack_router(self, gates: Sequence[Router]) -> RouterOperand: ...

    def pack_experts(self, matrices: ExpertMatrices) -> ExpertsOperand: ...


def pack_linear(backend: Backend, layer: Linear) -> Operand:
    """A layer with all that is added to its products."""
    operand: Operand = backend.pack(layer)
    if layer.adapters is not None:
        operand = AdaptedOperand(operand, layer.adapters)
    sums = backend.meeting.sums
    return operand if sums is None or layer.ranks.size == 1 else SummedOperand(operand, sums)


class AdaptedOperand:
    """A matrix whose rows' adapters add to its products."""

    def __init__(self, operand: Operand, adapters: LayerAdapters) -> None:
        self.out_features, self.in_features = operand.out_features, operand.in_features
        self._operand, self._adapters = operand, adapters

    @property
    def num_bytes(self) -> int:
        return self._operand.num_bytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        product = self._operand.write(program, y, x, **others)
        self._adapters.write(program, y, x)
        return product


class SummedOperand:
    """A matrix of which each rank has some columns."""

    def __init__(self, operand: Operand, sums: Sums) -> None:
        self.out_features, self.in_features = operand.out_features, operand.in_features
        self._operand, self._sums = operand, sums

    @property
    def num_bytes(self) -> int:
        return self._operand.num_bytes

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        assert y is not None, "the sum is not the product"
        residual: Place | None = others.pop("residual", None)
        part = self._sums.part(program, self.out_features)
        product = self._operand.write(program, part, x, **others)
        write_sum(self._sums, program, y, self.out_features, residual)
        return product


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """What the records before the experts' products leave: see `group_slots_args`. A buffer's row
    has room for all slots of a token.

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
