"""Muon for the matrices, AdamW for the rest, and the learning-rate schedule.

Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
MOMENTUM = 0.95
WARM_UP_STEPS = 40
LATER_SCALE = 0.35
FALL_BEGINS = 0.6  # of all steps


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices [count, rows, columns] near one by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).float()
    return result


class Muon:
    """Momentum whose update is orthogonalised; matrices of one shape are updated together."""

    def __init__(self, matrices: list[nn.Parameter], *, rate: float) -> None:
        self.rate = rate
        self._groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            self._groups[matrix.shape].append(matrix)
        self.buffers = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all matrices at `scale` times the learning rate, and drop their gradients."""
        for shape, group in self._groups.items():
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer = self.buffers[shape].lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalise(gradients.lerp(buffer, MOMENTUM))
            size = self.rate * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, delta in zip(group, update, strict=True):
                matrix.sub_(delta, alpha=size)
                matrix.grad = None


class Optimiser:
    """Both optimisers, driven by one schedule: warm up, stay, then fall to zero in a line."""

    def __init__(
        self, network: nn.Module, *, num_steps: int, later_rounds: tuple[tuple[int, int], ...]
    ) -> None:
        parameters = dict(network.named_parameters())
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in parameters.items() if p.ndim < 2 or "embed" in name]
        self._muon = Muon(matrices, rate=0.02)
        self._adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self._num_steps = num_steps
        self._later_rounds = later_rounds  # each from after its first number to its second

    def state(self) -> dict[str, Any]:
        """Return the state needed to resume later."""
        return {"adam": self._adam.state_dict(), "muon": self._muon.buffers}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._adam.load_state_dict(state["adam"])
        self._muon.buffers = state["muon"]

    def scale(self, step: int) -> float:
        """Return the share of the full learning rate at a step."""
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        fall_begins = FALL_BEGINS * self._num_steps
        left = (self._num_steps - step) / (self._num_steps - fall_begins)
        for begin, end in reversed(self._later_rounds):
            if step > begin:  # short and low, with a fall to zero of its own
                return LATER_SCALE * (1 - (step - begin) / (end - begin))
        return min(warm, max(0.0, left))

    def step(self, step: int) -> None:
        """Apply and drop the gradients."""
        scale = self.scale(step)
        for group in self._adam.param_groups:
            group["lr"] = 3e-3 * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._muon.step(scale)
