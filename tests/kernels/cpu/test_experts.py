"""The operations of a mixture of experts: those of the reference, for each dtype and set of
instructions."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from penstock.engine.program.operands import SlotBuffers
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.cpu.quantized import PackedCodes
from penstock.kernels.reference.experts import (
    clamped_swiglu_reference,
    combine_slots_reference,
    experts_linear_reference,
    group_slots,
    route_reference,
)
from penstock.kernels.reference.linear_quantized import linear_quantized_reference

from .test_linear_quantized import ROUNDING, matrix

NAN = float("nan")
# Around 128 rows an expert, where tiles end; tokens of few and of all experts.
SHAPES = [(1, 4, 1), (7, 5, 5), (300, 3, 2), (40, 64, 4)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    bound = ROUNDING[found.dtype] * expected.abs().max().item()
    assert (found.float() - expected.float()).abs().max().item() <= bound


def route(
    library, logits: Tensor, count: int, *, is_normalized: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts and weights, of logits in a table that is one column wider."""
    num_rows, num_experts = logits.shape
    table = torch.cat([logits, torch.full((num_rows, 1), 1e9)], dim=1)
    experts = torch.full((num_rows, count), -1, dtype=torch.int32)
    weights = torch.full((num_rows, count), NAN)
    library.run(
        "route", experts=experts, weights=weights, logits=table,
        num_rows=ctypes.c_int64(num_rows), num_experts=num_experts, experts_per_token=count,
        stride=num_experts + 1, is_normalized=is_normalized, bias=bias,
    )  # fmt: skip
    return experts, weights


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_route(library, shape, is_normalized):
    num_tokens, num_experts, count = shape
    logits = random(num_tokens, num_experts)
    logits[num_tokens // 2] = logits[num_tokens // 2].round()  # equal ones
    logits[-1] = 0.0
    experts, weights = route(library, logits, count, is_normalized=is_normalized)
    expected, expected_weights = route_reference(logits, count, is_normalized=is_normalized)
    assert experts.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights)


def test_a_bias_moves_tokens_to_other_experts(library):
    logits, bias = random(9, 5), random(5, seed=1, dtype=library.dtype)
    found = route(library, logits, 2, is_normalized=True, bias=bias)
    expected = route_reference(logits + bias.float(), 2, is_normalized=True)
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("size", [1, 16, 50])
def test_clamped_swiglu(library, size):
    x = 6 * random(5, 2 * size, dtype=library.dtype)
    x[0, 0], x[1, 0] = 90.0, -90.0
    y = torch.full((5, size), NAN, dtype=library.dtype)
    library.run(
        "clamped_swiglu", y=y, x=x, num_rows=ctypes.c_int64(5), size=size, alpha=1.702, limit=7.0
    )
    assert_near(y, clamped_swiglu_reference(x, alpha=1.702, limit=7.0))


@pytest.mark.parametrize("logits", [[NAN, 1.0, NAN, 3.0], [NAN] * 4, [-torch.inf, 0.0, NAN, 0.0]])
def test_what_is_no_number_goes_to_different_experts_and_stays(library, logits):
    experts, weights = route(library, torch.tensor([logits]), 3, is_normalized=False)
    assert len(set(experts[0].tolist())) == 3
    assert set(experts[0].tolist()) <= set(range(4))
    assert weights.isnan().all()


class Case:
    """Rows, routed at random, and the operations before and after the products."""

    def __init__(self, library, shape: tuple[int, int, int], size: int) -> None:
        num_tokens, self.num_experts, count = shape
        self.library = library
        logits = random(num_tokens, self.num_experts, seed=5)
        self.experts, self.weights = route_reference(logits, count, is_normalized=True)
        self.groups = group_slots(self.experts, self.num_experts)
        self.x = random(num_tokens, size, dtype=library.dtype)
        self.sorted_x = self.x[self.groups.tokens]
        self.program = CpuProgram(library)
        self.slots = SlotBuffers.of(self.program, count)
        slots = self.slots
        self.program.add(
            "group_slots", slots=slots.slots, places=slots.places, tiles=slots.tiles,
            counts=slots.counts, experts=self.experts.int(), num_experts=self.num_experts,
            experts_per_token=count,
        )  # fmt: skip

    def run(self) -> None:
        self.program.record(len(self.x))
        self.program.step.num_tokens = len(self.x)
        self.program.run()
        self.library.settle()

    def linear(self, operation: str, out: int, weights: list[Tensor], **arguments) -> Tensor:
        y = torch.full((len(self.sorted_x), out), NAN, dtype=self.library.dtype)
        self.program.add(
            operation, y=y, out_features=out, tiles=self.slots.tiles,
            num_tiles=self.slots.num_tiles,
            weights=torch.tensor([each.data_ptr() for each in weights]), **arguments,
        )  # fmt: skip
        self.run()
        return y


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_sorted(library, shape):
    case = Case(library, shape, 16)
    y = torch.empty_like(case.sorted_x)
    case.slots.write_gather(case.program, y, case.x, 16 * library.dtype.itemsize)
    case.run()
    num_slots = case.experts.numel()
    assert case.slots.slots.rows.flatten()[:num_slots].tolist() == case.groups.slots.tolist()
    assert case.slots.places.rows.flatten()[:num_slots].tolist() == case.groups.places.tolist()
    assert case.slots.counts.rows.flatten()[0] == num_slots
    assert torch.equal(y, case.sorted_x)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_linear(library, shape, has_bias):
    size, out = 34, 70
    case = Case(library, shape, size)
    dtype = library.dtype
    weights = [random(out, size, seed=9 + e, dtype=dtype) for e in range(case.num_experts)]
    bias = random(case.num_experts, out, seed=8, dtype=dtype)
    packed = [library.pack(weight) for weight in weights]

    def multiply(rows: Tensor, expert: int) -> Tensor:
        product = rows.float() @ weights[expert].float().T
        return (product + bias[expert].float() if has_bias else product).to(dtype)

    expected = experts_linear_reference(case.sorted_x, case.groups, multiply, out)
    found = case.linear(
        "experts_linear", out, packed, x=case.sorted_x, in_features=size,
        bias=bias if has_bias else None,
    )  # fmt: skip
    assert_near(found, expected)


KINDS = [("zero", 4), ("offsets", 4), ("fractions", 4), ("zero", 8)]


@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]])
def test_experts_linear_quantized(library, shape, kind, bits):
    """Rows that stay as they are, in an order of each expert's own."""
    size, out = 64, 70
    case = Case(library, shape, size)
    whole = matrix(kind, out * case.num_experts, size, bits=bits)
    parts = [whole.part(slice(e * out, e * out + out)) for e in range(case.num_experts)]
    packed = [PackedCodes(library, part, in_bytes=False) for part in parts]
    generator = torch.Generator().manual_seed(2)
    orders = torch.stack([torch.randperm(size, generator=generator) for _ in parts])

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return linear_quantized_reference(rows[:, orders[expert]], parts[expert], in_bytes=False)

    expected = experts_linear_reference(case.sorted_x, case.groups, multiply, out)
    ordered = torch.full_like(case.sorted_x, NAN)
    sums = torch.full((len(ordered), packed[0].num_blocks), NAN)
    slots = case.slots
    case.program.add(
        "permute_slots", y=ordered, x=case.sorted_x, indices=orders, tiles=slots.tiles,
        num_tiles=slots.num_tiles, size=size,
    )  # fmt: skip
    case.program.add(
        "sum_blocks", sums=sums, x=ordered, num_rows=slots.num_slots,
        columns_per_scale=packed[0].columns_per_scale, size=size,
    )  # fmt: skip
    arguments = packed[0].arguments()
    del arguments["weight"], arguments["out_features"]
    found = case.linear(
        "experts_linear_quantized", out, [each.weight for each in packed], x=ordered,
        x_float_sums=sums, **arguments,
    )  # fmt: skip
    assert_near(found, expected)


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("size", [16, 50])
def test_combine_slots(library, size, has_shared):
    case = Case(library, (7, 5, 3), size)
    dtype = library.dtype
    outputs = random(21, size, seed=1, dtype=dtype)
    residual, shared = (random(7, size, seed=seed, dtype=dtype) for seed in (2, 3))
    logits = random(7, 6, seed=4)
    y = torch.full((7, size), NAN, dtype=dtype)
    given = {"shared": shared, "shared_logits": logits[:, 5:], "stride": 6}
    case.program.add(
        "combine_slots", y=y, x=outputs, residual=residual, places=case.slots.places,
        weights=case.weights.contiguous(), size=size, experts_per_token=3,
        **(given if has_shared else {}),
    )  # fmt: skip
    case.run()
    others = logits[:, 5:].sigmoid() * shared.float() if has_shared else None
    total = combine_slots_reference(outputs, case.groups, case.weights, others)
    assert_near(y, (total.float() + residual.float()).to(dtype))
