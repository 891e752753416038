"""The stored records: a conversation, and its turns as a tree."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engine.request import ImageInput

TurnStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
Item = Mapping[str, Any]  # in the API's format: {"id", "type": "message", "role", "content", …}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A tree of turns.

    Attributes:
        head: the turn that the next one continues; None in an empty tree.
        running: the turn that holds the head until it ends.
        is_listed: whether it was created as a conversation; False for a tree of responses that only
            continue each other.
        is_pinned: the user wants it above the others.
        used_at: of the last turn that has ended; without turns, of its creation.
    """

    conversation_id: str
    tenant: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    head: str | None = None
    running: str | None = None
    is_listed: bool = True
    is_pinned: bool = False
    used_at: int = 0

    @property
    def title(self) -> str:
        """As the page shows and searches it; clients set it by the metadata."""
        return self.metadata.get("title", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A conversation in which all words of a search were found.

    Attributes:
        turn_id: its newest turn that has them; None: the title has them.
        excerpt: the text around them.
    """

    conversation: Conversation
    turn_id: str | None
    excerpt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a store has of one tenant. None: it does not count that.

    Attributes:
        num_conversations: listed ones.
        num_bytes: of all its conversations.
        num_dropped: conversations that were dropped to make room, since the store is there.
        dropped_at: when the last of them was dropped (seconds of the epoch).
    """

    num_conversations: int
    num_bytes: int | None = None
    num_dropped: int | None = None
    dropped_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A text's length and digest, which are enough to see whether a longer text begins with it.

    Attributes:
        digest: SHA-256 of its UTF-8; empty: the text is not known.
        origin: names the model, adapter and template by which its ids were made; empty: unknown.
    """

    num_chars: int
    digest: bytes
    origin: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """One turn: its input and its answer.

    Attributes:
        turn_id: the response's id, or the id of items added without a response.
        items: the input.
        output: the answer; empty for items without a response and for prepared prompts.
        continues: its output continues its parent's; the last item of one and the first of the
            other are one message.
        prompt_token_ids: the whole conversation up to the answer (4 bytes each).
        output_token_ids: of the answer, end token included.
        prompt, whole: the rendered texts of the prompt's ids, and of prompt and answer together;
            None if unknown.
        prefix_id: identifies the KV of the turn in an engine.
        images: files of the images in the prompt, by digest.
        places: where they are among its ids, without their files.
        response: the finished Response object as JSON; empty while it runs and for items without a
            response.
    """

    turn_id: str
    conversation_id: str
    tenant: str
    parent_id: str | None
    status: TurnStatus
    created_at: int
    items: tuple[Item, ...] = ()
    output: tuple[Item, ...] = ()
    continues: bool = False
    prompt_token_ids: array[int] = field(default_factory=lambda: array("I"))
    output_token_ids: array[int] = field(default_factory=lambda: array("I"))
    prompt: Rendering | None = None
    whole: Rendering | None = None
    prefix_id: bytes | None = None
    cache_salt: str = ""
    images: Mapping[str, bytes] = field(default_factory=dict)
    places: tuple[ImageInput, ...] = ()
    response: bytes = b""

    @property
    def all_items(self) -> tuple[Item, ...]:
        return (*self.items, *self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSummary:
    """A listed node of the tree."""

    turn_id: str
    parent_id: str | None
    status: TurnStatus
    created_at: int
