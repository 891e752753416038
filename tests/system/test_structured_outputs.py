"""Outputs that match a schema, from a real server: by the stock `openai` client, at temperature 1
over many seeds, as several choices and as beams; and beside requests that are hard to compile."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from pydantic import BaseModel, Field, TypeAdapter

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text import Tokenizer

from .processes import END_S, Served, serve

MODEL = "demo"
QUESTION: list[Any] = [{"role": "user", "content": "Plan a trip."}]
NUM_SEEDS, _NUM_FIRST = 200, 24
MAX_TOKENS = 400


class Place(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["town", "city"]


class Trip(BaseModel):
    begin: Place
    stops: list[Place] = Field(max_length=2)
    days: int = Field(ge=1, le=30)
    note: str | None = Field(max_length=20)


class Reading(BaseModel):
    sensor: str = Field(pattern="^[A-Z]{2}-[0-9]{3}$")
    values: list[Annotated[int, Field(ge=-99, le=99)]] = Field(min_length=2, max_length=5)
    is_valid: bool
    level: Literal[1, 2, "high"]
    extra: Place | Annotated[int, Field(ge=0, le=9)] | None


SCHEMAS: Mapping[str, Any] = {
    "a trip": TypeAdapter(Trip).json_schema(),
    "a reading": TypeAdapter(Reading).json_schema(),
    "an array": {
        "type": "array",
        "items": {"enum": ["red", "green", "blue", 4, None, {"a": [1]}]},
        "minItems": 1,
        "maxItems": 6,
    },
    "a recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "maxLength": 8},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["label", "next"],
                "additionalProperties": False,
            }
        },
    },
}
VALID = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}


def closed(schema: Any) -> Any:
    """Without properties beyond those that it names."""
    more = {"additionalProperties": False} if "properties" in schema else {}
    defs = {name: closed(one) for name, one in schema.get("$defs", {}).items()}
    return {**more, **schema, **({"$defs": defs} if defs else {})}


def format_of(name: str) -> dict[str, Any]:
    schema = {"name": "output", "strict": True, "schema": closed(SCHEMAS[name])}
    return {"type": "json_schema", "json_schema": schema}


@pytest.fixture
def client(demo_server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_server.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


# -- the stock client ----------------------------------------------------------------------------


def test_chat_is_parsed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.parse(**asked, response_format=Trip, max_tokens=MAX_TOKENS)
    trip = whole.choices[0].message.parsed
    assert isinstance(trip, Trip)
    with client.chat.completions.stream(
        **asked, response_format=Trip, max_tokens=MAX_TOKENS
    ) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == trip
    assert len(partial) > 5
    several = client.chat.completions.parse(
        **asked | {"temperature": 1, "seed": 5},
        response_format=Trip,
        n=3,
        max_tokens=MAX_TOKENS,
    )
    assert all(isinstance(choice.message.parsed, Trip) for choice in several.choices)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, response_format=Trip, max_tokens=5)


def test_responses_are_parsed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Plan a trip.", "temperature": 0}
    whole = client.responses.parse(**asked, text_format=Trip, max_output_tokens=MAX_TOKENS)
    assert isinstance(whole.output_parsed, Trip)
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == "json_schema"
    with client.responses.stream(**asked, text_format=Trip, max_output_tokens=MAX_TOKENS) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == whole.output_parsed
    assert "".join(deltas) == whole.output_text
    short = client.responses.create(**asked, text=whole.text.to_dict(), max_output_tokens=5)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_any_json_is_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer with JSON."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    choice = answer.choices[0]
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["red", "dark red", "blue"]}, "red|dark red|blue"),
        ({"grammar": 'start: "x" (" " NUMBER){2,4}\nNUMBER: /[0-9]{1,3}/'}, "x( [0-9]{1,3}){2,4}"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 17}}, "[5-9]|1[0-7]"),
    ],
)
def test_vllms_forms(client: OpenAI, wanted: dict[str, Any], pattern: str) -> None:
    for seed in range(5):
        asked: dict[str, Any] = {"model": MODEL, "seed": seed, "max_tokens": 60}
        more = {"extra_body": {"structured_outputs": wanted}}
        chat = client.chat.completions.create(**asked, messages=QUESTION, **more)  # type: ignore[arg-type]
        text = client.completions.create(**asked, prompt="Once", **more)  # type: ignore[arg-type]
        for told in (chat.choices[0].message.content or "", text.choices[0].text):
            assert re.fullmatch(pattern, told), told
        assert (chat.choices[0].finish_reason, text.choices[0].finish_reason) == ("stop", "stop")


# -- many seeds ----------------------------------------------------------------------------------


class Ends(Counter[str]):
    """How outputs ended; those that ended with `stop` are checked."""

    def take(self, name: str, text: str, reason: str | None) -> None:
        assert reason in ("stop", "length"), reason
        self[reason] += 1
        if reason == "stop":
            VALID[name].validate(json.loads(text))


async def _chat(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, str]]:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    body = body | {"stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for piece in json.loads(line.removeprefix("data: "))["choices"]:
                index = piece["index"]
                texts[index] = texts.get(index, "") + (piece["delta"].get("content") or "")
                if piece["finish_reason"] is not None:
                    assert index not in reasons
                    reasons[index] = piece["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(texts)]


def _asked(name: str, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 1,
        "max_tokens": MAX_TOKENS,
        "response_format": format_of(name),
        **more,
    }


@pytest.mark.parametrize(
    "seeds",
    [range(_NUM_FIRST), pytest.param(range(_NUM_FIRST, NUM_SEEDS), marks=pytest.mark.exhaustive)],
    ids=["some", "many"],
)
async def test_what_ends_is_valid_whatever_the_seed(demo_server: Served, seeds: range) -> None:
    """Streamed and not; what is drawn depends on the seed alone."""
    ends, names = Ends(), list(SCHEMAS)
    at_once = asyncio.Semaphore(32)

    async def ask(seed: int) -> None:
        name = names[seed % len(names)]
        body = _asked(name, seed=seed)
        async with at_once:
            whole = await _chat(client, body)
            assert await _streamed(client, body) == whole
        for text, reason in whole:
            ends.take(name, text, reason)

    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as client:
        await asyncio.gather(*map(ask, seeds))
    print(ends)
    assert ends.total() == len(seeds)
    assert ends["length"] <= len(seeds) / 10, ends


@pytest.mark.exhaustive
async def test_choices_and_beams_are_valid(demo_server: Served) -> None:
    """Choices are the same whether streamed or not, beams whether asked once or again."""
    ends, different = Ends(), set[int]()

    async def ask(name: str) -> None:
        several = _asked(name, n=4, seed=11)
        choices = await _chat(client, several)
        assert await _streamed(client, several) == choices
        different.add(len(set(choices)))
        beams = _asked(name, n=4, temperature=0, use_beam_search=True, max_tokens=100)
        found = await _chat(client, beams)
        assert await _chat(client, beams) == found
        assert len(found) == 4
        for text, reason in [*choices, *found]:
            ends.take(name, text, reason)

    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as client:
        await asyncio.gather(*(ask(name) for name in SCHEMAS))
    assert ends["stop"] > ends["length"], ends
    assert 4 in different


# -- what is hard to compile ---------------------------------------------------------------------


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for level in range(depth):
        schema = {"oneOf": [{"type": "array", "items": schema}, {"const": f"level {level}"}]}
    return schema


_ARMS = [9973, 9967, 9949, 9941]
BOMBS: Mapping[str, dict[str, Any]] = {
    "nested oneOf": {"json": _nested(40)},
    "1 MB enum": {"json": {"enum": [f"{number:0100d}" for number in range(10_000)]}},
    "nested stars": {"regex": "(((a*)*)*)*b"},
    "recursion": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                      "b": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
        }
    },
    "huge maxItems": {
        "json": {"type": "array", "items": {"type": "string", "maxLength": 10**9},
                 "maxItems": 10**9, "minItems": 10**8},
    },
    "lark loop": {"grammar": "start: a\na: a b | b a | a a | \nb: b a | a"},
    "multiples": {"json": {"allOf": [{"type": "integer", "multipleOf": arm} for arm in _ARMS]}},
}  # fmt: skip


REFUSED = {"1 MB enum": "has more than 262144 bytes", "multiples": "takes too long to compile"}


@pytest.mark.exhaustive
async def test_what_is_hard_to_compile_leaves_other_streams_alone(demo_server: Served) -> None:
    story = _asked("a trip", temperature=0, max_tokens=300, ignore_eos=True)
    del story["response_format"]
    object_ = _asked("a trip", seed=3)
    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as client:
        expected = [await _streamed(client, story), await _streamed(client, object_)]
        is_over = False

        async def go_on() -> int:
            num_rounds = 0
            while not is_over or not num_rounds:
                got = await asyncio.gather(_streamed(client, story), _streamed(client, object_))
                assert got == expected
                num_rounds += 1
            return num_rounds

        others = [asyncio.create_task(go_on()) for _ in range(2)]
        try:
            bodies = [
                _asked("a trip", max_tokens=30, structured_outputs=bomb) for bomb in BOMBS.values()
            ]
            for body in bodies:
                del body["response_format"]
            # Twice: what is refused stays refused.
            for _ in range(2):
                answers = await asyncio.gather(
                    *(client.post("/v1/chat/completions", json=body) for body in bodies)
                )
                for name, answer in zip(BOMBS, answers, strict=True):
                    _check_bomb(name, answer)
        finally:
            is_over = True
            await asyncio.gather(*others)


def _check_bomb(name: str, answer: httpx.Response) -> None:
    """Refused for its reason, or answered as it should be."""
    print(f"{name}: {answer.status_code} {answer.text[:200]}")
    told = answer.json()
    if name not in REFUSED:
        assert answer.status_code == 200, told
        assert told["choices"][0]["finish_reason"] in ("stop", "length", "grammar")
    else:
        assert answer.status_code == 400, told
        assert told["error"]["param"] == "structured_outputs.json"
        assert REFUSED[name] in told["error"]["message"]


# -- beside thoughts -----------------------------------------------------------------------------

QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if not (enable_thinking | default(true)) %}\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA = (
    "{% for message in messages %}<|turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.reasoning_content %}<|channel>thought\n{{ message.reasoning_content }}<channel|>"
    "{% endif %}{{ message.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MUSE = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}"
    "{% if message.reasoning_content %} to=self<|message|>{{ message.reasoning_content }}<|eom|>"
    "<|start|>assistant{% endif %} to=user{% endif %}<|message|>{{ message.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# vLLM's thread: the template of its model, what else was asked, the tokens that the model would
# write wherever it may, the first ones most of all, and whether it thinks then.
THREADS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {
    "44012": (QWEN, {}, (), True),  # no schema in responses where a parser of thoughts was set
    "44012 without thoughts": (QWEN, {"enable_thinking": False}, (), False),
    "50938": (GEMMA, {}, ("-", "{"), False),  # what was written before a thought was in the answer
    "50938 with thoughts": (GEMMA, {}, ("-", "<"), True),
    "52594": (MUSE, {}, ("S", "us"), False),  # no schema where the answer is in a channel
    "52594 with thoughts": (MUSE, {}, ("S", "s", " to"), True),
}
OK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
BUDGET = 9


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("trusting") / "log"
    with serve("--trust-request-chat-template", log=log) as served:
        yield served


@pytest.mark.exhaustive
@pytest.mark.parametrize("thread", THREADS)
def test_thoughts_and_schemas_as_in_vllms_threads(trusting: Served, thread: str) -> None:
    """In responses and in chat, streamed or not: the thought is one of its budget, the answer
    matches its schema, and neither is in the other's place."""
    template, more, wanted, thinks = THREADS[thread]
    tokenizer = Tokenizer.from_directory(DEMO_MODEL_PATH)
    bias = {}
    for text, weight in zip(wanted, (100, 50, 50), strict=False):
        [token_id] = tokenizer.encode(text, add_special_tokens=False)
        bias[str(token_id)] = weight
    extra = {
        "chat_template": template,
        "thinking_token_budget": BUDGET,
        "logit_bias": bias,
        **more,
    }
    schema = {"name": "probe", "schema": OK, "strict": True}
    question = "Is the sea salty? Answer with the schema."
    url = f"{trusting.base_url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for seed in range(2):
            asked: dict[str, Any] = {"model": MODEL, "temperature": 1}
            sent = {**extra, "seed": seed}
            text: Any = {"format": {"type": "json_schema", **schema}}
            response = client.responses.create(
                **asked, input=question, max_output_tokens=200, text=text, extra_body=sent
            )
            kinds = [item.type for item in response.output]
            assert kinds == ["reasoning", "message"][not thinks :]
            assert json.loads(response.output_text).keys() == {"ok"}
            used = response.usage
            assert used is not None
            assert (used.output_tokens_details.reasoning_tokens > 0) is thinks

            form: Any = {"type": "json_schema", "json_schema": schema}
            messages: Any = [{"role": "user", "content": question}]
            with client.chat.completions.create(
                **asked, messages=messages, max_tokens=200, response_format=form, stream=True,
                extra_body=sent,
            ) as stream:  # fmt: skip
                deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
            assert json.loads("".join(each.content or "" for each in deltas)).keys() == {"ok"}
            thought = "".join(getattr(each, "reasoning_content", "") or "" for each in deltas)
            assert bool(thought.strip()) is thinks
            assert "{" not in thought or "ok" not in thought
