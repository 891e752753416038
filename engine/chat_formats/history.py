"""Earlier tool calls, and efforts, as a chat template wants them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.chat_formats.call_format import CallFormat
from penstock.engine.chat_formats.template_facts import TemplateFacts

_OTHER_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_SHORT_ID_CHARS = 9


def template_messages(
    messages: Sequence[Mapping[str, Any]], facts: TemplateFacts
) -> Sequence[Mapping[str, Any]]:
    """Messages whose calls have their arguments, their ids and their number as a template wants
    them, and no text beside thoughts where it refuses both.

    Args:
        messages: with arguments as JSON text, as in OpenAI's API.
        facts: of the template.
    """
    if not any("tool_calls" in each or "tool_call_id" in each for each in messages):
        return messages
    shown, new_ids = [], dict[str, str]()
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = [_call(each, facts) for each in message["tool_calls"]]
            for old, new in zip(message["tool_calls"], changed["tool_calls"], strict=True):
                new_ids[old["id"]] = new["id"]
            thoughts, text = changed.get("reasoning_content"), changed.get("content")
            if facts.joins_thoughts and thoughts and text:
                changed |= {"reasoning_content": f"{thoughts}\n\n{text}", "content": ""}
            elif text and not facts.shows_calls_beside_text:
                shown.append({key: changed[key] for key in changed if key != "tool_calls"})
                changed = {**changed, "content": ""}
                changed.pop("reasoning_content", None)
        if "tool_call_id" in message:
            asked = message["tool_call_id"]
            changed["tool_call_id"] = new_ids.get(asked, asked)
        shown.append(changed)
    return shown if facts.shows_parallel else _apart(shown)


def _call(call: Mapping[str, Any], facts: TemplateFacts) -> Mapping[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):  # offline, a caller may have parsed them
        arguments = json.dumps(arguments, ensure_ascii=False)
    function["arguments"] = arguments if facts.arguments == "text" else _parsed(arguments)
    call_id = _short(call["id"]) if facts.ids == "short" else call["id"]
    return {**call, "id": call_id, "function": function}


def _apart(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Each call in a message of its own, with its result after it, for a template that shows one
    call of a message."""
    results = {each["tool_call_id"]: each for each in messages if "tool_call_id" in each}
    moved = set[str]()
    shown: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("tool_call_id") in moved:
            continue
        if len(calls) < 2:
            shown.append(message)
            continue
        for index, call in enumerate(calls):
            own = {**message, "tool_calls": [call]}
            if index:  # text and thoughts are the first one's
                own["content"] = ""
                own.pop("reasoning_content", None)
            shown.append(own)
            if call["id"] in results:
                moved.add(call["id"])
                shown.append(results[call["id"]])
    return shown


def with_known_effort(variables: Mapping[str, Any], calls: CallFormat | str) -> Mapping[str, Any]:
    """Variables of a chat template, with an effort that it knows: gpt-oss was trained on three, and
    cannot be told not to think.

    Args:
        variables: with an effort.
        calls: how the model writes calls.
    """
    effort = variables["reasoning_effort"]
    if not isinstance(effort, str) or effort not in _OTHER_EFFORTS or calls != "openai":
        return variables
    return {**variables, "reasoning_effort": _OTHER_EFFORTS[effort]}


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]


def _without_surrogates(text: str) -> str:
    """JSON text whose texts are Unicode: half of a surrogate pair is none."""
    if "\\ud" not in text.lower():
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False)
    return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parsed(arguments: str) -> Any:
    """The object that the text is, or the text if it is none."""
    try:
        value = json.loads(_without_surrogates(arguments))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
