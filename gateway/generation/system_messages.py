"""System messages in the middle of a conversation, as agents send them.

They keep their place. Where the chat template shows them there, nothing changes. Many refuse them,
drop them or move them to the top, where the next request would find another beginning; then they
are part of the user's message beside them, between Claude Code's tags for this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import ChatTemplate

_BEGIN, _END = "<system-reminder>\n", "\n</system-reminder>"
_MAX_SAMPLE_S = 0.05
_MARKS = ("penstock first", "penstock answer", "penstock system", "penstock second")
Message = Mapping[str, Any]


def placed(messages: Sequence[Message], can_show: Callable[[], bool]) -> Sequence[Message]:
    """Messages whose system messages a chat template shows in their places.

    Args:
        can_show: whether it shows those that are not the first message; called if there are any.
    """
    if not any(message["role"] == "system" for message in messages[1:]) or can_show():
        return messages
    found: list[Message] = []
    is_folded = False  # the newest message is of such system messages alone
    for message in messages:
        role = message["role"]
        if role == "system" and found and all(each["role"] == "system" for each in found):
            found[-1] = _joined(found[-1], message["content"])
        elif role == "system" and found:
            text = _reminder(message["content"])
            if found[-1]["role"] == "user":
                found[-1] = _joined(found[-1], text)
            else:
                found.append({"role": "user", "content": text})
                is_folded = True
            continue
        elif role == "user" and is_folded:
            found[-1] = {**message, "content": _sum(found[-1]["content"], message["content"])}
        else:
            found.append(message)
        is_folded = False
    return found


def shows_system_messages(template: ChatTemplate) -> bool:
    """Whether a model's template shows system messages where they are."""
    first, answer, system, second = (
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "system", "user"), _MARKS, strict=True)
    )
    begun = {"role": "system", "content": "x"}
    return all(
        _is_in_order(template, [begun, *messages])
        for messages in ([first, answer, system, second], [first, answer, second, system])
    )


def _is_in_order(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    try:
        text = template.render(messages, max_cpu_s=_MAX_SAMPLE_S)
    except InvalidRequestError:
        return False
    places = [text.find(message["content"]) for message in messages[1:]]
    return min(places) >= 0 and places == sorted(places)


def _reminder(content: Any) -> str:
    text = "\n".join(part["text"] for part in _parts(content) if "text" in part)
    return f"{_BEGIN}{text}{_END}"


def _joined(message: Message, text: Any) -> Message:
    return {**message, "content": _sum(message["content"], text)}


def _sum(first: Any, second: Any) -> Any:
    """Two contents: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
