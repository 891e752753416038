"""The Python client's outputs of a format: what is sent, what is parsed, and what is refused."""

from __future__ import annotations

import json
from enum import StrEnum
from itertools import pairwise
from typing import Any

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from penstock.clients import (
    AsyncClient,
    Client,
    InvalidRequestError,
    ResponseFailedError,
    UnfinishedOutputError,
    output_text,
)
from penstock.clients.python.objects import ChatCompletion, Response
from penstock.clients.python.output_format import OutputFormat

from ..system.processes import Served


class Kind(StrEnum):
    TOWN = "town"
    CITY = "city"


class Place(BaseModel):
    name: str = Field(max_length=12)
    kind: Kind


class Trip(BaseModel):
    begin: Place
    stops: list[Place] = Field(max_length=2)
    days: int = Field(ge=1, le=30)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str


class Page(BaseModel):
    """With a property of the name of a keyword."""

    properties: dict[str, int]


class Even(BaseModel):
    number: int = Field(ge=0, le=99)

    @field_validator("number")
    @classmethod
    def _is_even(cls, number: int) -> int:
        if number >= 0:
            raise ValueError("never good enough")
        return number


class Numbers(RootModel[list[int]]):
    pass


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
QUESTION: list[Any] = [{"role": "user", "content": "Where do we go?"}]
ASKED: dict[str, Any] = {"model": "demo", "seed": 3, "temperature": 1}


def completion(*contents: tuple[str, str]) -> ChatCompletion:
    choices: list[Any] = [
        {"index": index, "message": {"role": "assistant", "content": content},
         "finish_reason": reason, "logprobs": None}
        for index, (content, reason) in enumerate(contents)
    ]  # fmt: skip
    usage: Any = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "demo",
            "choices": choices, "usage": usage}  # fmt: skip


def response(status: str, text: str, **more: Any) -> Response:
    told: Any = {
        "id": "resp_1", "status": status, "error": None, "incomplete_details": None,
        "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}],
    }  # fmt: skip
    return told | more


def schema_of(kind: Any) -> Any:
    return OutputFormat(kind).response_format()["json_schema"]["schema"]


def test_a_class_is_sent_as_its_schema() -> None:
    form = OutputFormat(Trip).response_format()
    assert (form["type"], form["json_schema"]["name"]) == ("json_schema", "Trip")
    assert form["json_schema"]["strict"] is True
    for kind in (Trip, Open, Page, Numbers):
        assert schema_of(kind) == kind.model_json_schema()
    trips = TypeAdapter(list[Trip])
    assert schema_of(trips) == trips.json_schema()


def test_a_schema_is_sent_as_it_is() -> None:
    for schema in (SCHEMA, {}, {"type": ["null", "integer"]}, {"$ref": "#/$defs/a", "$defs": {}}):
        assert schema_of(schema) is schema
    assert OutputFormat(SCHEMA).text({"verbosity": "low"}) == {
        "verbosity": "low",
        "format": {"type": "json_schema", "name": "output", "strict": True, "schema": SCHEMA},
    }
    for own in (
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": {"name": "mine", "schema": SCHEMA}},
    ):
        assert OutputFormat(own).response_format() == own
        assert OutputFormat(own).text(None) == {"format": own}


def test_a_name_has_only_what_the_server_takes() -> None:
    class Box(BaseModel):
        content: int

    for name, sent in (("Box[int, str]", "Box_int__str_"), ("Ö" * 70, "_" * 64)):
        Box.__name__ = name
        assert OutputFormat(Box).text(None)["format"]["name"] == sent


@pytest.mark.parametrize("kind", ["object", 7, None, True, int])
def test_what_is_no_format(kind: Any) -> None:
    with pytest.raises(ValueError, match="is not a pydantic class, a TypeAdapter or a JSON Schema"):
        OutputFormat(kind)


def test_every_choice_is_parsed() -> None:
    text = '{"name": "Ulm", "kind": "city"}'
    place = Place(name="Ulm", kind=Kind.CITY)
    for kind, parsed in (
        (Place, place), (TypeAdapter(Place), place), (Place.model_json_schema(), json.loads(text)),
        ({"type": "json_object"}, json.loads(text)), ({"type": "text"}, text),
    ):  # fmt: skip
        answer = OutputFormat(kind).parse_chat(completion((text, "stop"), (text, "stop")))
        assert [choice["message"]["parsed"] for choice in answer["choices"]] == [parsed, parsed]
        assert answer["choices"][1]["message"]["content"] == text
        told = OutputFormat(kind).parse_response(response("completed", text))
        assert told["output_parsed"] == parsed


@pytest.mark.parametrize("reason", ["length", "grammar", None])
def test_a_completion_that_broke_off_is_not_parsed(reason: Any) -> None:
    answer = completion(('{"name": "Ulm", "kind": "city"}', "stop"), ('{"na', reason))
    with pytest.raises(UnfinishedOutputError) as caught:
        OutputFormat(Place).parse_chat(answer)
    assert str(caught.value) == f"the answer ended before its output was complete: {reason}"
    assert caught.value.reason == str(reason)
    assert caught.value.answer is answer


@pytest.mark.parametrize(
    ("status", "details", "reason"),
    [
        ("incomplete", {"reason": "max_output_tokens"}, "max_output_tokens"),
        ("incomplete", {"reason": "grammar"}, "grammar"),
        ("cancelled", None, "cancelled"),
        ("in_progress", None, "in_progress"),
    ],
)
def test_a_response_that_broke_off_is_not_parsed(status: str, details: Any, reason: str) -> None:
    told = response(status, '{"na', incomplete_details=details)
    with pytest.raises(UnfinishedOutputError, match=f"complete: {reason}$") as caught:
        OutputFormat(Place).parse_response(told)
    assert caught.value.reason == reason
    assert caught.value.answer is told


def test_a_response_that_failed_says_why() -> None:
    failed = response("failed", "", error={"code": "engine_dead", "message": "it died"})
    with pytest.raises(ResponseFailedError, match="it died"):
        OutputFormat(Place).parse_response(failed)


# -- against the real server ---------------------------------------------------------------------


def choices_of(completion: ChatCompletion) -> list[Any]:
    """Without a field that only a whole answer has."""
    choices: list[Any] = completion["choices"]
    messages = [{**choice["message"], "refusal": None} for choice in choices]
    return [
        {**choice, "message": message} for choice, message in zip(choices, messages, strict=True)
    ]


@pytest.mark.parametrize("kind", [Trip, TypeAdapter(list[Place]), SCHEMA], ids=str)
def test_whole_and_streamed_outputs_are_parsed(demo_server: Served, kind: Any) -> None:
    asked = {**ASKED, "max_output_tokens": 400, "input": "Where do we go?"}
    with Client(demo_server.base_url) as client, client.connect() as socket:
        whole = client.responses.parse(**asked, text_format=kind)
        parsed = whole["output_parsed"]
        assert type(parsed) is (Trip if kind is Trip else dict if kind is SCHEMA else list)
        for stream in (
            client.responses.stream(**asked, text_format=kind),
            socket.create(**asked, text_format=kind),
            client.responses.follow(whole["id"], text_format=kind),
        ):
            with stream:
                texts = [stream.text for _ in stream]
                assert stream.final()["output_parsed"] == parsed
            assert all(text.startswith(before) for before, text in pairwise(texts))
            assert texts[-1] == output_text(whole)
        chat = {**ASKED, "max_tokens": 400, "messages": QUESTION}
        answer = client.chat.parse(**chat, response_format=kind, n=2)
        with client.chat.stream(**chat, response_format=kind, n=2) as chunks:
            final = chunks.final()
        assert choices_of(final) == choices_of(answer)
        assert chunks.text == answer["choices"][0]["message"]["content"]
        for choice in final["choices"]:
            assert type(choice["message"]["parsed"]) is type(parsed)


async def test_the_same_on_asyncio(demo_server: Served) -> None:
    async with AsyncClient(demo_server.base_url) as client, client.connect() as socket:
        asked: dict[str, Any] = {**ASKED, "input": "Where?", "text_format": Place}
        response = await client.responses.parse(**asked)
        async with client.responses.stream(**asked) as stream:
            assert (await stream.final())["output_parsed"] == response["output_parsed"]
        lane = await socket.create(**asked)
        assert (await lane.final())["output_parsed"] == response["output_parsed"]
        chat: dict[str, Any] = {**ASKED, "messages": QUESTION, "response_format": Place}
        answer = await client.chat.parse(**chat, max_tokens=100)
        async with client.chat.stream(**chat, max_tokens=100) as chunks:
            assert choices_of(await chunks.final()) == choices_of(answer)


def test_what_is_not_parsed_says_why(demo_server: Served) -> None:
    responses = {**ASKED, "input": "Where?", "max_output_tokens": 5}
    chat = {**ASKED, "messages": QUESTION, "max_tokens": 5}
    with Client(demo_server.base_url) as client:
        for call, reason in (
            (lambda: client.responses.parse(**responses, text_format=Trip), "max_output_tokens"),
            (lambda: client.responses.stream(**responses, text_format=Trip).final(),
             "max_output_tokens"),
            (lambda: client.chat.parse(**chat, response_format=Trip), "length"),
            (lambda: client.chat.stream(**chat, response_format=Trip).final(), "length"),
        ):  # fmt: skip
            with pytest.raises(UnfinishedOutputError) as caught:
                call()
            assert caught.value.reason == reason
            assert caught.value.answer["usage"] is None or caught.value.answer["id"]
        with pytest.raises(ValidationError, match="never good enough"):
            client.chat.parse(**{**chat, "max_tokens": 30}, response_format=Even)
        unsupported = {"type": "array", "items": {"not": {"type": "string"}}}
        with pytest.raises(InvalidRequestError) as refused:
            client.chat.parse(**chat, response_format=unsupported)
        assert refused.value.code == "invalid_json_schema"
        assert (refused.value.param or "").startswith("response_format")
        with pytest.raises(InvalidRequestError) as refused:
            client.responses.parse(**responses, text_format=unsupported)
        assert (refused.value.param or "").startswith("text.format")


def test_a_chat_stream_has_its_completion(demo_server: Served) -> None:
    """Logprobs and usage, too."""
    asked = {**ASKED, "messages": QUESTION, "max_tokens": 12, "n": 2, "logprobs": True}
    with Client(demo_server.base_url) as client:
        whole = client.chat.create(**asked)
        with client.chat.stream(**asked, stream_options={"include_usage": True}) as stream:
            final = stream.final()
        assert choices_of(final) == choices_of(whole)
        assert final["object"] == whole["object"]
        assert final["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        with client.chat.stream(**asked) as stream:
            next(stream)
            stream.close()
            with pytest.raises(ValueError, match="closed before its end"):
                stream.final()
