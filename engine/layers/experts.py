"""An MLP of many experts, of which each token uses a few: the router, the experts' matrices, and an
expert that all tokens share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.layers.linear import MatrixLayer, constant
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.weights.matrix import DenseMatrix, Matrix
from penstock.kernels.experts import SlotGroups, experts_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """
    Attributes:
        intermediate_size: of each expert.
        shared_size: intermediate size of the expert that all tokens share; 0: there is none.
        is_normalized: the weights of a token's experts sum to 1; otherwise they are their shares
            among all experts.
        layers: for each layer, whether its MLP has experts.
        has_bias: experts and router have biases.
        swiglu: alpha and limit of a clamped SwiGLU; None: SwiGLU.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0
    is_normalized: bool = True
    layers: tuple[bool, ...]
    has_bias: bool = False
    swiglu: tuple[float, float] | None = None


class Router(MatrixLayer):
    """A few rows whose products decide: always dense, and multiplied in float32."""

    is_quantizable = False

    def __init__(self, out_features: int, in_features: int, *, has_bias: bool = False) -> None:
        super().__init__(out_features, in_features)
        self.bias = constant(torch.empty(out_features)) if has_bias else None

    def set_matrix(
        self, matrix: Matrix, *, rounds_inputs: bool = True, like: Tensor | None = None
    ) -> None:
        values = matrix.dequantize().to(self.weight if like is None else like)
        super().set_matrix(DenseMatrix(values), rounds_inputs=rounds_inputs, like=like)


class ExpertMatrices(MatrixLayer):
    """A matrix of each expert, one below the other: [num_experts · sum(part_sizes), in_features].

    All experts at once, as they are read, may not fit into memory. So reading them can be left to
    whoever packs them, one layer after the other.

    Attributes:
        part_sizes: of one expert.
        read: holds the matrices; None: they are held.
        expected_bytes: of the matrices once they are read, about.
        bias: [num_experts, sum(part_sizes)], or None.
        orders: int64 [num_experts, in_features]: column j of an expert's matrix belongs to this
            input. None: to input j.
    """

    read: Callable[[], None] | None = None
    expected_bytes = 0
    orders: Tensor | None = None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        part_sizes: tuple[int, ...],
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__(num_experts * sum(part_sizes), in_features)
        self.num_experts, self.part_sizes = num_experts, part_sizes
        bias = torch.empty(num_experts, sum(part_sizes)) if has_bias else None
        self.bias = None if bias is None else constant(bias)
        self.weight = constant(torch.empty(0))  # most of a model, and perhaps soon codes

    def load(self) -> None:
        """Read the matrices now, if they are not held.

        Raises:
            ModelLoadError: names the tensor.
        """
        if self.read is not None:
            self.read()
            self.read = None

    def multiply(self, x: Tensor, groups: SlotGroups) -> Tensor:  # type: ignore[override]
        """In torch: x [num_slots, in_features] → [num_slots, sum(part_sizes)], in the order of the
        groups"""
        assert self.read is None, "the experts were not loaded"
        if self.orders is not None:
            experts = torch.bucketize(
                torch.arange(len(x), device=x.device), groups.ends, right=True
            )
            x = x.gather(1, self.orders[experts])
        matrix = self.quantized[0] if self.quantized else self.weight
        return experts_linear(x, matrix, groups, self.bias, in_bytes=self.rounds_inputs)


class Experts(nn.Module):
    """The MLPs of all experts."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        num_experts, size, has_bias = config.num_experts, config.intermediate_size, config.has_bias
        self.swiglu = config.swiglu
        self.gate_up_proj = ExpertMatrices(
            num_experts, hidden_size, (size, size), has_bias=has_bias
        )
        self.down_proj = ExpertMatrices(num_experts, size, (hidden_size,), has_bias=has_bias)


class MixtureOfExperts(nn.Module):
    """
    Args:
        shared_expert: an MLP that every token passes, if `shared_size`; its output is multiplied by
            a sigmoid of one more product.
    """

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, shared_expert: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config.num_experts, hidden_size, has_bias=config.has_bias)
        self.experts = Experts(config, hidden_size)
        self.shared_expert = shared_expert
        self.shared_expert_gate = None if shared_expert is None else Router(1, hidden_size)
        self.ranks: Ranks = ALONE  # each has a part of every expert
