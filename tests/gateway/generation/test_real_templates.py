"""Requests with real tokenizers and chat templates: their tokens are those that `transformers`
makes of the same conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.engine.config import ModelConfig
from tests.support.conversations import CONVERSATIONS, Message
from tests.support.real_models import TOKENIZERS, tokenizer_folder

from ..conftest import Serve

pytestmark = [pytest.mark.external, pytest.mark.node]

# Tools that templates do not show, or only in part, are told in a text; Mistral's insists on ids of
# nine characters.
_OTHER_TOOLS = ("gemma3", "deepseek_v3", "llama2")
_FIELDS = ("add_generation_prompt", "continue_final_message", "tools")
# What a request means in OpenAI's API, and what a template would make of it, differ.
_OTHERWISE = {
    "a developer message",  # to most models it is the system's
    "a null question",  # refused by its name
    "no tools",  # and not an empty list of them
    "a part",  # a text; many templates would show it as Python writes a list
    "several parts",
    "a system message of parts",
    "an answer of parts",
    "no parts",
}
# Refuse or drop system messages but the first, which are part of it or of the user's then.
_ONE_SYSTEM = ("gemma3", "gptoss", "llama2")
_LATE_SYSTEM = ("a system message in the middle", "two system messages")
# Refuses several calls of a message, or shows the first: here each has a message of its own.
_ONE_CALL = ("llama3_1", "gptoss")


def _as_sent(message: Message) -> Message:
    """With arguments of calls as text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _theirs(tokenizer: Any, messages: list[Message], variables: dict[str, Any]) -> Any:
    """None: refused."""
    whole = [{**each, "content": each.get("content") or ""} for each in messages]
    try:
        return tokenizer.apply_chat_template(whole, return_dict=False, **variables)
    except Exception:  # whatever a template leads to
        return None


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_tokens_equal_those_of_transformers(name: str, tmp_path: Path, serve: Serve) -> None:
    path = tokenizer_folder(name, tmp_path)
    (path / "config.json").write_text('{"eos_token_id": 0}')
    reference = transformers.AutoTokenizer.from_pretrained(path)
    async with serve(model=ModelConfig(model=str(path)), info={"max_model_len": 1 << 16}) as served:
        num_equal = 0
        for title, (messages, variables) in CONVERSATIONS.items():
            has_tools = "tools" in variables or any("tool_calls" in each for each in messages)
            if title in _OTHERWISE or (has_tools and name in _OTHER_TOOLS):
                continue
            if title == "many calls at once" and name in _ONE_CALL:
                continue
            if title in _LATE_SYSTEM and name in _ONE_SYSTEM:
                continue
            answer = await served.http.post(
                "/tokenize",
                json={
                    "model": "tiny",
                    "messages": list(map(_as_sent, messages)),
                    "chat_template_kwargs": {
                        key: value for key, value in variables.items() if key not in _FIELDS
                    },
                    **{key: variables[key] for key in _FIELDS if key in variables},
                },
            )
            expected = _theirs(reference, messages, variables)
            if expected is None:
                assert answer.status_code == 400, title
                error = answer.json()["error"]
                assert error["param"] == "messages", title
                assert error["message"].startswith("the chat template refuses"), title
            else:
                assert answer.json().get("tokens") == expected, title
                num_equal += 1
        assert num_equal > 20
