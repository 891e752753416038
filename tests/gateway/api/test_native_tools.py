"""Loops of calls in formats of models, with the stock client: three turns, as each template writes
them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.text.chat_template import ChatTemplate
from tests.support.real_models import published_templates
from tests.support.template_loop import ANSWER, TOOLS, Loop, message, written

from ..conftest import Serve

FAMILIES = [
    "ByteDance-Seed-OSS",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
]
OFFERED: Any = [
    {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
    for each in TOOLS
]
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("write_file", {"path": "a.txt", "string_value": 'a "b" {c}\n<d>'})],
    [("get_time", {})],
]


@pytest.mark.external
@pytest.mark.parametrize("name", FAMILIES)
async def test_a_loop_of_three_turns(serve: Serve, name: str) -> None:
    source = published_templates()[name]
    loop = Loop(ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"}))
    async with serve(
        info={"max_model_len": 16_384, "num_blocks": 4096}, trust_request_chat_template=True
    ) as served:
        messages: list[Any] = [{"role": "user", "content": "Write it."}]
        extra = {"chat_template": source}
        for calls in CALLS:
            served.engine.script = served.tokenizer.encode(written(loop, message("", calls)))
            answer = await served.client.chat.completions.create(
                model="tiny", messages=messages, tools=OFFERED, extra_body=extra
            )
            told = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert [
                (each.function.name, json.loads(each.function.arguments))
                for each in told.tool_calls or ()
            ] == calls
            messages.append(told.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": each.id, "content": "<done>"}
                for each in told.tool_calls or ()
            ]
        served.engine.script = served.tokenizer.encode(written(loop, message(ANSWER)))
        answer = await served.client.chat.completions.create(
            model="tiny", messages=messages, tools=OFFERED, extra_body=extra
        )
        assert (answer.choices[0].message.content or "").strip() == ANSWER
        prompt = served.prompt_of()
        assert "a.txt" in prompt
        assert prompt.count("<done>") == 2
