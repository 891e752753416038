"""What the demo model is trained on is what its chat template makes of a conversation."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.engine.demo.corpus import FIFTH_ROUND, Conversation, Encoder, converse
from penstock.engine.demo.vocabulary import CHAT_TEMPLATE
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text.chat_template import ChatTemplate

FOLDER = DEMO_MODEL_PATH
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def messages_of(conversation: Conversation) -> list[dict[str, Any]]:
    """A conversation as a client sends it."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        is_kept = conversation.keeps_thoughts or turn is conversation.turns[-1]
        messages.append({"role": "user", "content": turn.user})
        for step in turn.steps:
            calls = [json.loads(call) for call in CALL.findall(step.assistant)]
            said: dict[str, Any] = {"role": "assistant", "content": None}
            said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            messages.append(said | ({"reasoning_content": step.thought} if is_kept else {}))
            messages += [
                {"role": "tool", "content": result} for result in RESULT.findall(step.results)
            ]
        answer = {"role": "assistant", "content": turn.assistant}
        messages.append(answer | ({"reasoning_content": turn.thought} if is_kept else {}))
    return messages


def tools_of(conversation: Conversation) -> list[dict[str, Any]]:
    tools = []
    for listed in conversation.tools:
        name, _, parameters = listed.rstrip(")").partition("(")
        properties = {each: {"type": "string"} for each in parameters.split(", ")}
        schema = {"type": "object", "properties": properties}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    return tools


@pytest.mark.parametrize("seed", range(40))
def test_training_sees_what_the_template_renders(seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    conversation = converse(random.Random(seed), 900, mixture=FIFTH_ROUND)
    token_ids, is_learned = Encoder(tokenizer).encode(conversation)
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    template = ChatTemplate(CHAT_TEMPLATE, special)
    arguments: dict[str, Any] = {"tools": tools_of(conversation) or None}
    if conversation.thinks:
        arguments["enable_thinking"] = True
    messages = messages_of(conversation)
    rendered = template.render(messages, add_generation_prompt=False, kwargs=arguments)
    assert rendered == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert token_ids == tokenizer.encode(rendered, add_special_tokens=False).ids
    if conversation.thinks and not conversation.turns[-1].thought:
        return  # the template would have begun one
    # A prompt ends where learning begins.
    prompt = template.render(messages[:-1], kwargs=arguments)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert token_ids[: len(prompt_ids)] == prompt_ids
    assert is_learned[len(prompt_ids)] or conversation.turns[-1].num_given


def test_nothing_changes_without_tools_and_thoughts() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<|begin|>"})
    messages = [
        {"role": "developer", "content": "Be kind. "},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    said = (
        "<|begin|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
        "<|user|>Bye<|end|>"
    )
    assert template.render(messages) == f"{said}<|assistant|>"
    assert template.render(messages, add_generation_prompt=False) == said
    thinking = template.render(messages, kwargs={"enable_thinking": True})
    assert "<|system|>Be kind.\nThink first.<|end|>" in thinking
    assert thinking.endswith("<|assistant|><think>\n")
    assert template.render(messages, kwargs={"reasoning_effort": "low"}) == thinking
    assert template.render(messages, kwargs={"reasoning_effort": "none"}) == f"{said}<|assistant|>"
