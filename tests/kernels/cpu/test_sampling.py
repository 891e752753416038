"""The sampling kernels against their reference, for each set of instructions and dtype."""

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
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.draw_uniforms import draw_uniforms
from penstock.kernels.reference.draw_uniforms import as_draws, draw_uniforms_reference
from penstock.kernels.sampling import sample_tokens

# A span of the C code has 512 tokens, a vector 16.
SIZES = [1, 2, 15, 16, 17, 40, 511, 512, 513, 2000]
# One library serves all examples of a test; examples do not change it.
SHARED = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def sample(library: CpuLibrary, case: SamplingCase) -> tuple[Tensor, Tensor]:
    return sample_tokens(case.logits, *case.parameters, masks=case.masks, library=library)


def check(library: CpuLibrary, case: SamplingCase) -> Tensor:
    token_ids, is_valid = sample(library, case)
    check_tokens(case, token_ids, is_valid)
    return token_ids


@SHARED
@given(st.data())
def test_it_equals_the_reference(library, data):
    check(library, data.draw(sampling_cases(SIZES, library.dtype)))


@SHARED
@given(st.data())
def test_logits_that_penalties_changed_are_floats(library, data):
    """Whatever the dtype of the library."""
    check(library, data.draw(sampling_cases(SIZES, torch.float32)))


@pytest.mark.parametrize("vocab_size", [32_003, 151_936])
def test_large_vocabularies(library, vocab_size):
    logits = random_logits("normal", 5, vocab_size, 1).to(library.dtype)
    case = make_case(
        logits,
        temperature=[0.0, 0.8, 0.8, 0.8, 1.0],
        top_k=[0, 0, 0, 50, 20_000],
        top_p=[1.0, 1.0, 0.9, 0.9, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.05, 0.0],
        uniforms=torch.linspace(0.05, 0.95, 5).tolist(),
    )
    check(library, case)


def test_greedy_takes_the_first_of_equals(library):
    logits = random_logits("normal", 4, 1037, 2).to(library.dtype)
    logits[0, [3, 30]] = 90.0
    logits[1, 1036] = 90.0
    logits[2, [600, 20]] = 90.0
    logits[3] = -5.0
    token_ids, is_valid = sample(library, make_case(logits, temperature=0.0))
    assert token_ids.tolist() == [3, 1036, 20, 0]
    assert is_valid.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 16, 517, 599])
def test_a_row_that_is_no_distribution_is_marked(library, temperature, bad, place):
    logits = random_logits("normal", 3, 600, 3).to(library.dtype)
    healthy, _ = sample(library, make_case(logits, temperature=temperature, top_p=0.9))
    if bad == -math.inf:
        logits[1] = bad
    logits[1, place] = bad
    token_ids, is_valid = sample(library, make_case(logits, temperature=temperature, top_p=0.9))
    assert is_valid.tolist() == [True, False, True]
    assert 0 <= token_ids[1] < 600
    assert token_ids[::2].tolist() == healthy[::2].tolist()


@pytest.mark.parametrize("parameters", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.99}])
def test_ties_at_the_cut_are_kept(library, parameters):
    logits = torch.zeros(1, 700).to(library.dtype)
    logits[0, [5, 300, 600]] = 30.0
    uniforms = torch.linspace(0, 0.999, 50).tolist()
    case = make_case(logits.expand(50, -1).contiguous(), uniforms=uniforms, **parameters)
    assert set(check(library, case).tolist()) == {5, 300, 600}


def test_the_extremes_of_a_draw(library):
    """The first token and the last that has any weight, masked ones at both ends."""
    logits = torch.full((2, 1500), -torch.inf).to(library.dtype)
    logits[:, 3:1490] = 0.0
    token_ids, _ = sample(library, make_case(logits, uniforms=[0.0, 1 - 2.0**-53]))
    assert token_ids.tolist() == [3, 1489]


def test_a_row_does_not_depend_on_its_neighbours(library):
    logits = random_logits("few values", 24, 1500, 4).to(library.dtype)
    case = make_case(
        logits,
        temperature=[0.0, 0.7, 1.0, 1.5] * 6,
        top_k=[0, 0, 5, 40, 200, 3] * 4,
        top_p=[1.0, 0.9, 0.5] * 8,
        uniforms=torch.linspace(0.01, 0.99, 24).tolist(),
    )
    together, _ = sample(library, case)
    alone = torch.cat([sample(library, case.row(row))[0] for row in range(24)])
    assert torch.equal(together, alone)


def test_draws_follow_the_distribution(library):
    """Pearson's χ² over the tokens that are kept, in two spans of the vocabulary."""
    num_rows = 20_000
    logits = random_logits("normal", 1, 600, 5).to(library.dtype)
    uniforms = draw_uniforms(
        as_draws(range(num_rows), [0] * num_rows, [9] * num_rows), library=library
    )
    parameters = {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.01}
    case = make_case(
        logits.expand(num_rows, -1).contiguous(), uniforms=uniforms.tolist(), **parameters
    )
    token_ids, _ = sample(library, case)
    probabilities, num_kept = exact_probabilities(case.row(0))
    assert num_kept > 20
    counts = np.bincount(token_ids.numpy(), minlength=600)
    expected = probabilities * num_rows
    assert counts[expected == 0].sum() == 0
    is_kept = expected > 0
    chi_square = ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    assert chi_square < num_kept + 4 * (2 * num_kept) ** 0.5


def test_uniforms_are_those_of_the_reference(library):
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(rng.integers(0, 2**64, (3, 500), dtype=np.uint64).view(np.int64))
    draws[:, :8] = torch.tensor([0, 1, -1, 2**32, 2**32 - 1, 2**63 - 1, 7, -(2**63)])
    assert torch.equal(draw_uniforms(draws, library=library), draw_uniforms_reference(draws))
