"""Changes of a prompt that cost its cache, planted through the stock clients, and what is said of
each."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from .kills import kill
from .processes import Served, serve

pytestmark = [pytest.mark.exhaustive, pytest.mark.process_kills]

BLOCK = 16
# Shows all that may change; written anew for each request, with what it is given.
TEMPLATE = (
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = "The quick brown fox jumps over the lazy dog while it rains in the old town. " * 3
TOOL = {
    "type": "function",
    "name": "weather",
    "description": WORDS,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
Ask = dict[str, Any]


def asked(case: str) -> Ask:
    """A request whose prompt has nothing in common with those of other cases."""
    return {
        "model": "demo",
        "instructions": f"You are {case}, on 2026-11-27 at 10:15. {WORDS}",
        "input": [
            {"role": "user", "content": f"First. {WORDS}"},
            {"role": "assistant", "content": f"Second. {WORDS}"},
            {"role": "user", "content": f"Third. {WORDS}"},
        ],
        "max_output_tokens": 1,
        "temperature": 0,
        "tool_choice": "none",
    }


def tools(ask: Ask) -> None:
    ask["tools"] = [TOOL]


def system(ask: Ask) -> None:
    ask["instructions"] = f"Be brief. {ask['instructions']}"


def date(ask: Ask) -> None:
    ask["instructions"] = ask["instructions"].replace("2026-11-27 at 10:15", "2026-11-28 at 09:01")


def content(ask: Ask) -> None:
    ask["input"][1]["content"] = f"Other. {WORDS}"


def role(ask: Ask) -> None:
    ask["input"][1]["role"] = "user"


def removed(ask: Ask) -> None:
    del ask["input"][0]


def cut(ask: Ask) -> None:
    del ask["input"][1:]


def parameter(ask: Ask) -> None:
    ask["extra_body"] = {"enable_thinking": True}


def salt(ask: Ask) -> None:
    ask["extra_body"] = {"cache_salt": "pepper"}


def template(ask: Ask) -> None:
    ask["extra_body"] = {"chat_template": "now: " + TEMPLATE}


CASES: list[tuple[Callable[[Ask], None], str, str, int | None, str | None]] = [
    (tools, "tools", "tools_changed", None, "tools"),
    (system, "system", "input_changed", 0, "content"),
    (date, "date", "input_changed", 0, "content"),
    (content, "messages", "input_changed", 2, "content"),
    (role, "messages", "input_changed", 2, "role"),
    (removed, "messages", "input_changed", 1, "content"),
    (cut, "messages", "input_changed", 2, None),
    (parameter, "parameter", "reasoning_effort_changed", None, "enable_thinking"),
    (salt, "parameter", "input_changed", None, "cache_salt"),
    (template, "template", "input_changed", None, "chat_template"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("server")
    file = path / "template.jinja"
    file.write_text(TEMPLATE)
    flags = ("--chat-template", str(file), "--trust-request-chat-template")
    with serve(*flags, "--block-size", str(BLOCK), log=path / "log") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none") as made:
        yield made


def compared(client: openai.OpenAI, ask: Ask, before: str) -> tuple[Any, dict[str, Any]]:
    """The response, and its `penstock.cache`."""
    options: Any = {"comparison_response_id": before}
    response = client.responses.create(**ask, prompt_cache_options=options)
    assert response.prompt_cache_options is not None
    assert response.prompt_cache_options.comparison_response_id == before
    return response, response.model_dump()["penstock"]["cache"]


def num_cached(response: Any) -> int:
    number: int = response.usage.input_tokens_details.cached_tokens
    return number


@pytest.mark.parametrize(
    ("change", "reason", "name", "message", "field"),
    CASES,
    ids=[case[0].__name__ for case in CASES],
)
def test_each_change_is_named(
    client: openai.OpenAI,
    change: Callable[[Ask], None],
    reason: str,
    name: str,
    message: int | None,
    field: str | None,
) -> None:
    ask = asked(change.__name__)
    first = client.responses.create(**ask)
    again, cache = compared(client, ask, first.id)
    assert again.prompt_cache_diagnostics.type == "cache_hit"
    assert (cache["reason"], cache["missed_tokens"]) == ("hit", 0)
    changed = deepcopy(ask)
    change(changed)
    response, cache = compared(client, changed, first.id)
    assert (cache["reason"], cache["message"], cache["field"]) == (reason, message, field)
    assert sum(cache["cached_tokens"].values()) == num_cached(response)
    told = response.prompt_cache_diagnostics
    assert (told.type, told.reason) == ("cache_miss", name)
    lost = num_cached(again) - num_cached(response)
    assert lost > BLOCK
    assert abs(told.cache_missed_tokens - lost) <= BLOCK
    assert told.comparison_reusable_tokens == cache["reusable_tokens"]
    assert cache["seconds_lost"] > 0


def test_what_has_not_changed_and_is_gone(client: openai.OpenAI, served: Served) -> None:
    """Evicted, here since it was deleted; computed by an engine that is gone; or too short."""
    ask = asked("evicted")
    first = client.responses.create(**ask)
    again, _ = compared(client, ask, first.id)
    client.responses.delete(again.id)
    client.responses.delete(first.id)
    response, cache = compared(client, ask, first.id)
    assert response.prompt_cache_diagnostics.type == "unavailable"
    assert (cache["reason"], cache["field"]) == ("evicted", None)
    lost = num_cached(again) - num_cached(response)
    assert lost > BLOCK
    assert abs(cache["missed_tokens"] - lost) <= BLOCK

    short: Ask = {"model": "demo", "input": "Hi", "max_output_tokens": 1}
    first = client.responses.create(**short)
    _, cache = compared(client, short, first.id)
    assert (cache["reason"], cache["missed_tokens"]) == ("too_short", 0)

    asyncio.run(kill(served, "engine"))
    _, cache = compared(client, ask, response.id)
    assert cache["reason"] == "hit", "blocks outlive an engine that was killed"
    asyncio.run(kill(served, "engine", signal.SIGSEGV))
    _, cache = compared(client, ask, response.id)
    assert cache["reason"] == "other_engine", "not one that was at fault"
    assert abs(cache["missed_tokens"] - num_cached(again)) <= BLOCK

    for unknown in ("resp_unknown", ""):
        response, cache = compared(client, ask, unknown)
        assert response.prompt_cache_diagnostics.type == "comparison_response_not_found"


def test_predecessors_that_nobody_names(client: openai.OpenAI) -> None:
    """A response before, a conversation, a key."""
    ask = {**asked("unnamed"), "extra_body": None}
    first = client.responses.create(**ask)
    follow = {**ask, "input": "And then?", "previous_response_id": first.id}
    second = client.responses.create(**follow).model_dump()
    assert second["penstock"]["cache"]["predecessor"] == first.id
    assert second["penstock"]["cache"]["reason"] == "hit"
    assert "prompt_cache_diagnostics" not in second or second["prompt_cache_diagnostics"] is None

    conversation = client.conversations.create().id
    say = {**ask, "conversation": conversation}
    first = client.responses.create(**say)
    changed = {**say, "input": "And then?", "instructions": "Be brief."}
    cache = client.responses.create(**changed).model_dump()["penstock"]["cache"]
    assert (cache["predecessor"], cache["reason"]) == (first.id, "system")

    chat: Any = {"model": "demo", "max_tokens": 1, "prompt_cache_key": "agent 7"}
    messages: Any = [{"role": "user", "content": f"unnamed chat {WORDS}"}]
    once = client.chat.completions.create(**chat, messages=messages)
    assert "cache" not in once.model_dump()["penstock"]
    messages = [{"role": "user", "content": f"another {WORDS}"}]
    twice = client.chat.completions.create(**chat, messages=messages)
    cache = twice.model_dump()["penstock"]["cache"]
    assert (cache["predecessor"], cache["reason"]) == (once.id, "messages")


def test_anthropics_diagnostics(served: Served) -> None:
    ask: Any = {
        "model": "demo",
        "system": f"You are Claude. {WORDS}",
        "messages": [{"role": "user", "content": WORDS}],
        "max_tokens": 1,
    }
    with anthropic.Anthropic(base_url=served.base_url, api_key="none") as client:
        first = client.messages.create(**ask, diagnostics={"previous_message_id": None})
        assert first.diagnostics is None
        seen: Any = {"previous_message_id": first.id}
        assert client.messages.create(**ask, diagnostics=seen).diagnostics is None
        kinds = {}
        tool = {"name": "weather", "description": WORDS, "input_schema": {"type": "object"}}
        other = [{"role": "user", "content": f"Other. {WORDS}"}]
        changes: dict[str, Any] = {
            "system_changed": {"system": f"Be brief. {WORDS}"},
            "tools_changed": {"tools": [tool]},
            "messages_changed": {"messages": other},
        }
        for kind, change in changes.items():
            told = client.messages.create(**{**ask, **change}, diagnostics=seen).diagnostics
            assert told is not None
            kinds[kind] = told.cache_miss_reason
            assert kinds[kind].type == kind
            assert kinds[kind].cache_missed_input_tokens > BLOCK
        unknown: Any = {"previous_message_id": "msg_unknown"}
        told = client.messages.create(**ask, diagnostics=unknown).diagnostics
        assert told is not None
        assert told.cache_miss_reason.type == "previous_message_not_found"
        with client.messages.stream(
            **{**ask, "system": f"Now. {WORDS}"}, diagnostics=seen
        ) as stream:
            told = stream.get_final_message().diagnostics
        assert told is not None
        assert told.cache_miss_reason.type == "system_changed"
        assert json.loads(told.model_dump_json())
