"""Earlier tool calls, and efforts, as a chat template wants them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_OBJECT_USES = re.compile(
    r"arguments['\"\]]*\s*(\|\s*(tojson|items)|\.items\(|is (mapping|not string|string))"
    r"|call(\.|\[['\"])function['\"\]]*\s*\|\s*tojson"  # Mistral's
)
_OTHER_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_EITHER = "Cannot pass both content and thinking"  # gpt-oss's: to it the text is a thought, too
_SHORT_ID_CHARS = 9
_Rename = Callable[[str, str, int], str]  # a call's id, its function, its number → the new id


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str | None
) -> Sequence[Mapping[str, Any]]:
    """Messages whose calls have their arguments as an object where the template writes it as JSON,
    ids of the form that it insists on, and no text beside thoughts where it refuses both.

    Args:
        messages: with arguments as JSON text, as in OpenAI's API.
        template: its source.
    """
    if not any("tool_calls" in each or "tool_call_id" in each for each in messages):
        return messages
    wants_objects, rename = _wishes(template or "")
    is_either = _EITHER in (template or "")
    shown, new_ids, num_calls = [], dict[str, str](), 0
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = dict(call["function"])
                arguments = function.get("arguments") or "{}"
                if not isinstance(arguments, str):  # offline, a caller may have parsed them
                    arguments = json.dumps(arguments, ensure_ascii=False)
                function["arguments"] = _parsed(arguments) if wants_objects else arguments
                new_id = new_ids[call["id"]] = rename(call["id"], function["name"], num_calls)
                num_calls += 1
                calls.append({**call, "id": new_id, "function": function})
            changed["tool_calls"] = calls
            if is_either and changed.get("reasoning_content") and changed.get("content"):
                both = (changed["reasoning_content"], changed["content"])
                changed |= {"reasoning_content": "\n\n".join(both), "content": ""}
        if "tool_call_id" in message:
            asked = message["tool_call_id"]
            changed["tool_call_id"] = new_ids.get(asked, asked)
        shown.append(changed)
    return shown


def template_variables(variables: Mapping[str, Any], template: str | None) -> Mapping[str, Any]:
    """Variables of a chat template, with an effort that it knows: gpt-oss was trained on three, and
    cannot be told not to think."""
    effort = variables.get("reasoning_effort")
    if not isinstance(effort, str) or effort not in _OTHER_EFFORTS:
        return variables
    if "<|channel|>" not in (template or ""):
        return variables
    return {**variables, "reasoning_effort": _OTHER_EFFORTS[effort]}


@lru_cache(maxsize=16)
def _wishes(template: str) -> tuple[bool, _Rename]:
    rename: _Rename = _same
    if "length 9" in template:  # Mistral's refuse any other
        rename = _short
    elif "<|tool_call_begin|>" in template:  # Kimi K2 writes the function as part of the id
        rename = _numbered
    return bool(_OBJECT_USES.search(template)), rename


def _same(call_id: str, name: str, number: int) -> str:
    del name, number
    return call_id


def _short(call_id: str, name: str, number: int) -> str:
    del name, number
    if len(call_id) == _SHORT_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]


def _numbered(call_id: str, name: str, number: int) -> str:
    del call_id
    return f"functions.{name}:{number}"


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
