"""The table of parameters against the installed `openai` package and our own schemas."""

from __future__ import annotations

import contextlib
from typing import Any, get_type_hints

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, responses_client_event

from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.responses.schema import ResponsesRequest, SocketRequest
from penstock.gateway.api.schema.parameters import PARAMETERS, Endpoint, Use
from penstock.gateway.api.schema.parsing import parse_json, parse_request
from penstock.gateway.errors import RequestRefusedError


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        (Endpoint.CHAT, chat_params.CompletionCreateParamsStreaming),
        (Endpoint.COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
        (Endpoint.RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_parameter_of_openai_is_classified(endpoint: Endpoint, kind: Any) -> None:
    assert set(get_type_hints(kind)) - set(PARAMETERS[endpoint]) == set()


def test_every_parameter_of_the_websocket_mode_is_classified() -> None:
    known = set(PARAMETERS[Endpoint.RESPONSES_SOCKET]) | {"type", "stream_id"}
    assert set(responses_client_event.ResponseCreate.model_fields) - known == set()


@pytest.mark.parametrize(
    ("endpoint", "schema"),
    [
        (Endpoint.CHAT, ChatRequest),
        (Endpoint.COMPLETIONS, CompletionRequest),
        (Endpoint.RESPONSES, ResponsesRequest),
        (Endpoint.RESPONSES_SOCKET, SocketRequest),
    ],
)
def test_the_schemas_read_exactly_what_is_honoured(endpoint: Endpoint, schema: Any) -> None:
    honoured = {
        name for name, parameter in PARAMETERS[endpoint].items() if parameter.use is Use.HONOURED
    }
    assert set(schema.model_fields) == honoured


_NAMES = sorted({name for table in PARAMETERS.values() for name in table})
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
    kind=st.sampled_from([ChatRequest, CompletionRequest, ResponsesRequest, SocketRequest]),
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
