"""Choosing tokens in Triton, against the references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.sampling_cases import (
    SamplingCase,
    check_tokens,
    exact_probabilities,
    make_case,
    random_logits,
    sampling_cases,
)
from tests.support.tiers import tiered
from torch import Tensor

from penstock.kernels.gpu.draw_uniforms import draw_uniforms_triton
from penstock.kernels.gpu.sampling import sample_tokens_triton
from penstock.kernels.gpu.token_logprobs import token_logprobs_triton
from penstock.kernels.reference.draw_uniforms import as_draws, draw_uniforms_reference
from penstock.kernels.reference.token_logprobs import token_logprobs_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Several blocks and spans of a small vocabulary, and lists that do not always suffice.
SMALL = {"BLOCK": 64, "DEPTH": 2, "WAYS": 4, "NUM_SPANS": 4, "num_warps": 4}
# The device stays the same for all examples.
SHARED = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(case: SamplingCase, device: str, config: dict[str, int] | None = SMALL) -> Tensor:
    there = case.to(device)
    token_ids, is_valid = sample_tokens_triton(
        there.logits, *there.parameters, there.masks, config=config
    )
    check_tokens(case, token_ids.cpu(), is_valid.cpu())
    return token_ids.cpu()


@pytest.mark.parametrize("dtype", tiered(DTYPES, [torch.bfloat16]))
@SHARED
@given(st.data())
def test_it_equals_the_reference(device, dtype, data):
    check(data.draw(sampling_cases([1, 2, 63, 64, 65, 300, 384], dtype)), device)


@pytest.mark.parametrize("dtype", tiered(DTYPES, [torch.float32]))
def test_the_shipped_configuration(device, dtype):
    sizes = [1000, 5003] if device == "cpu" else [1000, 32_003, 151_936, 262_144]
    for size in sizes:
        case = make_case(
            random_logits("normal", 5, size, 1).to(dtype),
            temperature=[0.0, 0.8, 0.8, 0.8, 1.0],
            top_k=[0, 0, 0, 50, 900],
            top_p=[1.0, 1.0, 0.9, 0.9, 1.0],
            min_p=[0.0, 0.0, 0.0, 0.05, 0.0],
            uniforms=[0.1, 0.3, 0.5, 0.7, 0.9],
        )
        check(case, device, config=None)


@pytest.mark.parametrize("temperature", tiered([0.0, 1.0], [1.0]))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_distribution_is_marked(device, temperature, bad):
    logits = random_logits("normal", 3, 200, 3)
    if bad == -math.inf:
        logits[1] = bad
    logits[1, 150] = bad
    check(make_case(logits, temperature=temperature, top_k=40, top_p=0.9), device)


@pytest.mark.parametrize(
    "parameters", tiered([{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.99}], [{"top_p": 0.3}])
)
def test_ties_at_the_cut_are_kept(device, parameters):
    logits = torch.zeros(1, 200)
    logits[0, [5, 100, 190]] = 30.0
    uniforms = torch.linspace(0, 0.999, 12).tolist()
    case = make_case(logits.expand(12, -1).contiguous(), uniforms=uniforms, **parameters)
    assert set(check(case, device).tolist()) == {5, 100, 190}


def test_the_extremes_of_a_draw(device):
    """The first token and the last that has any weight, masked ones at both ends."""
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 3:290] = 0.0
    case = make_case(logits, uniforms=[0.0, 1 - 2.0**-53])
    assert check(case, device).tolist() == [3, 289]


def test_a_row_does_not_depend_on_its_neighbours(device):
    case = make_case(
        random_logits("few values", 6, 300, 4).bfloat16(),
        temperature=[0.0, 0.7, 1.0, 1.5, 0.2, 1.0],
        top_k=[0, 0, 5, 40, 200, 3],
        top_p=[1.0, 0.9, 0.5] * 2,
        uniforms=torch.linspace(0.01, 0.99, 6).tolist(),
    )
    alone = torch.cat([check(case.row(row), device) for row in range(6)])
    assert torch.equal(check(case, device), alone)


@pytest.mark.exhaustive
def test_draws_follow_the_distribution(device):
    """Pearson's χ² over the tokens that are kept."""
    num_rows = 50 if device == "cpu" else 50_000
    logits = random_logits("normal", 1, 100, 5).bfloat16()
    uniforms = draw_uniforms_triton(
        as_draws(range(num_rows), [0] * num_rows, [9] * num_rows).to(device)
    )
    case = make_case(
        logits.expand(num_rows, -1).contiguous(),
        temperature=2.0,
        top_k=4,
        uniforms=uniforms.tolist(),
    )
    token_ids = check(case, device, config=SMALL | {"BLOCK": 128})
    probabilities, num_kept = exact_probabilities(case.row(0))
    counts = np.bincount(token_ids.numpy(), minlength=100)
    expected = probabilities * num_rows
    assert counts[expected == 0].sum() == 0
    is_kept = expected > 0
    chi_square = ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    assert chi_square < num_kept + 4 * (2 * num_kept) ** 0.5


def test_uniforms_are_those_of_the_reference(device):
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(rng.integers(0, 2**64, (3, 200), dtype=np.uint64).view(np.int64))
    draws[:, :8] = torch.tensor([0, 1, -1, 2**32, 2**32 - 1, 2**63 - 1, 7, -(2**63)])
    assert torch.equal(draw_uniforms_triton(draws.to(device)).cpu(), draw_uniforms_reference(draws))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs(device, dtype, num_top):
    logits = random_logits("normal", 3, 2500, 6).to(dtype)
    logits[1, :2400] = -torch.inf
    logits[2] *= 20
    token_ids = torch.tensor([7, 2499, int(logits[2].argmax())])
    found = token_logprobs_triton(logits.to(device), token_ids.to(device), num_top)
    expected = token_logprobs_reference(logits, token_ids, num_top)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=1e-6)
    # Which of equal logits comes first is torch's choice, and may differ between devices.
    assert torch.equal(logits.gather(1, found[3].cpu()), logits.gather(1, expected[3]))
