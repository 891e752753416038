"""How a chat template takes messages with images: as text with placeholders, or in parts.

Templates differ in this, and do not say so; a sample message shows it, once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text.chat_template import ChatTemplate
from penstock.engine.vision.image_tokens import ImageTokens

_SAMPLE = "penstock"


class MessageParts(enum.Enum):
    """What a message's content is where a template wants it.

    PLAIN: always one text; images, if there are any, are placeholders in it.
    MIXED: one text, or parts if there are images.
    PARTS: always parts.
    """

    PLAIN = "plain"
    MIXED = "mixed"
    PARTS = "parts"


def parts_of(template: ChatTemplate, tokens: ImageTokens | None) -> MessageParts:
    """What a template wants, for a model that takes images as `tokens`; None: it takes none."""
    if tokens is None:
        return MessageParts.PLAIN
    image = [{"type": "image"}, {"type": "text", "text": _SAMPLE}]
    text = _rendered(template, image)
    if _SAMPLE not in text or text.count(tokens.placeholder) != 1 or "'type'" in text:
        return MessageParts.PLAIN
    return MessageParts.MIXED if _SAMPLE in _rendered(template, _SAMPLE) else MessageParts.PARTS


def _rendered(template: ChatTemplate, content: Any) -> str:
    try:
        return template.render([{"role": "user", "content": content}])
    except InvalidRequestError:
        return ""


def with_parts(
    messages: Sequence[Mapping[str, Any]], wanted: MessageParts, tokens: ImageTokens | None
) -> Sequence[Mapping[str, Any]]:
    """Messages as their template wants them."""
    if wanted is MessageParts.MIXED or tokens is None:
        return messages
    return [
        {**each, "content": _content(each["content"], wanted, tokens)}
        if "content" in each  # not that of an assistant who only calls tools
        else each
        for each in messages
    ]


def _content(content: Any, wanted: MessageParts, tokens: ImageTokens) -> Any:
    if wanted is MessageParts.PARTS:
        is_text = isinstance(content, str)
        return [{"type": "text", "text": content}] if is_text else content
    if not isinstance(content, list):
        return content
    return "\n".join(part.get("text", tokens.placeholder) for part in content)
