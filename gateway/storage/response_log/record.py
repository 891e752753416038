"""The records of a response log: a header and entries from which all events can be made.

    header · delta … delta · (steer …) · end

They contain everything that another gateway needs to replay a response or to continue it from the
middle: the request with its seed and prompt ids, and the token ids and text of each delta. `events`
makes OpenAI's events from them; `log` holds them while the response grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import orjson
from msgspec import Struct

from penstock.engine.chat_formats import OutputFormat
from penstock.engine.request import FinishReason, Request


class ItemEvents(NamedTuple):
    """How many events an item has besides its deltas.

    Attributes:
        type: of the item.
        opening: before its first delta.
        closing: after its last.
    """

    type: str
    opening: int
    closing: int


MESSAGE, REASONING, COMPACTION = "message", "reasoning", "compaction"
ITEM_EVENTS: Mapping[str, ItemEvents] = {
    each.type: each
    for each in (
        ItemEvents(MESSAGE, 2, 3),
        ItemEvents(REASONING, 2, 3),
        ItemEvents("function_call", 1, 2),
        ItemEvents("custom_tool_call", 1, 2),
        ItemEvents(COMPACTION, 1, 1),
    )
}
COMPACTION_TRIGGER = "compaction_trigger"  # the last input item of a request to compact
STEER = "steer"  # the kind of an entry that is no delta
INTERRUPTED = FinishReason.ERROR  # the server was stopped, and could not go on with it afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The conversation of a response is compacted first: the first output item is its summary.

    Attributes:
        request: what writes the summary.
        output_format: how thoughts are found in it; they are not shown.
        around: the text of the answer's prompt, before the summary and after it.
    """

    request: Request
    output_format: OutputFormat | None
    around: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """Everything that is known before the first token.

    Attributes:
        key_id: of the API key that it was asked for with.
        nonce: the ids of its items and calls are made from it. In a turn it is the response id
            without its prefix, so that an item's id leads to its turn.
        echo: the fields of the Response object that only repeat the request.
        request: as sent to the engine, with its seed; its `request_id` is the response's id. With
            `compaction`, its prompt is known once there is a summary.
        generates: False if the prompt is only prepared, so there is no output.
        output_format: how thoughts and tool calls are found in the output; None: it is one message,
            which begins with the response. Otherwise each item begins with its first delta.
        is_background: it runs to its end even without readers.
        input_items: of this turn, in the API's format.
        takes_head: it holds the head of its conversation until its end.
        continues: its text continues its parent's, which was cut off (`penstock.continue`).
        is_turn: False for the answer to a request with an `Idempotency-Key`, which belongs to no
            conversation; its logprobs are in the format of `logged_generation.packed`.
        continues_prompt: its text continues the prompt's.
        rendering: length and digest of the text that the prompt was tokenised from, if known, and
            by what that was done (`Rendering`).
        compaction: what comes before the answer.
        settings: the request's body without its input and its place in a conversation, which a
            successor inherits; None: it cannot have one.
    """

    response_id: str
    conversation_id: str
    tenant: str
    nonce: str
    created_at: int
    echo: Mapping[str, Any]
    request: Request
    parent_id: str | None = None
    takes_head: bool = False
    generates: bool = True
    is_background: bool = False
    continues: bool = False
    is_turn: bool = True
    continues_prompt: bool = False
    input_items: tuple[Mapping[str, Any], ...] = ()
    rendering: tuple[int, bytes] | tuple[int, bytes, bytes] | None = None
    output_format: OutputFormat | None = None
    compaction: Compaction | None = None
    settings: Mapping[str, Any] | None = None
    key_id: str = ""

    @property
    def is_text_only(self) -> bool:
        return self.output_format is None and self.compaction is None

    @property
    def num_opening_events(self) -> int:
        num = 3 if self.is_background else 2  # created, queued, in_progress
        return num + self.item_events(MESSAGE).opening if self.begins_message else num

    @property
    def begins_message(self) -> bool:
        """Whether the opening events include those of a message."""
        return self.generates and self.is_text_only

    @property
    def compacts(self) -> bool:
        """Whether its message is the summary of a conversation."""
        return bool(self.input_items) and self.input_items[-1].get("type") == COMPACTION_TRIGGER

    def item_events(self, kind: str) -> ItemEvents:
        """Of an item of this kind here: a key of `ITEM_EVENTS`."""
        if kind == MESSAGE and self.compacts:
            kind = COMPACTION
        return ITEM_EVENTS[kind]


class DeltaEntry(Struct, gc=False, array_like=True):
    """A delta event, and before it, if it begins an item, the events that close the item before
    and open its own.

    Attributes:
        number: the first event's sequence number.
        text: the text of this delta.
        token_ids: since the previous entry; part of their text may only follow in the next entry.
        logprobs: token objects in the API's format.
        output_index: of its item.
        kind: its item's, a key of `ITEM_EVENTS`.
        name: in the first delta of a tool call: the tool's, as in `ItemContent`.
    """

    number: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[str, Any], ...] = ()
    output_index: int = 0
    kind: str = MESSAGE
    num_events: int = 1
    name: str = ""
    is_end: ClassVar[bool] = False

    @property
    def last_number(self) -> int:
        return self.number + self.num_events - 1


class SteerEntry(Struct, gc=False, array_like=True):
    """Input for a successor of the response, which is to end for it: the event
    `response.steer.accepted`. Its fields are those of a delta, so that every store keeps it as one.

    Attributes:
        text: the input as the client sent it, as JSON.
        name: the steer's id.
    """

    number: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    output_index: int = 0
    kind: str = STEER
    num_events: int = 1
    name: str = ""
    is_end: ClassVar[bool] = False

    @property
    def last_number(self) -> int:
        return self.number

    @property
    def input(self) -> Any:
        return orjson.loads(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """What became of the steers of a response; it is the same for all of them.

    Attributes:
        status: a successor has them as its input; or the response made tool calls, and the next
            request that continues it gets them; or they are lost to it, and the client has them.
        is_cut: the output was ended for them.
        drops_call: the last item is half a tool call, which does not become part of the output.
        error: code and message, if they failed.
    """

    status: Literal["committed", "pending", "failed"]
    is_cut: bool = False
    drops_call: bool = False
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEntry:
    """The events after the last delta; the last entry.

    Attributes:
        number: the first event's sequence number.
        reason: None if it failed; else as the engine told it, or `INTERRUPTED`.
        usage: prompt tokens, how many of them were cached, output tokens, how many of those were
            thoughts; drafts, how many of them were right; cached tokens that were in host memory,
            and what the engine told (`engine.request.Spent`). Zeros at the end may be missing.
        error: code and message of a failure.
        prefix_id: identifies the KV of the whole turn in an engine.
        steered: None if nobody steered it.
        cache: `penstock.cache`; None: there is no request before.
    """

    number: int
    num_events: int
    reason: FinishReason | None
    usage: tuple[int, ...]
    ended_at: int
    error: tuple[str, str] | None = None
    prefix_id: bytes | None = None
    steered: Steered | None = None
    cache: Mapping[str, Any] | None = None
    is_end: ClassVar[bool] = True

    @property
    def last_number(self) -> int:
        return self.number + self.num_events - 1


Entry = DeltaEntry | SteerEntry | EndEntry
