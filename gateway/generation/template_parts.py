"""Parts of messages with fields that only a chat template may know: thoughts within a content, as
Magistral's templates have them, documents, as Cohere's, or whatever a model's own has.

A template does not say what it reads, so a sample message with the part shows it, if the template's
source has the part's names at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import ChatTemplate
from penstock.gateway.errors import RequestRefusedError

_TEXT, _IMAGE = "text", "image"
_PLAIN_FIELDS = frozenset({"type", "text"})
_THOUGHTS = ("thinking", "think", "reasoning", "redacted_thinking")
_MAX_SAMPLE_S = 0.05
_MAX_KNOWN = 256  # roles and shapes of parts
Message = Mapping[str, Any]
Reads = Callable[[str, Message], bool]


def thought_of(part: Message) -> str:
    """The text of a part that is a thought; empty if it is none, or has none that can be read."""
    if part.get("type") not in _THOUGHTS:
        return ""
    for field in ("thinking", "think", "reasoning", "text"):
        thought = part.get(field)
        if isinstance(thought, list):  # Mistral's: text parts
            texts = [each.get("text") for each in thought if isinstance(each, dict)]
            thought = "".join(text for text in texts if isinstance(text, str))
        if isinstance(thought, str) and thought:
            return thought
    return ""


def as_read(messages: Sequence[Message], reads: Reads) -> Sequence[Message]:
    """Messages whose parts are what their template reads. Of others it gets the text; thoughts are
    the assistant's `reasoning_content`, and nothing in other messages.

    Args:
        reads: whether it reads a part of a message of this role.

    Raises:
        RequestRefusedError: a part is neither read nor a text.
    """
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    return [
        _as_read(message, index, reads) if isinstance(message.get("content"), list) else message
        for index, message in enumerate(messages)
    ]


def _as_read(message: Message, index: int, reads: Reads) -> Message:
    shown: list[Message] = []
    thoughts: list[str] = []
    for at, part in enumerate(message["content"]):
        is_plain = part["type"] in (_TEXT, _IMAGE) and part.keys() <= _PLAIN_FIELDS
        if is_plain or reads(message["role"], part):
            shown.append(part)
        elif part["type"] in _THOUGHTS:
            thoughts.append(thought_of(part))
        elif part["type"] == _TEXT:
            shown.append({"type": _TEXT, "text": part["text"]})
        else:
            raise RequestRefusedError(
                f"content parts must be text, not {part['type']!r}, which this model's chat "
                "template does not read",
                code="unsupported_parameter",
                param=f"messages[{index}].content[{at}]",
            )
    content: Any = shown
    if all(part["type"] == _TEXT and part.keys() <= _PLAIN_FIELDS for part in shown):
        content = "\n".join(part["text"] for part in shown)
    thought = "\n".join(filter(None, thoughts)) if message["role"] == "assistant" else ""
    more = {"reasoning_content": thought} if thought else {}
    return {**more, **message, "content": content}


def names_parts_of(source: str | None) -> Reads:
    """What a template reads, as far as its source shows: for one that cannot be tried."""
    code = source or ""

    def reads(_: str, part: Message) -> bool:
        if part["type"] != _TEXT:
            return _is_quoted(part["type"], code)
        names = part.keys() - _PLAIN_FIELDS
        return any(_is_quoted(name, code) or _is_attribute(name, code) for name in names)

    return reads


def _is_quoted(name: str, code: str) -> bool:
    return f"'{name}'" in code or f'"{name}"' in code


def _is_attribute(name: str, code: str) -> bool:
    return re.search(rf"\.{re.escape(name)}\b", code) is not None


def reads_of(template: ChatTemplate) -> Reads:
    """What a template reads."""
    is_named = names_parts_of(template.source)
    known: dict[tuple[str, str, frozenset[str]], bool] = {}

    def reads(role: str, part: Message) -> bool:
        if not is_named(role, part):
            return False
        key = (role, part["type"], frozenset(part))
        if key not in known:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known[key] = _is_read(template, role, part)
        return known[key]

    return reads


def _is_read(template: ChatTemplate, role: str, part: Message) -> bool:
    shown = _sample(template, role, [part])
    plain = [{"type": _TEXT, "text": part["text"]}] if part["type"] == _TEXT else []
    # A template that takes no parts writes them as Python does.
    return "'type'" not in shown and shown not in ("", _sample(template, role, plain))


def _sample(template: ChatTemplate, role: str, content: Sequence[Message]) -> str:
    """A conversation with such a message; empty if the template refuses it."""
    around: Message = {"role": "user", "content": "x"}
    messages: list[Message] = [{"role": role, "content": content}, around]
    if role not in ("system", "developer"):
        messages.insert(0, around)
    try:
        return template.render(messages, max_cpu_s=_MAX_SAMPLE_S)
    except InvalidRequestError:
        return ""
