"""Each sampling parameter has the same types and bounds over HTTP and in `LLM`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.offline.prompts import params_for
from penstock.engine.request import SAMPLING_PARAMETERS, SamplingParams
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.schema.parsing import parse_request

VALUES: tuple[Any, ...] = (
    -(2**63) - 1, -(2**63), -101, -100, -10, -3, -2, -1, -0.5, 0, 0.0, 1e-9, 0.01, 0.5, 1, 1.0, 1.5,
    2, 2.5, 16, 17, 20, 21, 100, 100.5, 101, 128, 129, 2**31, 2**63, 2**64 - 1, 2**64, 10**30,
    1e308, math.inf, -math.inf, math.nan, True, False, "", "x", "1", [1], ["x"], ["", "x"],
    ["x", 1], [1.5], [True], [[]], {}, {"5": 1}, {"5": -100}, {"5": 100.5}, {"5": "x"}, {"5": True},
    {"5": math.nan}, {"x": 1},
)  # fmt: skip


def _refused(check: Any) -> str | None:
    """The parameter for which something is refused, without the place inside it."""
    try:
        check()
    except InvalidRequestError as error:
        return str(error.param).partition("[")[0].partition(".")[0]
    return None


# Those that have another form over HTTP.
OTHERS = {
    "bad_words_token_ids", "beam_search", "repetition_detection", "speculation",
    "structured_outputs", "thought_limit",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAMPLING_PARAMETERS.keys() - OTHERS))
def test_a_parameter_is_the_same_in_both(name: str) -> None:
    accepted = 0
    for value in VALUES:
        body = {"prompt": "x", "max_tokens": 16, name: value}
        offline: Any = value
        if name == "logit_bias" and isinstance(value, dict):  # JSON's keys are strings
            offline = {int(key) if key.isdigit() else key: each for key, each in value.items()}
        given = {"max_tokens": 16, name: offline}
        online = _refused(lambda body=body: parse_request(CompletionRequest, body).options({}))
        if (name, value) == ("max_tokens", 0) and type(value) is int:
            continue  # `LLM.warm`; over HTTP it needs `echo`
        if (name, value) == ("max_tokens", -1) and type(value) is int:
            continue  # over HTTP, as with other servers: no limit
        if name == "min_tokens" and type(value) is int and value > 16:
            continue  # over HTTP the limit of output depends on the prompt: refused later
        assert online == _refused(lambda given=given: params_for(SamplingParams(**given), 1)), value
        assert online in (None, name), value
        accepted += online is None
    assert accepted  # and so some values are right


def test_a_negative_seed_is_its_bits_in_both() -> None:
    for seed, bits in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (7, 7)):
        body = {"prompt": "x", "seed": seed}
        assert parse_request(CompletionRequest, body).options({}).sampling_params.seed == bits
        assert SamplingParams(seed=seed).seed == bits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": "x"}, "temperature must be float, not 'x'"),
        ({"top_k": "x" * 60_000}, "top_k must be int, not 'xxxx"),
        ({"max_tokens": None, "min_tokens": 1}, "max_tokens must be int, not None"),
        ({"logit_bias": [5]}, "logit_bias must be a mapping from int to float, not [5]"),
        ({"logit_bias": {5: "x"}}, "logit_bias must be a mapping from int to float, not {5: 'x'}"),
        ({"logit_bias": {5: 1000.0}}, "logit_bias values must be between -100 and 100"),
        ({"seed": None}, "seed must be int, not None"),
        ({"seed": 2**64}, "seed must be a 64-bit integer"),
        ({"stop": 5}, "stop must be a list of str, not 5"),
        ({"stop": [""]}, "stop must not contain an empty string"),
        ({"stop": ""}, "stop must not contain an empty string"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids must not be negative"),
        ({"bad_words": ["x", " "]}, "bad_words must not contain an empty text"),
        (
            {"repetition_detection": {"min_count": 2}},
            "repetition_detection must be RepetitionDetection or None, not {'min_count': 2}",
        ),
        ({"n": 2, "best_of": "x"}, "best_of must be int or None, not 'x'"),
    ],
)
def test_a_wrong_type_is_named_when_parameters_are_made(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**given)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 150
    assert caught.value.param in given
