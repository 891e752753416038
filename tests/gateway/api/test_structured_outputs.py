"""What outputs must match: every form of asking for it, every mistake in it, and how such outputs
end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pydantic
import pytest

from penstock.engine.request import FinishReason, StructuredOutputs
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.gateway.api.schema.structured_outputs import MAX_BYTES, MAX_DEPTH

from ..conftest import Serve, Served
from ..generation.test_grammar_check import BOMB
from ..sockets import send, until_end

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_USER = [{"role": "user", "content": "hello"}]
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": _USER},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
}
_SCHEMA = {
    "type": "object",
    "properties": {"näme": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["näme", "age"],
    "additionalProperties": False,
}
_TEXT = json.dumps(_SCHEMA)
_NAMED = {"name": "a-Person_1", "schema": _SCHEMA}
_BOMB = json.loads(BOMB.text)


def _format(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def _flat(kind: str, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, **fields}}}


def _vllm(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


_FROM_SCHEMA = structured_outputs(json_schema=_SCHEMA)
_FROM_OBJECT = structured_outputs(json_object=True)
_FROM_REGEX = structured_outputs(regex="[a-c]+")
_FROM_CHOICE = structured_outputs(choice=["yes", 'n"o\\'])
_FROM_GRAMMAR = structured_outputs(grammar='start: "a" start?')
_FROM_GBNF = structured_outputs(grammar='root ::= "a" root?')
_GUIDED = {"guided_grammar": 'start: "a" start?'}
_TAG = {"begin": "<f=a>", "schema": _SCHEMA, "end": "</f>"}
_CONTENT = {"type": "json_schema", "json_schema": _SCHEMA}
_TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [{"begin": "<f=a>", "content": _CONTENT, "end": "</f>"}],
}
_FROM_TAG = structured_outputs(structural_tag={"format": _TAGS})
_WITHOUT_SPACE = structured_outputs(json_schema=_SCHEMA, whitespace_pattern="")
_WITH_SPACES = structured_outputs(json_schema=_SCHEMA, whitespace_pattern="[ ]{0,2}")
_CHOICES, _ALL = (CHAT, COMPLETIONS), (CHAT, COMPLETIONS, RESPONSES)
_Forms = list[tuple[tuple[str, ...], dict[str, Any], StructuredOutputs | None]]
FORMS: _Forms = [
    # OpenAI's
    (_CHOICES, _format("text"), None),
    (_CHOICES, _format("text", json_schema=None), None),
    (_CHOICES, _format("json_object"), _FROM_OBJECT),
    (_CHOICES, _format("json_schema", json_schema=_NAMED), _FROM_SCHEMA),
    (_CHOICES, _format("json_schema", json_schema={**_NAMED, "strict": False}), _FROM_SCHEMA),
    (
        _CHOICES,
        _format("json_schema", json_schema={**_NAMED, "strict": True, "description": "a"}),
        _FROM_SCHEMA,
    ),
    (_CHOICES, _format("json_schema", json_schema={"schema": _SCHEMA}), _FROM_SCHEMA),
    # llama.cpp's, Fireworks' and SGLang's
    (_CHOICES, _format("json_object", schema=_SCHEMA), _FROM_SCHEMA),
    (_CHOICES, _format("json_schema", schema=_SCHEMA), _FROM_SCHEMA),
    (_CHOICES, _format("json_object", schema={}), _FROM_OBJECT),
    (_CHOICES, _format("json_schema", schema={}), structured_outputs(json_schema={})),
    (_CHOICES, _format("structural_tag", structures=[_TAG], triggers=["<f="]), _FROM_TAG),
    (_CHOICES, _format("structural_tag", format=_TAGS), _FROM_TAG),
    (_CHOICES, {"json_schema": _SCHEMA}, _FROM_SCHEMA),
    (_CHOICES, {"json_schema": _TEXT}, _FROM_SCHEMA),
    (_CHOICES, {"grammar": 'root ::= "a" root?'}, _FROM_GBNF),
    (_CHOICES, {"ebnf": 'root ::= "a" root?'}, _FROM_GBNF),
    (_CHOICES, {"regex": "[a-c]+"}, _FROM_REGEX),
    (_CHOICES, {"grammar": "", "regex": "", "ebnf": None}, None),
    # one name beside another for the same
    (_CHOICES, {**_vllm(grammar='start: "a" start?'), **_GUIDED}, _FROM_GRAMMAR),
    (_CHOICES, {**_format("json_object", schema=_SCHEMA), "guided_json": _SCHEMA}, _FROM_SCHEMA),
    (_CHOICES, {**_vllm(json=_SCHEMA), "guided_json": _TEXT}, _FROM_SCHEMA),
    # Responses
    ((RESPONSES,), _flat("json_schema", schema=_SCHEMA), _FROM_SCHEMA),
    ((RESPONSES,), {"text": {}}, None),
    ((RESPONSES,), {"text": {"verbosity": "medium", "format": None}}, None),
    ((RESPONSES,), _flat("text"), None),
    ((RESPONSES,), _flat("json_object"), _FROM_OBJECT),
    ((RESPONSES,), _flat("json_schema", **_NAMED), _FROM_SCHEMA),
    ((RESPONSES,), _flat("json_schema", **_NAMED, strict=True, description=None), _FROM_SCHEMA),
    # vLLM's
    (_ALL, {"structured_outputs": None}, None),
    (_ALL, _vllm(json=_SCHEMA), _FROM_SCHEMA),
    (_ALL, _vllm(json=_TEXT), _FROM_SCHEMA),
    (_ALL, _vllm(json_object=True), _FROM_OBJECT),
    (_ALL, _vllm(regex="[a-c]+"), _FROM_REGEX),
    (_ALL, _vllm(choice=["yes", 'n"o\\']), _FROM_CHOICE),
    (_ALL, _vllm(grammar='start: "a" start?'), _FROM_GRAMMAR),
    (_ALL, _vllm(json=_SCHEMA, disable_any_whitespace=True), _WITHOUT_SPACE),
    (_ALL, _vllm(json=_SCHEMA, whitespace_pattern="[ ]{0,2}"), _WITH_SPACES),
    (_ALL, _vllm(json=_SCHEMA, regex=None, json_object=False, choice=None), _FROM_SCHEMA),
    (_ALL, _vllm(json=_SCHEMA, disable_fallback=True, disable_any_whitespace=None), _FROM_SCHEMA),
    (_CHOICES, {"guided_json": _SCHEMA}, _FROM_SCHEMA),
    (_CHOICES, {"guided_json": _TEXT, "guided_decoding_backend": "xgrammar"}, _FROM_SCHEMA),
    (
        _CHOICES,
        {"guided_json": _SCHEMA, "guided_whitespace_pattern": "[ ]{0,2}"},
        _WITH_SPACES,
    ),
    (_CHOICES, {"guided_regex": "[a-c]+", "guided_choice": []}, _FROM_REGEX),
    (_CHOICES, {"guided_choice": ["yes", 'n"o\\']}, _FROM_CHOICE),
    (_CHOICES, _GUIDED, _FROM_GRAMMAR),
    (_CHOICES, {"guided_grammar": 'root ::= "a" root?'}, _FROM_GBNF),
    (_ALL, _vllm(grammar='root ::= "a" root?'), _FROM_GBNF),
    # with each other, and with what else shapes an output
    (_CHOICES, {**_format("text"), **_vllm(regex="[a-c]+")}, _FROM_REGEX),
    (_CHOICES, {**_format("json_object"), "n": 2, "stop": ["}"]}, _FROM_OBJECT),
    (_CHOICES, {**_format("json_object"), "n": 2, "use_beam_search": True}, _FROM_OBJECT),
    ((CHAT,), {**_format("json_object"), "logprobs": True, "top_logprobs": 2}, _FROM_OBJECT),
    ((COMPLETIONS,), {**_format("json_object"), "best_of": 2, "echo": True}, _FROM_OBJECT),
    ((COMPLETIONS,), {**_format("json_object"), "prompt": ["a", "b"]}, _FROM_OBJECT),
    (
        (CHAT,),
        {
            **_format("json_object"),
            "messages": [*_USER, {"role": "assistant", "content": "so: "}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        _FROM_OBJECT,
    ),
]


async def test_every_form_reaches_the_engine(served: Served) -> None:
    for paths, asked, expected in FORMS:
        for path in paths:
            served.engine.submitted.clear()
            response = await served.http.post(path, json={**_BODIES[path], **asked})
            assert response.status_code == 200, (path, asked, response.text)
            assert served.engine.submitted, (path, asked)
            for request in served.engine.submitted.values():
                made = request.sampling_params.structured_outputs
                assert made == expected, (path, asked)


_NESTED: dict[str, Any] = {}
for _ in range(MAX_DEPTH):
    _NESTED = {"items": _NESTED}
_LONG = {"enum": ["x" * MAX_BYTES]}
_IN = "response_format.json_schema.schema"
_ONLY_ONE = "only one of {} and {} may be given"
_NEEDS = (
    "structured_outputs needs one of json, regex, choice, grammar, json_object or structural_tag"
)
_NEEDS_JSON = " needs a JSON Schema or json_object beside it"
_TOO_SLOW = ": it takes too long to compile (more than 0.25 s)"
_TOO_LONG = f" has more than {MAX_BYTES} bytes as JSON"
_TOO_DEEP = f" is nested more than {MAX_DEPTH} deep"
_NOT_JSON = " is not valid JSON: "
_MISSING, _VALUE, _TYPE = "missing_required_parameter", "invalid_value", "invalid_type"
_UNKNOWN, _AT_FAULT = "unknown_parameter", "invalid_json_schema"


def _schema(schema: Any) -> dict[str, Any]:
    return _format("json_schema", json_schema={"name": "a", "schema": schema})


def _strict(schema: Any) -> dict[str, Any]:
    return _format("json_schema", json_schema={"name": "a", "schema": schema, "strict": True})


# Path, what is asked, code, param, and how the message begins.
MISTAKES: list[tuple[str, dict[str, Any], str, str, str]] = [
    (CHAT, {"response_format": "json"}, _TYPE, "response_format", "response_format: "),
    (CHAT, {"response_format": {}}, _MISSING, "response_format.type", "response_format.type: "),
    (CHAT, _format("xml"), _VALUE, "response_format.type", "response_format.type: "),
    (CHAT, _format("text", x=1), _UNKNOWN, "response_format.x", "unknown parameter: "),
    (
        CHAT,
        _format("json_schema"),
        _MISSING,
        "response_format.json_schema",
        "response_format.json_schema is required with type 'json_schema'",
    ),
    (
        COMPLETIONS,
        _format("json_object", json_schema=_NAMED),
        _VALUE,
        "response_format.json_schema",
        "response_format.json_schema cannot be used with type 'json_object'",
    ),
    (CHAT, _format("json_schema", json_schema={"name": "a"}), _MISSING, _IN, _IN),
    (
        CHAT,
        _format("json_schema", json_schema=_NAMED, schema=_SCHEMA),
        _VALUE,
        "response_format.schema",
        "response_format.schema cannot be used with json_schema",
    ),
    (
        CHAT,
        _format("text", schema=_SCHEMA),
        _VALUE,
        "response_format.schema",
        "response_format.schema cannot be used with type 'text'",
    ),
    (
        CHAT,
        _format("json_object", triggers=["<f"]),
        _VALUE,
        "response_format.triggers",
        "response_format.triggers cannot be used with type 'json_object'",
    ),
    (CHAT, _format("structural_tag"), _VALUE, "response_format", "response_format must have trig"),
    (
        COMPLETIONS,
        _strict({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        _AT_FAULT,
        f"{_IN}.uniqueItems",
        f"{_IN}: .uniqueItems uses 'uniqueItems', which is not supported",
    ),
    (
        CHAT,
        _strict({"propertyNames": {"not": {"const": "a"}}}),
        _AT_FAULT,
        f"{_IN}.propertyNames",
        f"{_IN}: .propertyNames uses 'propertyNames', which is not supported",
    ),
    (
        CHAT,
        _strict({"pattern": r"(a)(?!\1)"}),
        _AT_FAULT,
        f"{_IN}.pattern",
        f"{_IN}: .pattern uses '(?!', which is not supported",
    ),
    (
        CHAT,
        _schema({"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}),
        _AT_FAULT,
        f"{_IN}.properties.b",
        f"{_IN}: .properties.b requires itself without end: no output can match it",
    ),
    (CHAT, {"json_schema": "["}, _AT_FAULT, "json_schema", "json_schema is not valid JSON: "),
    (CHAT, {"grammar": 'root ::= "a'}, _VALUE, "grammar", "grammar: line 1: "),
    (CHAT, {"grammar": "root"}, _VALUE, "grammar", "grammar: "),
    (CHAT, {"ebnf": "root ::= x"}, _VALUE, "ebnf", "ebnf: line 1: there is no rule 'x'"),
    (
        CHAT,
        {"regex": "a", "guided_regex": "b"},
        _VALUE,
        "regex",
        _ONLY_ONE.format("guided_regex", "regex"),
    ),
    (
        CHAT,
        _format("json_schema", json_schema={**_NAMED, "name": "a b"}),
        _VALUE,
        "response_format.json_schema.name",
        "response_format.json_schema.name: ",
    ),
    (
        CHAT,
        _format("json_schema", json_schema={**_NAMED, "strict": 1}),
        _TYPE,
        "response_format.json_schema.strict",
        "response_format.json_schema.strict: ",
    ),
    (
        CHAT,
        _format("json_schema", json_schema={**_NAMED, "x": 1}),
        _UNKNOWN,
        "response_format.json_schema.x",
        "unknown parameter: ",
    ),
    (CHAT, _schema([]), _TYPE, _IN, f"{_IN}: "),
    (CHAT, _schema("{}"), _TYPE, _IN, f"{_IN}: "),
    (CHAT, _schema({"type": "objct"}), _AT_FAULT, f"{_IN}.type", f"{_IN}: .type must be one"),
    (
        CHAT,
        _schema({"type": "object", "properties": {"a": {"not": {"const": 1}}}}),
        _AT_FAULT,
        f"{_IN}.properties.a.not",
        f"{_IN}: .properties.a.not uses 'not', which is not supported",
    ),
    (
        CHAT,
        _schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}),
        _AT_FAULT,
        f"{_IN}.oneOf",
        f"{_IN}: .oneOf uses 'oneOf' with alternatives that may hold at the same time",
    ),
    (CHAT, _schema(_NESTED), _AT_FAULT, _IN, _IN + _TOO_DEEP),
    (COMPLETIONS, _schema(_LONG), _AT_FAULT, _IN, _IN + _TOO_LONG),
    (COMPLETIONS, _schema(_BOMB), _AT_FAULT, _IN, _IN + _TOO_SLOW),
    # responses
    (RESPONSES, {"text": "x"}, _TYPE, "text", "text: "),
    (RESPONSES, {"text": {"x": 1}}, _UNKNOWN, "text.x", "unknown parameter: 'text.x'"),
    (RESPONSES, {"text": {"format": {}}}, _MISSING, "text.format.type", "text.format.type: "),
    (RESPONSES, {"text": {"verbosity": "x"}}, _VALUE, "text.verbosity", "text.verbosity: "),
    (RESPONSES, _flat("grammar"), _VALUE, "text.format.type", "text.format.type: "),
    (RESPONSES, _flat("json_schema", name="a"), _MISSING, "text.format.schema", "text.format."),
    (
        RESPONSES,
        _flat("text", strict=True),
        _VALUE,
        "text.format.strict",
        "text.format.strict cannot be used with type 'text'",
    ),
    (
        RESPONSES,
        _flat("json_schema", name="a", schema=_BOMB),
        _AT_FAULT,
        "text.format.schema",
        "text.format.schema" + _TOO_SLOW,
    ),
    (RESPONSES, {"response_format": {}}, _UNKNOWN, "response_format", "unknown parameter: "),
    (RESPONSES, {"guided_regex": "a"}, _UNKNOWN, "guided_regex", "unknown parameter: "),
    (
        RESPONSES,
        {**_flat("json_object"), **_vllm(regex="a")},
        _VALUE,
        "structured_outputs.regex",
        _ONLY_ONE.format("text.format", "structured_outputs.regex"),
    ),
    # vLLM's
    (CHAT, {"structured_outputs": "x"}, _TYPE, "structured_outputs", "structured_outputs: "),
    (CHAT, _vllm(), _VALUE, "structured_outputs", _NEEDS),
    (CHAT, _vllm(json_object=False), _VALUE, "structured_outputs", _NEEDS),
    (CHAT, _vllm(whitespace_pattern=" "), _VALUE, "structured_outputs", _NEEDS),
    (CHAT, _vllm(jsn=1), _UNKNOWN, "structured_outputs.jsn", "unknown parameter: "),
    (
        RESPONSES,
        _vllm(json=_SCHEMA, regex="a"),
        _VALUE,
        "structured_outputs.regex",
        _ONLY_ONE.format("structured_outputs.json", "structured_outputs.regex"),
    ),
    (
        COMPLETIONS,
        {**_format("json_object"), "guided_json": {}},
        _VALUE,
        "guided_json",
        _ONLY_ONE.format("response_format", "guided_json"),
    ),
    (CHAT, _vllm(json=7), _TYPE, "structured_outputs.json", "structured_outputs.json: "),
    (
        CHAT,
        _vllm(json="{"),
        _AT_FAULT,
        "structured_outputs.json",
        "structured_outputs.json" + _NOT_JSON,
    ),
    (CHAT, {"guided_json": "[]"}, _AT_FAULT, "guided_json", "guided_json must be a JSON object"),
    (CHAT, {"guided_json": "[" * 1500}, _AT_FAULT, "guided_json", "guided_json" + _NOT_JSON),
    (CHAT, {"guided_json": _BOMB}, _AT_FAULT, "guided_json", "guided_json" + _TOO_SLOW),
    (CHAT, _vllm(regex="("), _VALUE, "structured_outputs.regex", "structured_outputs.regex: "),
    (CHAT, _vllm(regex=["a"]), _TYPE, "structured_outputs.regex", "structured_outputs.regex: "),
    (
        CHAT,
        {"guided_regex": r"[^\s\S]"},
        _VALUE,
        "guided_regex",
        "guided_regex: no output can match it",
    ),
    (CHAT, {"guided_regex": "x" * MAX_BYTES}, _VALUE, "guided_regex", "guided_regex" + _TOO_LONG),
    (CHAT, _vllm(choice=[]), _VALUE, "structured_outputs.choice", "structured_outputs.choice: "),
    (CHAT, {"guided_choice": ["a", 5]}, _TYPE, "guided_choice[1]", "guided_choice[1]: "),
    (CHAT, {"guided_choice": "a"}, _TYPE, "guided_choice", "guided_choice: "),
    (
        CHAT,
        {"guided_choice": ["x" * 1000] * 1000},
        _VALUE,
        "guided_choice",
        "guided_choice" + _TOO_LONG,
    ),
    (CHAT, {"guided_grammar": "start: x"}, _VALUE, "guided_grammar", "guided_grammar: "),
    (CHAT, {"guided_grammar": "start: start"}, _VALUE, "guided_grammar", "guided_grammar: "),
    (
        CHAT,
        _vllm(structural_tag="{"),
        _VALUE,
        "structured_outputs.structural_tag",
        "structured_outputs.structural_tag" + _NOT_JSON,
    ),
    (
        CHAT,
        _vllm(regex="a", whitespace_pattern=" "),
        _VALUE,
        "structured_outputs.whitespace_pattern",
        "structured_outputs.whitespace_pattern" + _NEEDS_JSON,
    ),
    (
        CHAT,
        _vllm(grammar="start: 'a'", disable_additional_properties=True),
        _VALUE,
        "structured_outputs.disable_additional_properties",
        "structured_outputs.disable_additional_properties" + _NEEDS_JSON,
    ),
    (
        COMPLETIONS,
        {"guided_whitespace_pattern": ""},
        _VALUE,
        "guided_whitespace_pattern",
        "guided_whitespace_pattern" + _NEEDS_JSON,
    ),
    (
        CHAT,
        _vllm(json=_SCHEMA, whitespace_pattern="("),
        _VALUE,
        "structured_outputs.whitespace_pattern",
        "structured_outputs.whitespace_pattern: ",
    ),
    (
        CHAT,
        _vllm(json=_SCHEMA, whitespace_pattern=" ", disable_any_whitespace=True),
        _VALUE,
        "structured_outputs.disable_any_whitespace",
        _ONLY_ONE.format(
            "structured_outputs.whitespace_pattern", "structured_outputs.disable_any_whitespace"
        ),
    ),
    (
        CHAT,
        {**_vllm(json=_SCHEMA, whitespace_pattern=" "), "guided_whitespace_pattern": ""},
        _VALUE,
        "guided_whitespace_pattern",
        _ONLY_ONE.format("structured_outputs.whitespace_pattern", "guided_whitespace_pattern"),
    ),
]


async def test_every_mistake_is_named(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for path, asked, code, param, message in MISTAKES:
        response = await served.http.post(path, json={**_BODIES[path], **asked})
        assert response.status_code == 400, (asked, response.text)
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param), (asked, error)
        assert error["message"].startswith(message), (message, error)
        assert len(error["message"]) < 500
    assert not served.engine.submitted
    assert "Traceback" not in caplog.text
    assert max((len(line) for line in caplog.text.splitlines()), default=0) < 2000


async def test_others_are_served_while_a_bomb_is_compiled(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        body = {"messages": _USER, "stream": True, "ignore_eos": True, "max_tokens": 1000}
        async with served.http.stream("POST", CHAT, json=body) as stream:
            events = stream.aiter_lines()
            await anext(events)
            asked = {**_BODIES[CHAT], **_schema(_BOMB)}
            refusal = asyncio.create_task(served.http.post(CHAT, json=asked))
            num_events = 0
            while not refusal.done():
                await anext(events)
                num_events += 1
        error = (await refusal).json()["error"]
        assert (error["code"], error["message"]) == (_AT_FAULT, _IN + _TOO_SLOW)
        assert num_events >= 5
        served.engine.submitted.clear()
        response = await served.http.post(CHAT, json={**_BODIES[CHAT], **_schema(_SCHEMA)})
        assert response.status_code == 200
        metrics = (await served.http.get("/metrics")).text
    for line in (
        'grammar_checks_total{model_name="tiny",verdict="accepted"} 1.0',
        'grammar_checks_total{model_name="tiny",verdict="too_slow"} 1.0',
        'grammar_check_seconds_count{model_name="tiny"} 2.0',
        'grammars_cached{model_name="tiny"} 2.0',
    ):
        assert f"penstock:{line}" in metrics


async def test_a_mistake_on_a_socket(served: Served) -> None:
    async with served.connect() as socket:
        bad = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objct"}}}
        await send(socket, type="response.create", input="x", text=bad)
        (event,) = await until_end(socket)
        assert (event["type"], event["status"]) == ("error", 400)
        error = event["error"]
        assert (error["code"], error["param"]) == (_AT_FAULT, "text.format.schema.type")
        await send(socket, type="response.create", input="x", **_flat("json_object"))
        assert (await until_end(socket))[-1]["type"] == "response.completed"


_TOLD = {"type": "json_schema", **_NAMED, "description": None, "strict": None}


_REPEATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"type": "text"}),
    ({"text": {"format": None}}, {"type": "text"}),
    (_flat("json_object"), {"type": "json_object"}),
    (_flat("json_schema", **_NAMED), _TOLD),
    (_flat("json_schema", **_NAMED, strict=True), {**_TOLD, "strict": True}),
]


async def test_a_response_repeats_its_format(served: Served) -> None:
    for asked, told in _REPEATED:
        response = (await served.http.post(RESPONSES, json={"input": "x", **asked})).json()
        assert response["text"] == {"format": told}
        again = (await served.http.get(f"{RESPONSES}/{response['id']}")).json()
        assert again["text"] == {"format": told}
        async with served.connect() as socket:
            await send(socket, type="response.create", input="x", **asked)
            events = await until_end(socket)
        for event in (events[0], events[-1]):
            assert event["response"]["text"] == {"format": told}
        assert events[-1]["type"] == "response.completed"


# -- an output that its grammar neither lets end nor go on ---------------------------------------


@pytest.fixture
def stuck(served: Served) -> Served:
    served.engine.limit_reason = FinishReason.GRAMMAR
    return served


async def test_a_choice_ends_with_grammar(stuck: Served) -> None:
    for path in _CHOICES:
        for key in (None, "7c4a8d09-ca37"):
            stuck.engine.submitted.clear()
            headers = {"Idempotency-Key": key} if key else {}
            body = {**_BODIES[path], **_format("json_object"), "max_tokens": 3}
            answers = [await stuck.http.post(path, json=body, headers=headers) for _ in range(2)]
            for answer in answers:
                (choice,) = answer.json()["choices"]
                assert choice["finish_reason"] == "grammar"
            assert len(stuck.engine.submitted) == (1 if headers else 2)
            body["stream"] = True
            headers = {name: f"{value}-2" for name, value in headers.items()}
            streamed = await stuck.http.post(path, json=body, headers=headers)
            assert streamed.text.count('"finish_reason":"grammar"') == 1
            assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_response_ends_with_grammar(stuck: Served) -> None:
    body = {"input": "x", "max_output_tokens": 3, **_flat("json_object")}
    whole = (await stuck.http.post(RESPONSES, json=body)).json()
    async with stuck.connect() as socket:
        await send(socket, type="response.create", **body)
        event = (await until_end(socket))[-1]
    assert event["type"] == "response.incomplete"
    for response in (whole, event["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "grammar"}
        assert response["output"][0]["status"] == "incomplete"
        again = (await stuck.http.get(f"{RESPONSES}/{response['id']}")).json()
        assert again == response
    conversation = whole["id"]
    tail = {"input": "y", "previous_response_id": conversation}
    assert (await stuck.http.post(RESPONSES, json=tail)).json()["status"] == "completed"
    metrics = (await stuck.http.get("/metrics")).text
    assert 'finished_reason="grammar"' in metrics


# -- the stock client -----------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str
    tags: list[str]


async def test_the_stock_client_parses(served: Served) -> None:
    person = Person(name="Zoë", tags=["a"])
    served.engine.script = served.tokenizer.encode(person.model_dump_json())
    chat, responses = served.client.chat.completions, served.client.responses
    asked: Any = {"model": "tiny", "messages": _USER, "response_format": Person}
    completion = await chat.parse(**asked, n=2, seed=1)
    assert [choice.message.parsed for choice in completion.choices] == [person] * 2
    async with chat.stream(**asked) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == person
    asked = {"model": "tiny", "input": "hello", "text_format": Person}
    response = await responses.parse(**asked)
    assert response.output_parsed == person
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    async with responses.stream(**asked) as events:
        assert (await events.get_final_response()).output_parsed == person
    made = {each.sampling_params.structured_outputs for each in served.engine.submitted.values()}
    assert len(made) == 1  # the same from each
    (grammar,) = made
    assert grammar is not None
    assert json.loads(grammar.text)["properties"].keys() == {"name", "tags"}
