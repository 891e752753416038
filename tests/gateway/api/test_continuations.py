"""An engine dies amid an answer, or its gateway leaves: what goes on gets all that the first had,
and the client gets what it would have got, events numbered on.

The same for every kind of request, because each has a field that could be lost on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.request import Adapter, Request
from penstock.gateway.engines import engine_link
from penstock.gateway.storage.conversations.ids import tree_of

from ...redis_server import RedisServer
from ..conftest import ANSWER, SIDE, Serve, Served
from ..generation.images.test_images import data_url, file_of, small
from ..sockets import send, until_end
from .keyed import CHAT, COMPLETIONS
from .test_idempotency_redis import another
from .test_tools import CHAT_TOOLS, OUTPUT, PARSERS, TOOLS

RESPONSES = "/v1/responses"
ADAPTER = Adapter(name="tuned", path="/tuned", digest="1")
KEYS = """
keys = [{ key = "of-one", tenant = "one" }]
tenants.one = { weight = 2.5, min_priority = -5, max_priority = 5, allow_cache_salt = true }
"""
HEADERS = {"Authorization": "Bearer of-one"}
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = '{"name": "Zoë 😀", "age": 42}'
PICTURE = file_of(small())
SHOWN = [
    {"role": "user", "content": [
        {"type": "input_text", "text": "what is this?"},
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
    ]}
]  # fmt: skip

_NUMBERS = itertools.count()

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of request.

    Attributes:
        carried: whether a request has what makes this kind.
        says: what the engine answers.
        num_cuts: of the answer, each by a death.
        is_single: it has one output, which goes on where it was cut; others begin anew.
        socket: it comes over a WebSocket.
        has_key: its answer is kept, under an `Idempotency-Key` of its own.
    """

    path: str
    body: dict[str, Any]
    carried: Callable[[Request], bool]
    says: str = ANSWER
    num_cuts: int = 3
    is_single: bool = True
    socket: bool = False
    has_key: bool = False


def _has_image(request: Request) -> bool:
    (image,) = request.images
    tokens = request.prompt_token_ids[image.offset : image.offset + image.num_tokens]
    digest = hashlib.sha256(PICTURE).hexdigest()
    is_whole = (image.data, image.digest) == (PICTURE, digest)
    return is_whole and len(tokens) == image.num_features == SIDE**2 and len(set(tokens)) == 1


def _has_grammar(request: Request) -> bool:
    grammar = request.sampling_params.structured_outputs
    return grammar is not None and '"age"' in grammar.text


KINDS: dict[str, Kind] = {
    "adapter": Kind(
        path=RESPONSES,
        body={"model": "tuned", "input": "hello"},
        carried=lambda request: request.adapter == ADAPTER,
    ),
    "image": Kind(path=RESPONSES, body={"input": SHOWN}, carried=_has_image),
    "schema": Kind(
        path=RESPONSES,
        body={
            "input": "hello",
            "text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        },
        carried=_has_grammar,
        says=OBJECT,
        num_cuts=6,
    ),
    "tools": Kind(
        path=RESPONSES,
        body={"input": "hello", "tools": TOOLS, "tool_choice": "required", "seed": 1},
        carried=lambda request: request.sampling_params.structured_outputs is not None,
        says=OUTPUT,
        num_cuts=30,
    ),
    "tools in chat": Kind(
        path=CHAT,
        body={"messages": USER, "tools": CHAT_TOOLS, "n": 2},
        carried=lambda request: request.sampling_params.n == 2,
        says=OUTPUT,
        is_single=False,
    ),
    "token lists": Kind(
        path=CHAT,
        body={
            "messages": USER,
            "allowed_token_ids": list(range(256)),
            "bad_words": ["moon", " sun"],
        },
        carried=lambda request: (
            request.sampling_params.allowed_token_ids == tuple(range(256))
            and len(request.sampling_params.bad_words_token_ids) >= 2
            and all(request.sampling_params.bad_words_token_ids)
        ),
        has_key=True,
    ),
    "prediction": Kind(
        path=CHAT,
        body={
            "messages": USER,
            "prediction": {"type": "content", "content": ANSWER.replace("wörld", "moon")},
        },
        carried=lambda request: len(request.prediction_token_ids) > 10,
    ),
    "prediction of a logged answer": Kind(
        path=COMPLETIONS,
        body={
            "prompt": "hello",
            "max_tokens": 1000,
            "prediction": {"type": "content", "content": ANSWER.replace("wörld", "moon")},
        },
        carried=lambda request: len(request.prediction_token_ids) > 10,
        has_key=True,
    ),
    "tenant": Kind(
        path=RESPONSES,
        body={"input": "hello", "priority": -3, "cache_salt": "salt", "store": True},
        carried=lambda request: (
            (request.tenant, request.weight, request.priority) == ("one", 2.5, -3)
            and "salt" in request.cache_salt
            and request.retention is not None
        ),
        socket=True,
    ),
    "seed and limit": Kind(
        path=RESPONSES,
        body={"input": "hello", "seed": 7, "temperature": 0.9, "max_output_tokens": 12}
        | {"frequency_penalty": 0.4, "min_tokens": 3, "top_logprobs": 1}
        | {"include": ["message.output_text.logprobs"]},
        carried=lambda request: (
            (request.sampling_params.seed, request.sampling_params.max_tokens) == (7, 12)
            and request.sampling_params.logprobs == 1
        ),
    ),
    "stop string": Kind(
        path=COMPLETIONS,
        body={"prompt": "hello", "max_tokens": 1000, "stop": ["engine"], "logprobs": 1},
        carried=lambda request: request.sampling_params.logprobs == 1,
    ),
}


@pytest.fixture
def settings(vision_path: Path, tmp_path: Path) -> dict[str, Any]:
    """Of a gateway that takes all kinds."""
    (tmp_path / "keys.toml").write_text(KEYS)
    return {
        "model": ModelConfig(model=str(vision_path)),
        "enable_lora": True,
        "api_keys_file": str(tmp_path / "keys.toml"),
        "info": {"adapters": (ADAPTER,), "scheduling_policy": "priority"},
        **PARSERS,
    }


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is back is found at once."""
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 1000)


async def _keep_alive(served: Served) -> None:
    num_restarts = served.engine.num_deaths
    while True:
        await asyncio.sleep(0.002)
        if served.engine.num_deaths > num_restarts:
            num_restarts += 1
            served.engine.restart()


async def _ask(served: Served, kind: Kind) -> list[Event]:
    if kind.socket:
        async with served.connect(additional_headers=HEADERS) as socket:
            await send(socket, type="response.create", **kind.body)
            return await until_end(socket)
    usage = {} if kind.path == RESPONSES else {"stream_options": {"include_usage": True}}
    headers = HEADERS | ({"Idempotency-Key": f"key-{next(_NUMBERS)}"} if kind.has_key else {})
    body = {"stream": True, **usage, **kind.body}
    async with served.http.stream("POST", kind.path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    if kind.path != RESPONSES:
        assert lines.count("data: [DONE]") == 1
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


_OF_ONE_ANSWER = ("id", "item_id", "call_id", "created", "created_at", "completed_at")


def anonymous(value: Any) -> Any:
    """Without what differs between two answers to one request."""
    if isinstance(value, dict):
        return {key: anonymous(each) for key, each in value.items() if key not in _OF_ONE_ANSWER}
    return [anonymous(each) for each in value] if isinstance(value, list) else value


def add(whole: Event, part: Event) -> None:
    """Put a further part of it to what is known of a choice: a word that comes twice stands there
    twice."""
    for key, value in part.items():
        if isinstance(value, dict):
            add(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            for each in value:
                add(whole.setdefault(key, {}).setdefault(each["index"], {}), {**each, "index": ()})
        elif isinstance(value, str | list):
            whole[key] = whole.get(key, type(value)()) + value
        elif value is not None:
            whole[key] = value


def told(kind: Kind, events: Sequence[Event]) -> list[Event]:
    """What a client has in the end, however the text came in pieces."""
    whole: list[Event] = []
    choices: dict[int, Event] = {}
    for event in anonymous(list(events)):
        last = whole[-1] if whole else {}
        for choice in event.pop("choices", ()):
            add(choices.setdefault(choice.pop("index"), {}), choice)
        if kind.path != RESPONSES:
            whole += [event] if event.get("usage") else []
        elif "delta" in event and all(
            event.get(key) == last.get(key) for key in ("type", "output_index", "content_index")
        ):
            last["delta"] += event["delta"]
            last["logprobs"] = last.get("logprobs", []) + event.get("logprobs", [])
        else:
            whole.append({**event, "sequence_number": None})
    return [*whole, *(choices[index] for index in sorted(choices))]


def _check_numbers(kind: Kind, events: Sequence[Event]) -> None:
    if kind.path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        ids = {event["response"]["id"] for event in events if "response" in event}
        assert len(ids) == 1
        items = [item["id"] for item in events[-1]["response"]["output"]]
        assert {event["item_id"] for event in events if "item_id" in event} <= set(items)


def _num_output_tokens(kind: Kind, events: Sequence[Event]) -> int:
    """Of one output."""
    if kind.path == RESPONSES:
        return int(events[-1]["response"]["usage"]["output_tokens"])
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return int(usage["completion_tokens"]) // kind.body.get("n", 1)


@pytest.mark.parametrize("name", KINDS)
async def test_the_next_engine_is_given_all_of_it(
    serve: Serve, settings: dict[str, Any], name: str
) -> None:
    kind = KINDS[name]
    async with serve(**settings) as served:
        engine = served.engine
        script = engine.script = served.tokenizer.encode(kind.says)
        engine.scripts[1] = script[3:]
        engine.drafts = (2, 1)
        events = await _ask(served, kind)
        expected = told(kind, events)
        _check_numbers(kind, events)
        num_tokens = min(len(script), _num_output_tokens(kind, events))
        reviving = asyncio.create_task(_keep_alive(served))
        for cut in range(1, num_tokens, -(-num_tokens // kind.num_cuts)):
            engine.submitted.clear()
            num_deaths, engine.dies_in = engine.num_deaths, cut
            events = await _ask(served, kind)
            assert engine.num_deaths == num_deaths + 1, cut
            assert told(kind, events) == expected, cut
            _check_numbers(kind, events)
            first, again = engine.submitted.values()
            assert kind.carried(first)
            assert again == msgspec.structs.replace(
                first,
                request_id=f"{first.request_id}~1",
                output_token_ids=tuple(script[:cut]) if kind.is_single else (),
            )
        reviving.cancel()


# -- another gateway -----------------------------------------------------------------------------


def _another(settings: dict[str, Any], folder: Path) -> AbstractAsyncContextManager[Any]:
    """A gateway of the same model and settings."""
    ours = {key: value for key, value in settings.items() if key not in ("info", "model")}
    return another(Path(settings["model"].model), folder, **ours)


@pytest.mark.redis
@pytest.mark.usefixtures("patient_logs")
async def test_another_gateway_goes_on_with_all_of_it(
    serve: Serve, settings: dict[str, Any], tmp_path: Path, shared_server: RedisServer
) -> None:
    """From what Redis has of the request, and of its answer so far."""
    settings["redis_url"] = shared_server.patient_url
    body = {"stream": True, "model": "tuned", "input": SHOWN, "seed": 7, "priority": -3}
    body |= {"tools": TOOLS, "tool_choice": "required", "cache_salt": "salt"}
    body["prediction"] = {"type": "content", "content": "Let me see.\nNo."}
    async with serve(**settings) as served, _another(settings, tmp_path) as other:
        engine = served.engine
        script = engine.script = served.tokenizer.encode(OUTPUT)
        engine.step_s = 0.01
        events: list[Event] = []
        async with other.http.stream("POST", RESPONSES, json=body, headers=HEADERS) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 12:
                    engine.may_speak.clear()
                    await other.app.state.log_store.hand_over()
                    break
        engine.step_s = 0.0
        engine.may_speak.set()
        await served.submitted(2)
        known, url = events[-1]["sequence_number"], f"{RESPONSES}/{events[0]['response']['id']}"
        query = {"stream": "true", "starting_after": str(known)}
        rest = await served.http.get(url, params=query, headers=HEADERS)
        lines = rest.text.splitlines()
        events += [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        first, again = engine.submitted.values()
        num_known = len(again.output_token_ids)
        assert 0 < num_known < len(script)
        assert again == msgspec.structs.replace(
            first, request_id=again.request_id, output_token_ids=tuple(script[:num_known])
        )
        assert first.adapter == ADAPTER
        assert _has_image(first)
        assert first.prediction_token_ids
        kind = Kind(path=RESPONSES, body=body, carried=lambda _: True)
        _check_numbers(kind, events)
        assert told(kind, events) == told(kind, await _ask(served, kind))


@pytest.mark.redis
async def test_a_turn_at_another_gateway_has_the_images_of_those_before(
    serve: Serve, settings: dict[str, Any], tmp_path: Path, shared_server: RedisServer
) -> None:
    """Each of which Redis keeps once."""
    settings["redis_url"] = shared_server.patient_url
    async with serve(**settings) as served, _another(settings, tmp_path) as other:
        made = await served.http.post("/v1/conversations", json={}, headers=HEADERS)
        for gateway, said in ((other.http, SHOWN), (served.http, USER), (other.http, USER)):
            body = {"input": said, "conversation": made.json()["id"]}
            answer = await gateway.post(RESPONSES, json=body, headers=HEADERS)
            assert answer.status_code == 200, answer.text
        turns = list(served.engine.submitted.values())
        assert all(map(_has_image, turns))
        assert len(turns) == 3
        for earlier, later in pairwise(turns):
            prompt = later.prompt_token_ids[: len(earlier.prompt_token_ids)]
            assert prompt == earlier.prompt_token_ids
    with shared_server.client() as client:
        key = f"penstock:{{{tree_of(made.json()['id'])}}}:token_ids"
        assert client.hvals(key).count(PICTURE) == 1
