"""Tools and thoughts: what a request may offer, and what its answer is, in every API."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.engine.chat_formats import CUSTOM_INPUT, TOOL_FORMATS

from ..conftest import Serve, Served, until
from ..sockets import send, until_end

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
CHAT_TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "custom", "custom": {"name": "sh"}},
]
TOOLS = [{"type": "function", **WEATHER}, {"type": "custom", "name": "sh"}]
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
ARGUMENTS = '{"city": "Köln \\"am\\" Rhein"}'
COMMAND = 'ls -l "a\\b"\n# 😀'


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = written("weather", ARGUMENTS)
CUSTOM = written("sh", json.dumps({CUSTOM_INPUT: COMMAND}))
OUTPUT = f"<think>\nHm < m.\n</think>\n\nLet me see.\n{CALL}\n{CUSTOM}"


def says(served: Served, text: str) -> None:
    served.engine.script = served.tokenizer.encode(text)


async def chat(served: Served, **values: Any) -> Any:
    body = {"model": "tiny", "messages": USER, "tools": CHAT_TOOLS, **values}
    return await served.client.chat.completions.create(**body)


async def collected(served: Served, **values: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in await chat(served, stream=True, **values):
        for choice in chunk.choices:
            whole = choices.setdefault(choice.index, {"content": "", "calls": {}, "reasoning": ""})
            whole["finish_reason"] = choice.finish_reason
            delta = choice.delta.model_dump()
            whole["content"] += delta["content"] or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            whole["reasoning"] += delta.get("reasoning") or ""
            for call in delta["tool_calls"] or ():
                known = whole["calls"].setdefault(call["index"], {"said": ""})
                known |= {key: call[key] for key in ("id", "type") if call[key]}
                part = call.get(known["type"]) or {}
                known |= {"name": part["name"]} if part.get("name") else {}
                known["said"] += part.get("arguments") or part.get("input") or ""
    return [choices[index] for index in sorted(choices)]


async def test_chat_whole_and_streamed(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        answer = await chat(served, n=2)
        ids = set()
        for choice in answer.choices:
            message = choice.message
            assert (choice.finish_reason, message.content) == ("tool_calls", "Let me see.\n")
            assert (message.reasoning, message.reasoning_content) == ("Hm < m.", "Hm < m.")
            function, custom = message.tool_calls
            assert (function.function.name, function.function.arguments) == ("weather", ARGUMENTS)
            assert (custom.custom.name, custom.custom.input) == ("sh", COMMAND)
            ids |= {function.id, custom.id}
        assert len(ids) == 4
        thought = answer.usage.completion_tokens_details.reasoning_tokens
        assert 0 < thought < answer.usage.completion_tokens
        for whole in await collected(served, n=2):
            assert whole["finish_reason"] == "tool_calls"
            assert (whole["content"], whole["reasoning"]) == ("Let me see.\n", "Hm < m.")
            assert [(call["name"], call["said"]) for call in whole["calls"].values()] == [
                ("weather", ARGUMENTS),
                ("sh", COMMAND),
            ]


async def test_a_call_is_not_preceded_by_an_empty_text(serve: Serve) -> None:
    """Some clients make a text part of it. OpenAI's first chunk has null beside the call."""
    async with serve(**PARSERS) as served:
        for text in (CALL, f"<think>\nHm.\n</think>\n\n{CALL}"):
            says(served, text)
            for asked in (
                {},
                {"logprobs": True},
                {"extra_body": {"include_reasoning": False}},
                {"extra_body": {"return_token_ids": True}},
            ):
                chunks = [chunk async for chunk in await chat(served, stream=True, **asked)]
                deltas = [chunk.choices[0].delta for chunk in chunks]
                assert [delta.role for delta in deltas] == ["assistant"] + [None] * (
                    len(deltas) - 1
                )
                assert {delta.content for delta in deltas} == {None}
        says(served, "Yes.")
        first = await anext(await chat(served, stream=True))
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")


@pytest.mark.parametrize("text", ["<think>\nHm.\n</think>\n\nYes.", "Yes.", ""])
async def test_deepseeks_documented_loop(serve: Serve, text: str) -> None:
    """Of a model with thoughts every delta and message has their field."""
    async with serve(**PARSERS) as served:
        says(served, text)
        stream = await chat(served, stream=True, tools=[])
        reasoning_content = content = ""
        async for chunk in stream:
            if chunk.choices[0].delta.reasoning_content:
                reasoning_content += chunk.choices[0].delta.reasoning_content
            else:
                content += chunk.choices[0].delta.content
        thought, said = ("Hm." if "Hm" in text else ""), ("Yes." if "Yes" in text else "")
        assert (reasoning_content, content) == (thought, said)
        message = (await chat(served, tools=[])).choices[0].message
        assert (message.reasoning_content, message.content) == (thought or None, said)
        assert message.reasoning == message.reasoning_content


async def test_a_model_without_thoughts_has_no_fields_of_them(served: Served) -> None:
    stream = await chat(served, stream=True, tools=[])
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert not any("reasoning" in name for delta in deltas for name in delta.model_extra or ())
    message = (await chat(served, tools=[])).choices[0].message
    assert not any("reasoning" in name for name in message.model_extra or ())


async def test_an_answer_may_be_text_only(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, "a < b, no call")
        answer = await chat(served)
        assert answer.choices[0].message.content == "a < b, no call"
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        says(served, OUTPUT)  # nothing was offered, or nothing may be called: calls are text
        for asked in ({"tools": []}, {"tool_choice": "none"}):
            message = (await chat(served, **asked)).choices[0].message
            assert message.content == f"Let me see.\n{CALL}\n{CUSTOM}"
            assert message.tool_calls is None
        message = (await chat(served, extra_body={"include_reasoning": False})).choices[0].message
        assert "reasoning" not in message.model_dump()
        [whole] = await collected(served, extra_body={"include_reasoning": False})
        assert whole["reasoning"] == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": True,
        },
    ],
)
async def test_the_one_call_that_is_allowed_ends_the_answer(
    serve: Serve, asked: dict[str, Any]
) -> None:
    async with serve(step_s=0.001, **PARSERS) as served:
        says(served, f"{CALL}\n{CUSTOM if len(asked) == 1 else CALL}")
        [whole] = await collected(
            served, extra_body={"ignore_eos": True, "max_tokens": 900}, **asked
        )
        assert [call["name"] for call in whole["calls"].values()] == ["weather"]
        assert (whole["calls"][0]["said"], whole["finish_reason"]) == (ARGUMENTS, "tool_calls")
        await served.aborted()


_ALLOWED = {"mode": "required", "tools": [CHAT_TOOLS[1]]}
REQUIRED: list[tuple[Any, Sequence[str]]] = [
    ("required", ["weather", "sh"]),
    ({"type": "function", "function": {"name": "weather"}}, ["weather"]),
    ({"type": "custom", "custom": {"name": "sh"}}, ["sh"]),
    ({"type": "allowed_tools", "allowed_tools": _ALLOWED}, ["sh"]),
]


async def test_a_required_call_is_enforced(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        for choice, names in REQUIRED:
            served.engine.submitted.clear()
            await chat(served, tool_choice=choice)
            [request] = served.engine.submitted.values()
            grammar = request.sampling_params.structured_outputs
            assert grammar is not None
            for name in ("weather", "sh"):
                assert (f'\\"name\\": \\"{name}\\"' in grammar.text) == (name in names), choice


@pytest.mark.parametrize("settings", [{}, PARSERS])
async def test_a_template_without_tools(serve: Serve, settings: dict[str, str]) -> None:
    """They are in the prompt all the same, whatever the choice is, and calls are found."""
    async with serve(**settings) as served:
        says(served, f"Let me see.\n{CALL}\n{CUSTOM}")
        for choice in ("auto", "none", *(choice for choice, _ in REQUIRED)):
            is_named = isinstance(choice, dict) and choice["type"] != "allowed_tools"
            answer = (await chat(served, tool_choice=choice)).choices[0]
            [whole] = await collected(served, tool_choice=choice)
            prompt = served.prompt_of()
            assert prompt.startswith("<system># Tools\n"), choice
            for each in ("weather", "of a city", json.dumps(SCHEMA), '"sh"', "<tool_call>"):
                assert each in prompt
            calls = [] if choice == "none" else ["weather", "sh"][: 1 if is_named else 2]
            assert [call["name"] for call in whole["calls"].values()] == calls
            assert len(answer.message.tool_calls or ()) == len(calls)
            assert answer.finish_reason == ("tool_calls" if calls else "stop")


async def test_calls_and_results_of_a_template_without_tools(serve: Serve) -> None:
    call = {"name": "weather", "arguments": ARGUMENTS}
    history = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
    ]
    async with serve() as served:
        says(served, "It is fine.")
        await chat(served, messages=history)
        prompt = served.prompt_of()
        assert prompt.startswith("<system>Be brief.\n\n# Tools\n")
        assert f"<assistant>{CALL}\n<tool>sun\n<assistant>" in prompt
        tokenised = await served.http.post("/tokenize", json={"messages": history})
        assert f"<assistant>{CALL}\n" in served.tokenizer.decode(tokenised.json()["tokens"])
    async with serve(tool_call_parser="none") as served:
        body = {"model": "tiny", "messages": USER, "tools": CHAT_TOOLS}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_only_strict_tools_are_enforced_by_themselves(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        await chat(served)
        strict = {"type": "function", "function": {**WEATHER, "strict": True}}
        await chat(served, tools=[strict])
        free, enforced = [
            request.sampling_params.structured_outputs
            for request in served.engine.submitted.values()
        ]
        assert free is not None
        assert free.triggers, "only from a call's mark on"
        assert '"city"' not in free.text
        assert enforced is not None
        assert not enforced.triggers
        assert '"city"' in enforced.text


async def test_history_reaches_the_template(serve: Serve) -> None:
    """Calls, results, thoughts, and fields that clients leave in messages."""
    called: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "model": "x",
        "timestamp": 1,
        "createdAt": "now",
        "metadata": {"a": 1},
        "prefix": False,
        "cache_control": {"type": "ephemeral"},
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            {"id": "c2", "type": "custom", "custom": {"name": "sh", "input": "ls"}},
        ],
    }
    results = [
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "tool", "tool_call_id": "c2", "name": "sh", "content": "a b"},
    ]
    async with serve(trust_request_chat_template=True, **PARSERS) as served:
        says(served, "fine")
        template = "{{ messages | tojson }}{{ tools | map(attribute='function') | list | tojson }}"
        await chat(
            served, messages=[*USER, called, *results], extra_body={"chat_template": template}
        )
        prompt = served.prompt_of()
        messages, end = json.JSONDecoder().raw_decode(prompt)
        assert json.loads(prompt[end:])[0] == WEATHER
        assert messages[1] == {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "thinking": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {}},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "sh", "arguments": {"input": "ls"}},
                },
            ],
        }
        assert [each["content"] for each in messages[2:]] == ["sun", "a b"]
        assert messages[2]["tool_call_id"] == "c1"


async def _streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    body = {"input": "hello", "tools": TOOLS, "stream": True, **body}
    async with served.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return await _events(answer)


async def _events(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) async for line in answer.aiter_lines() if line[:6] == "data: "]


@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}, {"generate_summary": "concise"}])
async def test_responses_are_items_with_their_own_events(
    serve: Serve, reasoning: dict[str, str]
) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        events = await _streamed(served, reasoning=reasoning)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            EVENTS.validate_python(event)
        response = events[-1]["response"]
        thought, message, function, custom = response["output"]
        if reasoning:
            assert (thought["summary"], thought["content"]) == (
                [{"type": "summary_text", "text": "Hm < m."}],
                [],
            )
            assert response["reasoning"]["summary"] in reasoning.values()
        else:
            assert thought["content"] == [{"type": "reasoning_text", "text": "Hm < m."}]
        assert message["content"][0]["text"] == "Let me see.\n"
        assert (function["name"], function["arguments"]) == ("weather", ARGUMENTS)
        assert (custom["name"], custom["input"]) == ("sh", COMMAND)
        assert function["call_id"] != custom["call_id"]
        joined = {
            index: "".join(event["delta"] for event in events if event.get("output_index") == index
                           and event["type"].endswith(".delta"))
            for index in range(4)
        }  # fmt: skip
        assert joined == {0: "Hm < m.", 1: "Let me see.\n", 2: ARGUMENTS, 3: COMMAND}
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        # every replay is the same
        for after in range(-1, len(events)):
            url = f"/v1/responses/{response['id']}?stream=true&starting_after={after}"
            async with served.http.stream("GET", url) as replay:
                if after == len(events) - 1:
                    continue
                assert await _events(replay) == events[after + 1 :]
        kept = (await served.http.get(f"/v1/responses/{response['id']}")).json()
        assert kept == response
        # the same over a WebSocket
        async with served.connect() as socket:
            asked = {"input": "hello", "tools": TOOLS, "reasoning": reasoning}
            await send(socket, type="response.create", **asked)
            told = await until_end(socket)
        assert _kinds(told) == _kinds(events)


def _kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types in order; how many deltas a text comes in depends on the reader."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in events)]


@pytest.mark.parametrize("summary", [None, "detailed"])
async def test_a_tool_loop_over_responses(serve: Serve, summary: str | None) -> None:
    async with serve(trust_request_chat_template=True, **PARSERS) as served:
        template = "{{ messages | tojson }}"
        says(served, OUTPUT)
        shown = {"chat_template": template, "reasoning": {"summary": summary}}
        first = (await _streamed(served, **shown))[-1]["response"]
        *_, function, custom = first["output"]
        results = [
            {"type": "function_call_output", "call_id": function["call_id"], "output": "sun"},
            {
                "type": "custom_tool_call_output",
                "call_id": custom["call_id"],
                "output": [{"type": "input_text", "text": "a b"}],
            },
        ]
        says(served, "It is fine.")
        follow = {"previous_response_id": first["id"], "input": results}
        by_id = (await _streamed(served, chat_template=template, **follow))[-1]["response"]
        assert by_id["output"][0]["content"][0]["text"] == "It is fine."
        seen = json.loads(served.prompt_of())
        assert [each["role"] for each in seen] == ["user", "assistant", "tool", "tool"]
        assert seen[1]["reasoning_content"] == "Hm < m."
        assert seen[1]["content"] == "Let me see.\n"
        assert [call["function"]["name"] for call in seen[1]["tool_calls"]] == ["weather", "sh"]
        assert [each["content"] for each in seen[2:]] == ["sun", "a b"]
        # without state: items sent back, or referred to
        said = [*first["output"]]
        references = [{"type": "item_reference", "id": item["id"]} for item in said]
        short = [{"id": item["id"]} for item in said]
        for history in (said, references, short):
            body = {"input": [*USER, *history, *results], "chat_template": template}
            await _streamed(served, **body, store=False)
            assert json.loads(served.prompt_of()) == seen
        wrong = {"type": "item_reference", "id": said[0]["id"][:-1] + "x"}
        answer = await served.http.post("/v1/responses", json={"input": [wrong]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input[0].id")


async def test_conversations_keep_calls_and_results(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        made = (await served.http.post("/v1/conversations", json={})).json()["id"]
        says(served, CALL)
        response = (await _streamed(served, conversation=made))[-1]["response"]
        [call] = response["output"]
        says(served, "Sunny.")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        await _streamed(served, conversation=made, input=[result])
        listed = (await served.http.get(f"/v1/conversations/{made}/items?order=asc")).json()
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "function_call", "function_call_output", "message"]
        unknown = {**result, "call_id": "call_x"}
        answer = await served.http.post(
            "/v1/responses", json={"conversation": made, "input": [unknown]}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input[0].call_id"


async def test_namespaces(serve: Serve) -> None:
    space = {"type": "namespace", "name": "box", "tools": [TOOLS[0]]}
    async with serve(**PARSERS) as served:
        says(served, written("box__weather", ARGUMENTS))
        [item] = (await _streamed(served, tools=[space, *TOOLS]))[-1]["response"]["output"]
        assert (item["namespace"], item["name"]) == ("box", "weather")
        assert item["arguments"] == ARGUMENTS


async def test_what_is_repeated_of_the_request(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, "Hi")
        asked = {
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "max_tool_calls": 3,
            "reasoning": {"effort": "low", "summary": "auto"},
            "safety_identifier": "me",
            "prompt_cache_key": "k",
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        }
        response = (await _streamed(served, **asked))[0]["response"]
        assert {name: response[name] for name in asked} == asked
        assert response["tools"] == [{**TOOLS[0], "strict": False}, TOOLS[1]]


async def test_a_logged_answer_of_chat_is_the_same_again(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        headers = {"Idempotency-Key": "k"}
        first = await chat(served, extra_headers=headers)
        says(served, "something else")
        again = await chat(served, extra_headers=headers)
        assert again == first
        assert len(first.choices[0].message.tool_calls) == 2
        await until(lambda: len(served.engine.submitted) == 1)


@pytest.mark.parametrize(
    "tool_format",
    [
        "hermes",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen3_coder", "glm45", "deepseek_v3")
        ),
    ],
)
async def test_a_call_that_is_cut_off(serve: Serve, tool_format: str) -> None:
    """Shown as far as it came, without markup, and nothing is made up."""
    text = {
        "hermes": written("weather", '{"city": "Rome"}'),
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "</tool_call>",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    }[tool_format]
    async with serve(**{**PARSERS, "tool_call_parser": tool_format}) as served:
        says(served, text)
        num_tokens = len(served.tokenizer.encode(text))
        opening = TOOL_FORMATS[tool_format].openings[0]
        [call] = (await chat(served)).choices[0].message.tool_calls
        whole, lengths = call.function.arguments, []
        for max_tokens in range(len(served.tokenizer.encode(opening)), num_tokens):
            choice = (await chat(served, max_tokens=max_tokens)).choices[0]
            assert choice.finish_reason == "length"
            assert not choice.message.content, max_tokens
            for call in choice.message.tool_calls or ():
                assert whole.startswith(call.function.arguments)
                lengths.append(len(call.function.arguments))
        assert lengths == sorted(lengths)
        assert 0 in lengths


async def test_a_call_that_a_stop_string_cuts_off_is_not_whole(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, CALL)
        for stop in ("Rhein", "arguments"):
            choice = (await chat(served, stop=[stop])).choices[0]
            assert choice.finish_reason == "length"
            response = (await _streamed(served, stop=[stop]))[-1]["response"]
            assert response["status"] == "incomplete"
            assert [item["status"] for item in response["output"]] == ["incomplete"]
        choice = (await chat(served, stop=["name"])).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert not choice.message.content


async def test_logprobs_are_those_of_the_message(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, OUTPUT)
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        events = await _streamed(served, **asked)
        [message] = [i for i in events[-1]["response"]["output"] if i["type"] == "message"]
        [part] = message["content"]
        entries = [entry for event in events for entry in event.get("logprobs") or ()]
        streamed = [e for e in events if e["type"] == "response.output_text.delta"]
        assert (
            "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Let me see.\n"
        )
        assert [e for event in streamed for e in event["logprobs"]] == part["logprobs"]
        assert len(entries) == 2 * len(part["logprobs"])  # the deltas', and those of `done`
        texts = [e["delta"] for e in events if e["type"].endswith("_text.delta")]
        assert all(texts)


async def test_which_tools_may_be_called_is_enforced(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, "Hi")
        await chat(served)
        choice = {"mode": "auto", "tools": [CHAT_TOOLS[1]]}
        await chat(served, tool_choice={"type": "allowed_tools", "allowed_tools": choice})
        free, limited = served.engine.submitted.values()
        offered = free.sampling_params.structured_outputs
        assert offered.triggers == ("<tool_call>",), "free until a call begins"
        assert "sh" in offered.text
        assert "weather" in offered.text
        grammar = limited.sampling_params.structured_outputs
        assert "sh" in grammar.text
        assert "weather" not in grammar.text


async def test_what_the_model_is_told_of_tools(serve: Serve) -> None:
    template = "{{ tools | tojson }}"
    async with serve(trust_request_chat_template=True, **PARSERS) as served:
        says(served, "Hi")
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: MARK"}
        custom = {"type": "custom", "name": "f", "format": grammar}
        space = {"type": "namespace", "name": "box", "description": "of boxes", "tools": [custom]}
        await _streamed(served, tools=[space], chat_template=template)
        prompt = served.prompt_of()
        assert "start: MARK" in prompt
        assert "of boxes" in prompt


BAD_GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a)|(b"}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom", "name": "f", "format": BAD_GRAMMAR}], "tools[0].format"),
        ([{"type": "custom", "name": "f", "format": {"type": "grammar"}}], "tools[0].format"),
        (
            [{"type": "custom", "name": "f", "format": {**BAD_GRAMMAR, "type": "text"}}],
            "tools[0].format",
        ),
        ([{"type": "custom", "name": "f", "strict": True}], "tools[0]"),
        (
            [{"type": "function", "name": "f", "parameters": {"properties": [1]}}],
            "tools[0].parameters",
        ),
        ([{"type": "function", "name": "f", "parameters": {"required": 5}}], "tools[0].parameters"),
        (
            [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b"}]}],
            "tools[0]",
        ),
        (
            [
                {"type": "namespace", "name": "a", "tools": [TOOLS[0], TOOLS[0]]},
            ],
            "tools[0].tools[1]",
        ),
        ([{"type": "namespace", "name": "a", "tools": TOOLS}, TOOLS[0], TOOLS[0]], "tools[2]"),
    ],
)
async def test_tools_that_are_refused(serve: Serve, tools: Any, param: str) -> None:
    async with serve(**PARSERS) as served:
        answer = await served.http.post("/v1/responses", json={"input": "hi", "tools": tools})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_what_no_grammar_can_bear(serve: Serve) -> None:
    """Small regular expressions that are huge automata, wherever they are."""
    huge = "(a{1000}){1000}"
    regex = {"type": "grammar", "syntax": "regex", "definition": huge}
    text = {"type": "object", "properties": {"a": {"type": "string", "pattern": huge}}}
    async with serve(**PARSERS) as served:
        for body in (
            {"tools": [{"type": "custom", "name": "f", "format": regex}]},
            {"tools": [{"type": "function", "name": "f", "parameters": text, "strict": True}]},
            {"structured_outputs": {"json": text}},
            {"structured_outputs": {"regex": huge}},
            {"structured_outputs": {"grammar": f'start: "b" /{huge}/'}},
        ):
            answer = await served.http.post("/v1/responses", json={"input": "hi", **body})
            assert answer.status_code == 400, body
            assert "repeats more than" in answer.json()["error"]["message"]
        assert not served.engine.submitted


async def test_arguments_may_be_objects(serve: Serve) -> None:
    """In histories that a client has parsed."""
    arguments = {"city": "Köln", "days": 2}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "sun"}
    async with serve(**PARSERS) as served:
        says(served, "Hi")
        history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        await chat(served, messages=history)
        shown = served.prompt_of()
        assert written("weather", json.dumps(arguments, ensure_ascii=False)) in shown
        item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "sun"}
        await _streamed(served, input=[*USER, item, output])
        assert served.prompt_of() == shown
        deep = '{"a":' * 1000 + "1" + "}" * 1000
        body = json.dumps({"messages": history}).replace(json.dumps(arguments), deep)
        answer = await served.http.post("/v1/chat/completions", content=body)
        assert answer.status_code in (200, 400)


async def test_odd_histories(serve: Serve) -> None:
    """An empty result, and arguments with half a surrogate pair."""
    template = (
        "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages[2].content }}"
    )
    async with serve(trust_request_chat_template=True, **PARSERS) as served:
        says(served, "Hi")
        call = {"name": "weather", "arguments": '{"city": "\\ud800"}'}
        history = [
            {"role": "assistant", "content": [], "tool_calls": [{"id": "c", "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": []},
        ]
        extra = {"chat_template": template}
        await chat(served, messages=[*USER, *history], extra_body=extra)
        assert json.loads(served.prompt_of()) == {"city": "\ufffd"}


async def test_a_continued_message_may_call(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, f"Let me see.\n{CALL}")
        cut = (await _streamed(served, max_output_tokens=4))[-1]["response"]
        assert [item["type"] for item in cut["output"]] == ["message"]
        said = len(served.tokenizer.encode("Let me see."))
        served.engine.script = served.tokenizer.encode(f"Let me see.\n{CALL}")[4:]
        follow = {"previous_response_id": cut["id"], "input": [], "penstock": {"continue": True}}
        rest = (await _streamed(served, **follow))[-1]["response"]
        assert [item["type"] for item in rest["output"]] == ["message", "function_call"]
        says(served, f"Let me see.\n{CALL}")
        cut = (await _streamed(served, max_output_tokens=said + 15))[-1]["response"]
        body = {**follow, "previous_response_id": cut["id"]}
        answer = await served.http.post("/v1/responses", json=body)
        assert answer.json()["error"]["param"] == "penstock.continue"


async def test_the_engine_is_told_of_sessions_and_of_turns_that_end_in_a_call(serve: Serve) -> None:
    """In every API: by its key, its user or its conversation, and whose turn the next one is."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    async with serve(**PARSERS) as served:
        engine, known = served.engine, set[str]()

        async def last() -> tuple[Any, list[str]]:
            """The newest request, and those that ended in calls."""
            (request_id,) = set(engine.submitted) - known
            known.add(request_id)
            return engine.submitted[request_id], [each.request_id for each in engine.held]

        says(served, CALL)
        await chat(served, prompt_cache_key="k", user="u")
        await until(lambda: len(engine.held) == 1)
        first, held = await last()
        assert (held, first.is_agent) == ([first.request_id], False)
        assert engine.held[0].return_s == 10.0
        says(served, "It is sunny.")
        await chat(served, messages=history, prompt_cache_key="k", user="v")
        second, held = await last()
        assert (second.session, second.is_agent, len(held)) == (first.session, True, 1)
        answered = [*history, {"role": "assistant", "content": "It is sunny."}, *USER]
        await chat(served, messages=answered, user="u")
        third, _ = await last()
        assert third.session not in ("", first.session)
        assert not third.is_agent
        await chat(served, tools=[])
        unknown, _ = await last()
        assert unknown.session == ""

        says(served, CALL)
        response = await served.client.responses.create(model="tiny", input="hello", tools=TOOLS)
        await until(lambda: len(engine.held) == 2)
        fourth, _ = await last()
        says(served, "It is sunny.")
        output = {"type": "function_call_output", "call_id": response.output[-1].call_id,
                  "output": "sunny"}  # fmt: skip
        await served.client.responses.create(
            model="tiny", input=[output], tools=TOOLS, previous_response_id=response.id
        )
        fifth, held = await last()
        assert (fifth.session, fifth.is_agent, len(held)) == (fourth.session, True, 2)
        assert fifth.session

        body = {"model": "tiny", "max_tokens": 9, "metadata": {"user_id": "claude"},
                "messages": USER}  # fmt: skip
        answer = await served.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        sixth, _ = await last()
        assert sixth.session
        assert not sixth.is_agent
