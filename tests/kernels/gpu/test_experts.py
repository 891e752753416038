"""The products of experts against each expert's own; a row's bits depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.gpu.experts import config_for, experts_linear_triton
from penstock.kernels.gpu.quantized import pack_codes
from penstock.kernels.reference.experts import SlotGroups, experts_linear_reference, group_slots

from .tensors import DTYPES, normal, poisoned_memory
from .test_linear_quantized import matrix

NUM_EXPERTS = 6


def groups_of(counts: list[int], device: str) -> SlotGroups:
    """Of one-expert tokens, so many to each expert, in a random order."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))
    return group_slots(experts[order][:, None].to(device), len(counts))


def assert_near(found: Tensor, expected: Tensor) -> None:
    bound = 2 * torch.finfo(found.dtype).eps * expected.abs().max() + 2e-4
    assert (found.double() - expected.double()).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[0, 3, 0, 40, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6])
def test_dense_experts(device, counts, dtype):
    groups, out, size = groups_of(counts, device), 70, 72
    x = normal(sum(counts), size, seed=0, dtype=dtype, device=device)
    weight = normal(NUM_EXPERTS * out, size, seed=1, dtype=dtype, device=device)
    bias = normal(NUM_EXPERTS, out, seed=2, dtype=dtype, device=device)
    with poisoned_memory():
        found = experts_linear_triton(x, weight, groups, bias)

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return rows @ weight[expert * out : (expert + 1) * out].double().T + bias[expert].double()

    expected = experts_linear_reference(x.double(), groups, multiply, out)
    assert found.shape == expected.shape
    if sum(counts):
        assert_near(found, expected)


KINDS = [("zero", 4), ("offsets", 4), ("table", 4), ("zero", 8), ("float8", 8)]


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_quantized_experts(device, kind, bits):
    counts, out, size = [0, 3, 0, 40, 1, 0], 40, 160
    groups = groups_of(counts, device)
    x = normal(sum(counts), size, seed=0, dtype=torch.float16, device=device)
    whole = matrix(kind, NUM_EXPERTS * out, size, bits=bits, block=32, device=device)
    numbers = whole.dequantize().double()
    bias = normal(NUM_EXPERTS, out, seed=2, dtype=torch.float16, device=device)
    with poisoned_memory():
        found = experts_linear_triton(x, pack_codes(whole, x), groups, bias)

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return rows @ numbers[expert * out : (expert + 1) * out].T + bias[expert].double()

    expected = experts_linear_reference(x.double(), groups, multiply, out)
    assert (found.double() - expected).norm() <= 2e-3 * expected.norm()  # weights in float16


def test_a_row_does_not_depend_on_the_others(device):
    dtype, out, size = torch.float16, 33, 64
    count = config_for(dtype)["BLOCK_M"] + 5
    weight = normal(2 * out, size, seed=1, dtype=dtype, device=device)
    x = normal(2 * count, size, seed=0, dtype=dtype, device=device)
    together = experts_linear_triton(x, weight, groups_of([count, count], device))
    alone = experts_linear_triton(x[-1:], weight, groups_of([0, 1], device))
    assert torch.equal(alone[0], together[-1])
