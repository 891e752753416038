"""The kinds of output items: how an item looks, and the events that it arrives in.

    output_item.added · those of `opening`     before its first delta
    `delta` …
    those of `closing` · output_item.done      before the next item's first delta, or before the end

To add a kind, add it to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]
Fields = Callable[[JsonObject], JsonObject]
_Logprobs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemKind:
    """Items of one type.

    Attributes:
        type: of the item.
        id_prefix: of the item's id.
        item: makes an item of its id, its status, and the text and logprobs of all its deltas.
        parts: the item's field with its parts; it is empty in `output_item.added`.
        part_index: which part the events are about, by the field's name.
        delta: type of a delta event.
        delta_end: the end of a delta event without logprobs.
        opening, closing: types of events, and what makes their fields of the item.
    """

    type: str
    id_prefix: str
    item: Callable[[str, str, str, _Logprobs], JsonObject]
    parts: str
    part_index: Mapping[str, int]
    delta: str
    delta_end: bytes
    opening: Mapping[str, Fields]
    closing: Mapping[str, Fields]

    @property
    def num_opening_events(self) -> int:
        return 1 + len(self.opening)

    @property
    def num_closing_events(self) -> int:
        return len(self.closing) + 1


def _message(item_id: str, status: str, text: str, logprobs: _Logprobs) -> JsonObject:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _part(item: JsonObject) -> JsonObject:
    return {"part": item["content"][0]}


def _text(item: JsonObject) -> JsonObject:
    part = item["content"][0]
    return {"text": part["text"], "logprobs": part["logprobs"]}


MESSAGE = ItemKind(
    type="message",
    id_prefix="msg_",
    item=_message,
    parts="content",
    part_index={"content_index": 0},
    delta="response.output_text.delta",
    delta_end=b',"logprobs":[]}',
    opening={"response.content_part.added": _part},
    closing={"response.output_text.done": _text, "response.content_part.done": _part},
)
KINDS: Mapping[str, ItemKind] = {kind.type: kind for kind in (MESSAGE,)}
