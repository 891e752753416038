"""A model's layers as torch's operations read them: as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.layers.experts import ExpertMatrices, Router
from penstock.engine.layers.linear import Embedding, MatrixLayer
from penstock.engine.parallel.ranks import Ranks
from penstock.engine.program.operands import SlotBuffers, Table
from penstock.kernels.linear import linear
from penstock.kernels.program import Buffer, Place, Program


class Multiplies(Protocol):
    """What a product's record has as its weight: a layer, or what stands for one."""

    def multiply(self, x: Tensor) -> Tensor:
        """x [num_rows, in_features] → [num_rows, out_features]"""
        ...


class TorchMatrix:
    """
    Args:
        multiplies: in the layer's place; None: the layer does.
    """

    def __init__(self, layer: MatrixLayer, multiplies: Multiplies | None = None) -> None:
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.num_bytes = layer.num_bytes
        self._layer = layer if multiplies is None else multiplies

    def write(self, program: Program, y: Place | None, x: Buffer, **others: Any) -> Any:
        return program.add("linear", y=y, x=x, weight=self._layer, **others)

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        program.add("embed", y=y, weight=self._layer, **ids)


class TorchRouter:
    """The rows of routers, widened once."""

    def __init__(self, gates: Sequence[Router]) -> None:
        self._weight = torch.cat([each.weight.data for each in gates]).float()
        self._multiply = linear if gates[0].is_invariant else F.linear
        self.num_bytes = self._weight.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → logits float32 [num_tokens, out_features]"""
        return self._multiply(x.float(), self._weight)

    def write(self, program: Program, y: Buffer, x: Buffer) -> None:
        program.add("linear", y=y, x=x, weight=self)


class TorchExperts:
    """A matrix of each expert."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        self.in_features = matrices.in_features
        self.out_features = matrices.out_features // matrices.num_experts
        self._matrices = matrices

    @property
    def num_bytes(self) -> int:
        return self._matrices.num_bytes

    @property
    def expert_bytes(self) -> int:
        return self.num_bytes // self._matrices.num_experts

    def write(
        self, program: Program, y: Buffer, x: Buffer, slots: SlotBuffers, *, is_gathered: bool
    ) -> None:
        if not is_gathered:
            gathered = slots.buffer(program, "slot_inputs", self.in_features)
            slots.write_gather(program, gathered, x, 0)
            x = gathered
        program.add("experts_linear", y=y, x=x, weights=self._matrices, tiles=slots.tiles)


class TorchSums:
    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name
        self._part = Buffer(name, 0, torch.empty(0))

    def part(self, program: Program, size: int) -> Buffer:
        self._part = program.buffer(self._name, size)
        return self._part

    def parts(self) -> dict[str, Any]:
        return {"parts": self._part, "ranks": self._ranks}


class TorchLink:
    """
    Args:
        like: has the dtype and device of hidden states.
    """

    def __init__(self, ranks: Ranks, like: Tensor) -> None:
        self._ranks, self._like = ranks, like

    def write_receive(self, program: Program, y: Buffer) -> None:
        program.add("receive_rows", y=y, ranks=self, size=y.size)

    def write_send(self, program: Program, x: Buffer) -> None:
        program.add("send_rows", x=x, ranks=self, size=x.size)

    def receive(self, num_rows: int, size: int) -> Tensor:
        return self._ranks.receive(self._like.new_empty(num_rows, size))

    def send(self, x: Tensor) -> None:
        self._ranks.send(x)


class TorchGather:
    """
    Args:
        size: of the vocabulary.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._size = ranks, size

    def write(
        self, program: Program, y: Place | None, table: Table, x: Buffer, **rows: Any
    ) -> tuple[Any, Any]:
        part = program.buffer("part_of_logits", table.out_features)
        table.write(program, part, x, **rows)
        gather = program.add("gather_ranks", y=y, parts=part, ranks=self._ranks, size=self._size)
        return gather, gather


class TorchMeeting:
    """Where a program meets those of other ranks.

    Args:
        like: as in `TorchLink`.
        vocab_size: of the whole model.
        has_before, has_after: there are other stages.
    """

    def __init__(
        self, ranks: Ranks, like: Tensor, vocab_size: int, *, has_before: bool, has_after: bool
    ) -> None:
        self.sums = self.squares = self.gather = None
        link = TorchLink(ranks, like)
        self.before = link if has_before else None
        self.after = link if has_after else None
        layers = ranks.layers
        if layers.size > 1:
            self.sums, self.squares = (TorchSums(layers, each) for each in ("part", "squares"))
            self.gather = TorchGather(layers, vocab_size)


class TorchBackend:
    """The layers keep their matrices."""

    def __init__(self, meeting: TorchMeeting) -> None:
        self.meeting = meeting

    def pack(self, layer: MatrixLayer) -> TorchMatrix:
        return TorchMatrix(layer)

    def pack_table(self, layer: Embedding) -> TorchMatrix:
        return TorchMatrix(layer)

    pack_head = pack_table

    def pack_router(self, gates: Sequence[Router]) -> TorchRouter:
        return TorchRouter(gates)

    def pack_experts(self, matrices: ExpertMatrices) -> TorchExperts:
        return TorchExperts(matrices)
