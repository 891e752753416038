"""What a response is, written down: a header and entries from which all its events can be made.

    header · delta … delta · ending

Everything another gateway needs to replay a response, or to carry it on from the middle, is here:
the request with its seed and prompt ids, the token ids and the text of each delta. `events` makes
OpenAI's events of it, `log` holds it while it grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.request import FinishReason, Request

NUM_OPENING_EVENTS = 4  # created, in_progress, output_item.added, content_part.added
NUM_CLOSING_EVENTS = 4  # output_text.done, content_part.done, output_item.done, the terminal one


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """What is known before the first token.

    Attributes:
        item_id: of the message that answers.
        echo: the fields of the Response object that only repeat the request.
        request: as the engine got it, seed drawn; its `request_id` is the response's id.
        generates: False if the prompt is only prepared: then there is no message.
        is_background: it runs to its end whoever listens.
        input_items: of this turn, as the API shows them.
        takes_head: it holds the head of its conversation until its end.
        continues: its text goes on where its parent's broke off (`penstock.continue`).
        is_turn: False of an answer that is no response of a conversation: one to a request with an
            `Idempotency-Key`, whose deltas have logprobs as `logged_generation` packs them.
        continues_prompt: its text is the prompt's next words, not one of its own.
        rendering: length and digest of what the prompt was tokenised from, where that is known.
    """

    response_id: str
    conversation_id: str
    tenant: str
    item_id: str
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
    rendering: tuple[int, bytes] | None = None

    @property
    def num_opening_events(self) -> int:
        extra = 1 if self.is_background else 0  # response.queued
        return (NUM_OPENING_EVENTS if self.generates else 2) + extra


@dataclass(slots=True)  # not frozen: made for every token
class DeltaEntry:
    """One `response.output_text.delta`.

    Attributes:
        number: its sequence number.
        text: may be shown now.
        token_ids: that came since the entry before; part of their text may follow later only.
        logprobs: token objects as the API shows them.
    """

    number: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def last_number(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEntry:
    """The events after the last delta; nothing follows.

    Attributes:
        number: the first event's sequence number.
        reason: None if it failed.
        usage: prompt tokens, cached tokens of them, output tokens.
        error: code and message of a failure.
        prefix_id: names the KV of the whole turn to an engine.
    """

    number: int
    num_events: int
    reason: FinishReason | None
    usage: tuple[int, int, int]
    ended_at: int
    error: tuple[str, str] | None = None
    prefix_id: bytes | None = None

    @property
    def last_number(self) -> int:
        return self.number + self.num_events - 1


Entry = DeltaEntry | EndEntry
