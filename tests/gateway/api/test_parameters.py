"""The parameters against the installed `openai` package and our own schemas."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, responses_client_event

from penstock import gateway
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import SAMPLING_PARAMETERS, SamplingParams
from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.responses.schema import ResponsesRequest, SocketRequest
from penstock.gateway.api.schema.fields import SamplingRequest
from penstock.gateway.api.schema.parameters import ALIASES, UNREAD, Use
from penstock.gateway.api.schema.parsing import MAX_JSON_DEPTH, parse_json, parse_request
from penstock.gateway.errors import RequestRefusedError

_DOCUMENT = Path(gateway.__file__).with_name("API.md")
_SCHEMAS: tuple[type[SamplingRequest], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SocketRequest,
)


def known(schema: type[SamplingRequest]) -> set[str]:
    return set(schema.model_fields) | set(UNREAD[schema.endpoint]) | set(ALIASES[schema.endpoint])


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_parameter_of_openai_is_classified(schema: type[SamplingRequest], kind: Any) -> None:
    assert set(get_type_hints(kind)) - known(schema) == set()


def test_every_parameter_of_the_websocket_mode_is_classified() -> None:
    assert set(responses_client_event.ResponseCreate.model_fields) - known(SocketRequest) == {
        "type",
        "stream_id",
    }


@pytest.mark.parametrize("schema", _SCHEMAS)
def test_no_parameter_is_treated_in_two_ways(schema: type[SamplingRequest]) -> None:
    ways = (set(schema.model_fields), set(UNREAD[schema.endpoint]), set(ALIASES[schema.endpoint]))
    assert sum(map(len, ways)) == len(set().union(*ways))


def test_each_parameter_without_effect_is_documented() -> None:
    """In the one table of them, whose other rows are about fields of parameters."""
    _, _, table = _DOCUMENT.read_text("utf-8").partition("| accepted without effect |")
    table, _, _ = table.partition("\n\n")
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w[\w.]*)`", row)}
    unread = {
        name
        for parameters in UNREAD.values()
        for name, parameter in parameters.items()
        if parameter.use is not Use.REFUSED
    }
    assert unread - told == set()


def test_each_other_name_is_documented() -> None:
    _, _, section = _DOCUMENT.read_text("utf-8").partition("## Parameters of other servers")
    section, _, _ = section.partition("\n## ")
    for name in {name for names in ALIASES.values() for name in names}:
        assert f"`{name}`" in section


_VALUES_OF_COMMON = [
    (name, value)
    for name, each in SAMPLING_PARAMETERS.items()
    if each.declared.is_common and each.type in (int, float)
    for value in (-101, -3, -2, -1, 0, 0.005, 0.01, 1, 1.5, 2, 3, 100, 101)
    if isinstance(value, int | each.type)
]


@pytest.mark.parametrize(("name", "value"), _VALUES_OF_COMMON)
def test_a_value_is_refused_offline_where_it_is_over_http(name: str, value: float) -> None:
    accepted = set()
    with contextlib.suppress(InvalidRequestError):
        SamplingParams(**{"max_tokens": 1000, name: value})
        accepted.add("offline")
    for schema, body in ((ChatRequest, {"messages": [_HELLO]}), (ResponsesRequest, {"input": "x"})):
        with contextlib.suppress(RequestRefusedError):
            parse_request(schema, {**body, name: value})
            accepted.add("over HTTP")
    assert len(accepted) != 1


_HELLO = {"role": "user", "content": "Hello"}
_NAMES = sorted({name for schema in _SCHEMAS for name in known(schema)})
_NAMES += ["role", "content", "type", "text", "input_text", "message", "user", "assistant"]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.sampled_from(_NAMES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3)
        | st.builds(lambda text: {"role": "user", "content": text}, inner)
    ),
    max_leaves=8,
)


@given(
    kind=st.sampled_from(_SCHEMAS),
    body=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4),
)
def test_any_json_is_read_or_refused(kind: Any, body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestRefusedError):
        request = parse_request(kind, body)
        assert request.output_limit is None or request.output_limit >= 0
        assert request.num_logprobs is None or request.num_logprobs >= 0
        assert request.branching.n >= 1


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    with contextlib.suppress(RequestRefusedError):
        assert orjson.dumps(parse_json(data))


@pytest.mark.parametrize(("begin", "end"), ["[]", ('{"a":', "}")])
def test_what_could_not_be_written_again_is_refused(begin: str, end: str) -> None:
    def nested(num: int) -> str:
        return f'{{"metadata":{begin * (num - 1)}1{end * (num - 1)}}}'

    deepest = nested(MAX_JSON_DEPTH)
    assert parse_json(deepest) == parse_json(deepest.encode())
    for data in (nested(MAX_JSON_DEPTH + 1), nested(1000).encode(), nested(100_000)):
        with pytest.raises(RequestRefusedError, match=r"nested more than 200|not valid JSON"):
            parse_json(data)
