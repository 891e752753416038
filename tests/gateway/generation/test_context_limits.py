"""What fits the context and KV memory, for any sizes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import BeamSearch, SamplingParams, num_blocks_needed
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.generation.context_limits import fit_branches, output_limit

from ..fake_engine import INFO


def params_of(num_branches: int, max_tokens: int, *, is_search: bool) -> SamplingParams:
    search = BeamSearch(width=num_branches) if is_search else None
    return SamplingParams(n=num_branches, max_tokens=max_tokens, beam_search=search, temperature=0)


@given(
    num_branches=st.integers(1, 20),
    max_tokens=st.integers(1, 300),
    num_prompt_tokens=st.integers(1, 200),
    num_blocks=st.integers(1, 60),
    is_search=st.booleans(),
    is_limit_given=st.booleans(),
)
def test_the_limit_is_lowered_as_little_as_needed_or_the_request_refused(
    num_branches: int,
    max_tokens: int,
    num_prompt_tokens: int,
    num_blocks: int,
    is_search: bool,
    is_limit_given: bool,
) -> None:
    info = msgspec.structs.replace(INFO, num_blocks=num_blocks, block_size=8)
    asked = params_of(num_branches, max_tokens, is_search=is_search)

    def fits(tokens: int) -> bool:
        params = msgspec.structs.replace(asked, max_tokens=tokens)
        return num_blocks_needed(params, num_prompt_tokens, 8) <= num_blocks

    try:
        fitted = fit_branches(asked, num_prompt_tokens, info=info, is_limit_given=is_limit_given)
    except InvalidRequestError:
        assert num_branches > info.max_num_seqs or not fits(max_tokens if is_limit_given else 1)
        return
    assert msgspec.structs.replace(fitted, max_tokens=max_tokens) == asked
    if num_branches == 1 or is_limit_given:
        assert fitted == asked
    else:
        assert fits(fitted.max_tokens)
        assert fitted.max_tokens == max_tokens or not fits(fitted.max_tokens + 1)


def test_the_lowered_limit_keeps_min_tokens() -> None:
    info = msgspec.structs.replace(INFO, num_blocks=10, block_size=8)
    asked = msgspec.structs.replace(params_of(4, 300, is_search=False), min_tokens=40)
    with pytest.raises(InvalidRequestError, match="4 outputs of 40 tokens for a prompt of 5"):
        fit_branches(asked, 5, info=info, is_limit_given=False)


@pytest.mark.parametrize(
    ("body", "num_prompt_tokens", "limit"),
    [
        ({}, 10, 16),
        ({}, 95, 5),
        ({"max_tokens": 50}, 60, 40),
        ({"max_tokens": 0, "echo": True}, 100, 0),
        ({"max_tokens": 1}, 100, None),
        ({"max_tokens": 0, "echo": True}, 101, None),
        ({}, 0, None),
        ({"min_tokens": 17}, 10, None),
        ({"min_tokens": 17, "max_tokens": 90}, 90, None),
    ],
)
def test_the_context_bounds_the_output(
    body: dict[str, int], num_prompt_tokens: int, limit: int | None
) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", **body})
    try:
        found = output_limit(
            request.options({}), num_prompt_tokens, max_model_len=100, param="prompt"
        )
    except InvalidRequestError:
        assert limit is None
    else:
        assert found == limit
