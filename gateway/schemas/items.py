"""Messages as the items that are stored and listed, and back again for the chat template.

    {"id": "msg_…", "type": "message", "role", "status", "content": [{"type": "input_text", …}]}

What the assistant said has parts of `output_text`, whoever sent it; everything else `input_text`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.gateway.conversations.records import Item
from penstock.gateway.schemas.fields import Message, template_message


def new_item_id() -> str:
    return f"msg_{secrets.token_hex(16)}"


def item_objects(messages: Iterable[Message]) -> tuple[Item, ...]:
    """What came in, as items with ids of their own: one that was given is not taken over, so that
    an id names one item of a conversation."""
    return tuple(_item(message) for message in messages)


def _item(message: Message) -> Item:
    part = _output_part if message.role == "assistant" else _input_part
    item = {
        "id": new_item_id(),
        "type": "message",
        "role": message.role,
        "status": message.status or "completed",
        "content": [part(text) for text in message.content],
    }
    given = {"name": message.name, "phase": message.phase}
    return item | {name: value for name, value in given.items() if value is not None}


def for_template(item: Item) -> dict[str, str]:
    """An item as chat templates know it."""
    return template_message(
        item["role"], [part["text"] for part in item["content"]], item.get("name")
    )


def without_logprobs(item: Item) -> Item:
    """An item as it is listed where nobody asked for log-probabilities."""
    content: Sequence[Mapping[str, Any]] = item["content"]
    if not any(part.get("logprobs") for part in content):
        return item
    return {
        **item,
        "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in content],
    }


def _input_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def _output_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
