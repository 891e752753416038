"""What is stored of a conversation: itself, and its turns as a tree."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TurnStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
Item = Mapping[str, Any]  # as the API shows it: {"id", "type": "message", "role", "content", …}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A tree of turns.

    Attributes:
        head: the turn that the next one continues; None while there is none.
        running: the turn that holds the head until it ends.
        is_listed: made as a conversation; False for the tree of responses that merely continue
            each other.
    """

    conversation_id: str
    tenant: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    head: str | None = None
    running: str | None = None
    is_listed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A text as its length and digest: enough to see whether a longer text begins with it."""

    num_chars: int
    digest: bytes  # SHA-256 of its UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """One turn: what came in, and what was answered.

    Attributes:
        turn_id: the response's id, or that of items added without one.
        items: what came in.
        output: the message that answered; None for items alone and for prepared prompts.
        continues: its output goes on where its parent's broke off: both are one message.
        prompt_token_ids: the whole conversation up to the answer (4 bytes each).
        output_token_ids: of the answer, end token included.
        prompt, whole: the renderings that the prompt's ids, and those with the answer's, stand
            for; None where they are not known.
        prefix_id: names the KV of the turn to an engine.
        response: the finished Response object as JSON; empty while it runs and for items alone.
    """

    turn_id: str
    conversation_id: str
    tenant: str
    parent_id: str | None
    status: TurnStatus
    created_at: int
    items: tuple[Item, ...] = ()
    output: Item | None = None
    continues: bool = False
    prompt_token_ids: array[int] = field(default_factory=lambda: array("I"))
    output_token_ids: array[int] = field(default_factory=lambda: array("I"))
    prompt: Rendering | None = None
    whole: Rendering | None = None
    prefix_id: bytes | None = None
    cache_salt: str = ""
    response: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSummary:
    """A node of the tree as it is listed."""

    turn_id: str
    parent_id: str | None
    status: TurnStatus
    created_at: int
