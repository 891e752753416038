"""System messages in the middle of a conversation, as agents send them.

Where the chat template shows them in their places, nothing changes. Many refuse or drop them; then
they are part of the user's message beside them, between Claude Code's tags for this (`placed`). So
they are, in Anthropic's API, where a template would move them to the top: the next request would
find another beginning. In the other APIs the prompt is what the template makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.chat_formats.contents import joined, text_of

_BEGIN, _END = "<system-reminder>\n", "\n</system-reminder>"
Message = Mapping[str, Any]


def placed(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages for a template that does not show system messages where they are."""
    if not any(message.get("role") == "system" for message in messages[1:]):
        return messages
    found: list[Message] = []
    is_folded = False  # the newest message is of such system messages alone
    for message in messages:
        role = message.get("role")
        if role == "system" and found and all(each["role"] == "system" for each in found):
            found[-1] = _with(found[-1], message["content"])
        elif role == "system" and found:
            text = _reminder(message["content"])
            if found[-1]["role"] == "user":
                found[-1] = _with(found[-1], text)
            else:
                found.append({"role": "user", "content": text})
                is_folded = True
            continue
        elif role == "user" and is_folded:
            found[-1] = {**message, "content": joined(found[-1]["content"], message["content"])}
        else:
            found.append(message)
        is_folded = False
    return found


def _with(message: Message, content: Any) -> Message:
    return {**message, "content": joined(message["content"], content)}


def _reminder(content: Any) -> str:
    return f"{_BEGIN}{text_of(content)}{_END}"
