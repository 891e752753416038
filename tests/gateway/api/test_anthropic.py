"""Anthropic's Messages API, by its own client and held against its types."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import anthropic
import pytest
from anthropic.types import (
    Message,
    MessageTokensCount,
    ModelInfo,
    RawMessageStreamEvent,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_create_params as beta_params
from pydantic import TypeAdapter

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer
from penstock.gateway.api.anthropic.conversation import without_billing_line
from penstock.gateway.api.anthropic.schema import CountTokensRequest, MessagesRequest
from penstock.gateway.storage.sealed_text import sealed, unsealed

from ..conftest import ANSWER, IMAGE, Serve, Served, until
from ..fake_engine import NUM_CACHED
from ..generation.images.test_images import file_of, small
from .keyed import KEY
from .test_parameters import known
from .test_tools import ARGUMENTS, CALL, PARSERS, SCHEMA, says, written

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 500}
TOOLS = [
    {"name": "weather", "description": "of a city", "input_schema": SCHEMA},
    {"name": "time", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
TIME = written("time", "{}")
OUTPUT = f"<think>\nHm < m.\n</think>\n\nLet me see.\n{CALL}\n{TIME}"
LINE = "x-anthropic-billing-header: cc_version=2.1.332.7b4; cc_entrypoint=cli; cch=eb6c6;"


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(served) as client:
        yield client


def client_of(served: Served, **settings: Any) -> anthropic.AsyncAnthropic:
    url = f"http://127.0.0.1:{served.port}"
    return anthropic.AsyncAnthropic(
        **{"base_url": url, "api_key": "none", "max_retries": 0, **settings}
    )


async def create(served: Served, **values: Any) -> Message:
    """A whole message, whose JSON is as strict as the client's types."""
    async with client_of(served) as client:
        answer = await client.messages.with_raw_response.create(**BODY | values)
        Message.model_validate_json(await answer.read(), strict=False)
        return await answer.parse()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of a type and an order that the client's types know."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENTS.validate_python(event)
            events.append(event)
    check_order(events)
    return events


def check_order(events: Sequence[dict[str, Any]]) -> None:
    """One message, whose blocks come one after the other, each of deltas of its own kind."""
    deltas = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}
    deltas["input_json_delta"] = "tool_use"
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    number, kind = -1, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (kind, event["index"]) == ("", number + 1)
            number, kind = event["index"], event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert (event["index"], deltas[event["delta"]["type"]]) == (number, kind)
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", number)
            kind = ""
    assert kind == ""


async def stream(served: Served, headers: dict[str, str] | None = None, **values: Any) -> str:
    extra = values.pop("extra_body", {})
    body = BODY | values | extra | {"stream": True}
    answer = await served.http.post("/v1/messages", json=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (
        200,
        "text/event-stream",
    )
    return answer.text


async def both(served: Served, **values: Any) -> Message:
    """A message whole, which is the same as the client's sum of its events."""
    whole = await create(served, **values)
    events_of(await stream(served, **values))
    async with (
        client_of(served) as client,
        client.messages.stream(**BODY | values) as streamed,
    ):
        told = await streamed.get_final_message()
    assert _plain(told) == _plain(whole)
    return whole


def _plain(message: Message) -> Any:
    plain = json.loads(message.model_dump_json(exclude_none=True))
    plain.pop("penstock", None)  # which is in the last event, where the client looks for no more
    numbers = {block.get("id") for block in plain["content"]} - {None}
    plain["content"] = [
        {name: value for name, value in block.items() if name not in ("id", "parsed_output")}
        for block in plain["content"]
    ]
    del plain["id"]
    return plain, len(numbers)


# -- answers --------------------------------------------------------------------------------------


async def test_a_text_whole_and_streamed(served: Served) -> None:
    message = await both(served)
    assert (message.role, message.model, message.type) == ("assistant", "tiny", "message")
    assert message.id.startswith("msg_")
    [block] = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(served.engine.script) + 1


async def test_thoughts_calls_and_text_in_their_order(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        message = await both(served, tools=TOOLS)
        thought, text, weather, time = message.content
        assert (thought.type, thought.thinking) == ("thinking", "Hm < m.")
        assert thought.signature
        assert (text.type, text.text) == ("text", "Let me see.\n")
        assert (weather.type, weather.name, weather.input) == (
            "tool_use",
            "weather",
            json.loads(ARGUMENTS),
        )
        assert (time.name, time.input) == ("time", {})
        assert weather.id != time.id
        assert message.stop_reason == "tool_use"
        details = message.usage.output_tokens_details
        assert details is not None
        assert 0 < details.thinking_tokens < message.usage.output_tokens


async def test_thoughts_are_sealed_or_left_out(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        omitted = {"type": "adaptive", "display": "omitted"}
        thought, *_ = (await both(served, tools=TOOLS, thinking=omitted)).content
        assert thought.type == "thinking"
        assert (thought.thinking, unsealed(thought.signature)) == ("", "Hm < m.")
        first, *_ = (await both(served, tools=TOOLS, thinking={"type": "disabled"})).content
        assert first.type == "text"


async def test_why_an_answer_ends(serve: Serve) -> None:
    async with serve(info={"max_model_len": 256}) as served:
        cut = await both(served, max_tokens=3)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        stopped = await both(served, stop_sequences=["nothing", "fake", "is"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")
        [block] = stopped.content
        assert block.type == "text"
        assert block.text == ANSWER[: ANSWER.index("is")]
        special = await both(served, stop_sequences=["<|end|>"])
        assert (special.stop_reason, special.stop_sequence) == ("stop_sequence", "<|end|>")
        nothing = await both(served, max_tokens=0)
        assert (nothing.content, nothing.usage.output_tokens) == ([], 0)
        assert not served.prompt_of().endswith("<assistant>")
        full = await both(served, max_tokens=4000, extra_body={"ignore_eos": True})
        assert full.stop_reason == "model_context_window_exceeded"


async def test_usage_counts_each_token_once(serve: Serve) -> None:
    async with serve(info={"block_size": 4}) as served:
        plain = (await both(served)).usage
        num_prompt = len(served.engine.submitted.popitem()[1].prompt_token_ids)
        assert (plain.input_tokens, plain.cache_read_input_tokens) == (
            num_prompt - NUM_CACHED,
            NUM_CACHED,
        )
        assert plain.cache_creation_input_tokens == 0
        mark = {"type": "ephemeral"}
        part = {"type": "text", "text": "hello", "cache_control": mark}
        for asked in (
            {"messages": [{"role": "user", "content": [part]}]},
            {"cache_control": mark},
        ):
            marked = (await both(served, **asked)).usage
            assert marked.cache_creation_input_tokens == (num_prompt - 1) // 4 * 4 - NUM_CACHED
            assert marked.cache_creation_input_tokens > 0
            parts = (marked.input_tokens, marked.cache_creation_input_tokens, NUM_CACHED)
            assert sum(parts) == num_prompt
        start, *_, end, _ = events_of(await stream(served, cache_control=mark))
        usage = start["message"]["usage"]
        assert usage | {"output_tokens": 0} == end["usage"] | {"output_tokens": 0}


async def test_pings_come_before_the_first_token(serve: Serve) -> None:
    async with serve(ping_interval_s=0.01) as served:
        for headers in ({}, KEY, KEY):  # live, keyed and resumed
            served.engine.may_speak.clear()
            body = BODY | {"stream": True}
            async with served.http.stream(
                "POST", "/v1/messages", json=body, headers=headers
            ) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if text.count("event: ping") >= 2:
                        assert text.startswith('event: ping\ndata: {"type": "ping"}\n\n')
                        served.engine.may_speak.set()
            assert _text_in(events_of(text)) == ANSWER


def _text_in(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event.get("delta", {}).get("text", "") for event in events)


# -- prompts --------------------------------------------------------------------------------------


async def test_a_conversation_is_the_templates(served: Served) -> None:
    await create(
        served,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    )
    assert served.prompt_of() == (
        "<system>Be brief.\nBe kind.\n<user>a\nb\n<assistant>c\n<user>d\n<assistant>"
    )
    await create(served, messages=[*USER, {"role": "assistant", "content": "It is ("}])
    assert served.prompt_of() == "<user>hello\n<assistant>It is ("


async def test_results_are_of_their_calls(serve: Serve, template: str) -> None:
    """What was thought, said and called comes back as one message, and the results after it."""
    async with serve(chat_template=template, **PARSERS) as served:
        says(served, OUTPUT)
        answer = await create(served, tools=TOOLS)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "12 degrees"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "no clock"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ]
        turns = [*USER, answer.to_param(), {"role": "user", "content": results}]
        await create(served, messages=turns, tools=TOOLS)
        _, _, shown = served.prompt_of().partition("[user]hello")
        ids = [call.id for call in calls]
        assert shown == (
            f"[assistant](Hm < m.)Let me see.\n<weather {ARGUMENTS}><time {{}}>"
            f"[tool {ids[0]}]12 degrees[tool {ids[1]}]Error: no clock[user]Go on.[assistant]"
        )
        await create(served, messages=turns, tools=TOOLS)
        told = [_sealed(answer.to_param()), {"type": "redacted_thinking", "data": "?"}]
        turns[1] = {"role": "assistant", "content": [*told[0]["content"], told[1]]}
        await create(served, messages=turns, tools=TOOLS)
        assert served.prompt_of().endswith(shown)


def _sealed(message: Any) -> dict[str, Any]:
    thought, *others = json.loads(json.dumps([block.model_dump() for block in message["content"]]))
    return {
        "content": [
            {"type": "thinking", "thinking": "", "signature": sealed(thought["thinking"])},
            *others,
        ]
    }


@pytest.fixture
def template() -> str:
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}]"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
        "{{ c.function.arguments }}>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{# <tool_call> #}"
    )


async def test_thoughts_of_older_turns_are_cleared(serve: Serve, template: str) -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, "signature": ""}

    call = {"type": "tool_use", "id": "t", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "noon"}
    said = {"type": "text", "text": "ok"}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thought("A"), said]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [thought("B"), call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [thought("C"), said]},
        {"role": "user", "content": "c"},
    ]
    async with serve(chat_template=template, **PARSERS) as served:
        for keep, left in (
            ({"keep": "all"}, "ABC"),
            ({"keep": {"type": "all"}}, "ABC"),
            ({}, "BC"),
            ({"keep": {"type": "thinking_turns", "value": 1}}, "BC"),
            ({"keep": {"type": "thinking_turns", "value": 2}}, "ABC"),
        ):
            edit = {"type": "clear_thinking_20251015", **keep}
            extra = {"context_management": {"edits": [edit]}}
            await create(served, messages=turns, extra_body=extra)
            prompt = served.prompt_of()
            assert [each for each in "ABC" if f"({each})" in prompt] == list(left)


async def test_images_also_of_results(serve: Serve, vision_path: Path) -> None:
    async with serve(model=ModelConfig(model=str(vision_path))) as served:
        images = [
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": base64.b64encode(file_of(small(mode=mode))).decode(),
                },
            }
            for mode in ("RGB", "L")
        ]
        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": images[1:]}
        messages = [
            {"role": "user", "content": [images[0], {"type": "text", "text": "look"}]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
        ]
        await create(served, messages=messages)
        [request] = served.engine.submitted.values()
        first, second = request.images
        assert (first.digest != second.digest, first.offset < second.offset) == (True, True)
        tokenizer = Tokenizer.from_directory(vision_path)
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        assert prompt.index(IMAGE) < prompt.index("look") < prompt.rindex(IMAGE)
        assert prompt.rindex(IMAGE) < prompt.index("well?")


async def test_tools_that_may_and_must_be_called(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, CALL)
        for choice, grammar in (
            ({"type": "auto"}, "time"),
            ({"type": "none"}, None),
            ({"type": "any"}, "time"),
            ({"type": "tool", "name": "weather"}, "weather"),
        ):
            message = await create(served, tools=TOOLS, tool_choice=choice)
            asked = list(served.engine.submitted.values())[-1].sampling_params.structured_outputs
            assert (asked is None) == (grammar is None)
            if asked is not None:
                assert grammar in str(asked)
                assert ("time" in str(asked)) == (choice["type"] != "tool")
                assert bool(asked.triggers) == (choice["type"] == "auto")  # free text until a call
            is_call = message.content[0].type == "tool_use"
            assert is_call == (choice["type"] != "none")
        says(served, f"{CALL}\n{TIME}")
        one = {"type": "auto", "disable_parallel_tool_use": True}
        message = await both(served, tools=TOOLS, tool_choice=one)
        assert [block.type for block in message.content] == ["tool_use"]


async def test_efforts_budgets_and_schemas_are_handed_on(serve: Serve) -> None:
    shown = "{{ enable_thinking }} {{ reasoning_effort }} {{ thinking_budget }}"
    async with serve(chat_template=shown) as served:
        for asked, prompt in (
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True  1024"),
            ({"thinking": {"type": "disabled"}}, "False  "),
            ({"output_config": {"effort": "low"}}, "True low "),
        ):
            await create(served, max_tokens=2000, **asked)
            assert served.prompt_of() == prompt
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await create(served, output_config={"format": {"type": "json_schema", "schema": schema}})
        params = list(served.engine.submitted.values())[-1].sampling_params
        assert params.structured_outputs is not None


async def test_claude_codes_first_line_is_dropped_and_nothing_else(serve: Serve) -> None:
    kept = [f"Say {LINE}", f" {LINE}", LINE.replace("cch=eb6c6;", "cch"), LINE[:-1], ""]
    assert [without_billing_line(text) for text in kept] == kept
    assert without_billing_line(f"{LINE}\n{LINE}") == LINE
    forms = [f"{LINE}\nBe brief.", [{"type": "text", "text": f"{LINE}\nBe brief."}]]
    forms += [[{"type": "text", "text": LINE}, {"type": "text", "text": "Be brief."}]]
    async with serve() as served:
        for system in forms:
            await create(served, system=system)
            assert served.prompt_of().startswith("<system>Be brief.\n<user>hello")
        later = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": LINE}]
        await create(served, system=later)
        assert served.prompt_of().startswith(f"<system>Be brief.\n{LINE}\n<user>")
        await create(served, messages=[{"role": "user", "content": LINE}])
        assert served.prompt_of() == f"<user>{LINE}\n<assistant>"
    async with serve(drop_billing_line=False) as served:
        await create(served, system=forms[0])
        assert served.prompt_of().startswith(f"<system>{LINE}\nBe brief.\n")


async def test_what_rules_dropped_is_told_of_the_cache(serve: Serve) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "Now.", "clear_at": "next_user_message"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Hi."}]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "So."}]},
        {"role": "user", "content": "And?"},
    ]
    kept = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    async with serve() as served:

        async def dropped(before: str | None, **asked: Any) -> tuple[str, Any]:
            message = await create(served, diagnostics={"previous_message_id": before}, **asked)
            return message.id, (message.model_dump()["penstock"].get("cache") or {}).get("dropped")

        first, told = await dropped(None)
        assert told is None
        second, told = await dropped(first)
        assert told == {}
        more = {"context_management": {"edits": [kept]}}
        _, told = await dropped(
            second, system=f"{LINE}\nBe brief.", messages=messages, extra_body=more
        )
        assert told == {"billing_line": 1, "clear_at": 1, "clear_thinking": 1}


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HOISTING = (
    "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


async def test_system_messages_for_a_while(served: Served) -> None:
    """As Claude Code sends them, with tools that come and go."""
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "time"}}
    turns = [
        *USER,
        {"role": "system", "content": [added, {"type": "text", "text": "S"}]},
        {"role": "system", "content": [added]},
        {"role": "system", "content": "T", "clear_at": "next_user_message"},
    ]
    await create(served, messages=turns)
    assert served.prompt_of() == "<user>hello\n<system>S\nT\n<assistant>"
    await create(served, messages=[*turns, {"role": "user", "content": "b"}])
    assert served.prompt_of() == "<user>hello\n<system>S\n<user>b\n<assistant>"


@pytest.mark.parametrize("chat_template", [None, ALTERNATING, HOISTING])
async def test_system_messages_keep_their_place(serve: Serve, chat_template: str | None) -> None:
    """So what comes after them is all that is new in the next turn's prompt."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "T"},
        {"role": "user", "content": "e"},
    ]
    async with serve(chat_template=chat_template) as served:
        prompts = []
        for end in (1, 4, 7):
            await create(served, messages=turns[:end])
            prompts.append(served.prompt_of().removesuffix("<assistant>"))
        for shorter, longer in itertools.pairwise(prompts):
            assert longer.startswith(shorter.removesuffix("[assistant]"))
        reminder = "<system-reminder>\n{}\n</system-reminder>"
        assert prompts[-1] == (
            "<user>a\n<assistant>b\n<user>c\n<system>S\n<assistant>d\n<system>T\n<user>e\n"
            if chat_template is None
            else f"[user]a[assistant]b[user]c\n{reminder.format('S')}[assistant]d"
            f"[user]{reminder.format('T')}\ne[assistant]"
        )


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system messages come first') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("chat_template", [FIRST_ONLY, HOISTING])
async def test_in_the_other_apis_the_template_decides_if_it_shows_them(
    serve: Serve, chat_template: str
) -> None:
    """Codex begins with two, the second one as the developer's."""
    turns = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": "c"},
    ]
    async with serve(chat_template=chat_template) as served:
        create = served.client.responses.create
        await create(model="tiny", instructions="Be brief.", input=turns)
        expected = "[system]Be brief.\na[user]b\n<system-reminder>\nc\n</system-reminder>"
        if chat_template == HOISTING:
            expected = "[system]Be brief.[system]a[system]c[user]b"
        assert served.prompt_of() == f"{expected}[assistant]"
        await served.client.chat.completions.create(model="tiny", messages=turns)
        if chat_template == FIRST_ONLY:
            expected = expected.replace("Be brief.\n", "")
        else:
            expected = expected.replace("[system]Be brief.", "")
        assert served.prompt_of() == f"{expected}[assistant]"


async def test_several_system_messages_in_a_row(serve: Serve) -> None:
    turns = [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        *USER,
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "S"},
        {"role": "system", "content": "T"},
        {"role": "user", "content": "d"},
    ]
    async with serve(chat_template=HOISTING) as served:
        await create(served, messages=turns)
        beginning = "[system]a\nb[user]hello[assistant]c"
        reminder = "<system-reminder>\nS\nT\n</system-reminder>"
        assert served.prompt_of() == f"{beginning}[user]{reminder}\nd[assistant]"


# -- counting and models --------------------------------------------------------------------------


async def test_tokens_are_counted_as_they_are_computed(
    served: Served, client: anthropic.AsyncAnthropic
) -> None:
    asked: dict[str, Any] = {"messages": USER, "system": "Be brief.", "tools": TOOLS}
    counted = await client.messages.count_tokens(model="tiny", **asked)
    assert isinstance(counted, MessageTokensCount)
    await create(served, **asked)
    [request] = served.engine.submitted.values()
    assert counted.input_tokens == len(request.prompt_token_ids)
    whole = await served.http.post("/v1/messages/count_tokens", json=BODY | asked)
    assert whole.json() == {"input_tokens": counted.input_tokens}


async def test_models_in_its_form_by_header(serve: Serve) -> None:
    async with serve(served_model_names=("a", "b", "c")) as served, client_of(served) as client:
        names = [model.id async for model in client.models.list(limit=2)]
        assert names == ["a", "b", "c"]
        page = await client.models.list(limit=2)
        assert (page.has_more, page.first_id, page.last_id) == (True, "a", "b")
        before = await client.models.list(before_id="c", limit=1)
        assert ([model.id for model in before.data], before.has_more) == (["b"], True)
        raw = await served.http.get("/v1/models/b", headers={"anthropic-version": "2023-06-01"})
        ModelInfo.model_validate_json(raw.content, strict=False)
        model = await client.models.retrieve("b")
        assert (model.id, model.display_name, model.type) == ("b", "b", "model")
        assert model.max_input_tokens == served.engine.info.max_model_len
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("d")
        ours = (await served.http.get("/v1/models")).json()
        assert [each["object"] for each in ours["data"]] == ["model"] * 3


# -- failures -------------------------------------------------------------------------------------


def failure(answer: Any) -> tuple[int, str, str]:
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def _user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


_IMAGE_BY_ID = {"type": "image", "source": {"type": "file", "file_id": "f"}}
_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": _user()}, "messages[0].content"),
    ({"messages": _user({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": _user(_IMAGE_BY_ID)}, "messages[0].content[0].source"),
    (
        {"messages": _user({"type": "document", "source": {}})},
        "messages[0].content[0]: documents are not supported",
    ),
    (
        {"messages": [*USER, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "messages[1].content[0]",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    (
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "tiny does not support the 'compact_20260112' context management strategy",
    ),
    (
        {
            "context_management": {
                "edits": [
                    {"type": "clear_thinking_20251015", "keep": "all"},
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "tool_uses", "value": 30},
                        "keep": {"type": "tool_uses", "value": 3},
                        "exclude_tools": ["Bash"],
                    },
                ]
            }
        },
        "tiny does not support the 'clear_tool_uses_20250919' context management strategy",
    ),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (
        {
            "messages": [
                *USER,
                {
                    "role": "system",
                    "content": [{"type": "tool_addition", "tool": {"definition": {}}}],
                },
            ]
        },
        "messages[1].content[0]",
    ),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"nonsense": 1}, "nonsense"),
    (
        {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                },
            ]
        },
        "messages[1]",
    ),
]


@pytest.mark.parametrize(("values", "message"), _WRONG)
async def test_what_is_wrong_is_named(served: Served, values: dict[str, Any], message: str) -> None:
    answer = await served.http.post("/v1/messages", json=BODY | values)
    status, kind, told = failure(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert message in told
    assert not served.engine.submitted


async def test_failures_are_in_its_form(served: Served, client: anthropic.AsyncAnthropic) -> None:
    other = await served.http.post("/v1/messages", json=BODY | {"model": "other"})
    assert failure(other)[:2] == (404, "not_found_error")
    long = [{"role": "user", "content": ANSWER * 100}]
    too_long = failure(await served.http.post("/v1/messages", json=BODY | {"messages": long}))
    assert too_long[:2] == (400, "invalid_request_error")
    assert too_long[2].startswith("prompt is too long: ")
    batches = failure(await served.http.post("/v1/messages/batches", json={}))
    assert batches[:2] == (404, "not_found_error")
    assert failure(await served.http.get("/v1/messages"))[0] == 405
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**BODY | {"tools": [{"name": "?"}]})
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id
    chat = await served.http.post("/v1/chat/completions", json={})
    assert set(chat.json()) == {"error"}


async def test_when_to_try_again(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.a]\nrequests_per_minute = 1\n[[keys]]\nkey = "sk-0123456789abcdef"\n'
                    'tenant = "a"\n')  # fmt: skip
    file.chmod(0o600)
    key = {"x-api-key": "sk-0123456789abcdef"}
    async with serve(api_keys_file=str(file)) as served:
        [done, limited] = [
            await served.http.post("/v1/messages", json=BODY, headers=key) for _ in range(2)
        ]
        assert done.status_code == 200
        assert failure(limited)[:2] == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) > 0
    async with serve(max_queue_tokens=1) as served:
        served.engine.may_speak.clear()
        waiting = asyncio.ensure_future(served.http.post("/v1/messages", json=BODY))
        await served.submitted()
        overloaded = await served.http.post("/v1/messages", json=BODY | {"stream": True})
        assert failure(overloaded)[:2] == (503, "overloaded_error")
        assert int(overloaded.headers["retry-after"]) > 0
        served.engine.may_speak.set()
        assert (await waiting).status_code == 200
        large = await served.http.post("/v1/messages", content=b" " * (5 << 20))
        assert failure(large)[:2] == (413, "request_too_large")


async def test_a_stream_that_breaks_off_ends_with_an_error(served: Served) -> None:
    served.engine.step_s, served.engine.failure = 0.01, "out of memory"
    text = await stream(served)
    *_, last = text.removesuffix("\n\n").split("\n\n")
    name, _, data = last.partition("\ndata: ")
    error = json.loads(data)
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "api_error")
    async with client_of(served) as client:
        with pytest.raises(anthropic.APIStatusError):
            async for _ in await client.messages.create(stream=True, **BODY):
                pass
    served.engine.refusal = "no"
    answer = await served.http.post("/v1/messages", json=BODY | {"stream": True})
    assert failure(answer)[:2] == (400, "invalid_request_error")


async def test_keys(serve: Serve) -> None:
    async with serve(api_keys=("secret",)) as served:
        del served.http.headers["authorization"]
        assert failure(await served.http.post("/v1/messages", json=BODY))[:2] == (
            401,
            "authentication_error",
        )
        async with client_of(served, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**BODY)
        for settings in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            async with client_of(served, **settings) as client:
                assert (await client.messages.create(**BODY)).stop_reason == "end_turn"
        headers = {"x-api-key": "secret"}
        answer = await served.http.post("/v1/messages", json=BODY, headers=headers)
        assert answer.status_code == 200


async def test_betas_are_taken(served: Served, client: anthropic.AsyncAnthropic) -> None:
    message = await client.beta.messages.create(
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        service_tier="auto",
        **BODY,
    )
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (MessagesRequest, beta_params.MessageCreateParamsStreaming),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_parameter_is_classified(schema: Any, kind: Any) -> None:
    assert set(get_type_hints(kind)) - known(schema) - {"betas"} == set()


# -- what streams survive -------------------------------------------------------------------------


@pytest.mark.usefixtures("soon_alarmed")
@pytest.mark.parametrize("num_steps", [1, 5, 20])
async def test_a_stream_survives_its_engine(serve: Serve, num_steps: int) -> None:
    async with serve(step_s=0.001, **PARSERS) as served:
        says(served, OUTPUT)
        whole = events_of(await stream(served, tools=TOOLS))
        served.engine.dies_in = num_steps
        reading = asyncio.create_task(stream(served, tools=TOOLS))
        await until(lambda: served.engine.num_deaths > 0)
        served.engine.restart()
        assert _blocks(events_of(await reading)) == _blocks(whole)


def _blocks(events: Sequence[dict[str, Any]]) -> list[str]:
    """The blocks of a stream, as JSON, without the ids of calls."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            found.append(dict(event["content_block"]))
            found[-1].pop("id", None)
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    found[-1][name] = found[-1].get(name, "") + value
    return [json.dumps(block) for block in found]


async def test_an_answer_with_a_key_is_given_again(serve: Serve) -> None:
    async with serve(step_s=0.001, **PARSERS) as served:
        says(served, OUTPUT)
        body = BODY | {"stream": True, "tools": TOOLS}
        async with served.http.stream("POST", "/v1/messages", json=body, headers=KEY) as answer:
            async for _ in answer.aiter_text():
                break  # the connection is lost
        first = await stream(served, KEY, tools=TOOLS)
        again = await stream(served, KEY, tools=TOOLS)
        assert first == again
        assert len(served.engine.submitted) == 1
        [weather, _] = [
            event["content_block"]
            for event in events_of(first)
            if event.get("content_block", {}).get("type") == "tool_use"
        ]
        assert weather["id"].startswith("toolu_")
        whole = await served.http.post("/v1/messages", json=BODY | {"tools": TOOLS}, headers=KEY)
        assert failure(whole)[:2] == (409, "conflict_error")


async def test_a_client_that_leaves_stops_its_answer(served: Served) -> None:
    served.engine.step_s = 0.01
    body = BODY | {"stream": True}
    async with served.http.stream("POST", "/v1/messages", json=body) as answer:
        async for _ in answer.aiter_text():
            break
    await served.aborted()
    await until(lambda: served.engine.num_running == 0)
