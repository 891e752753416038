"""The contract of a conversation store; `memory_store` and `redis_store` keep it alike.

Every method takes the caller's tenant: what belongs to another is not there. Ids are those of
`ids`; one that is malformed is simply not found.

A turn runs under a lease: whoever runs it calls `touch_turn` every few seconds. One that was not
touched for `DEFAULT_LEASE_S` reads as `failed` and does not hold the head any more, so that a
gateway that died locks no conversation; if it was only slow, touching or finishing it still works,
but the head may have gone to another turn by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn, TurnSummary

DEFAULT_TTL_S = 7 * 24 * 3600.0
DEFAULT_LEASE_S = 30.0


class NotFoundError(RequestRefusedError):
    """No such conversation, turn or parent is stored (any more)."""


class ConversationLockedError(RequestRefusedError):
    """409 `conversation_locked`: another turn runs on the head, or has moved it. Stock clients
    retry a plain 409, and would lose the race again."""

    headers = MappingProxyType({"x-should-retry": "false"})


class StoreUnavailableError(RequestRefusedError):
    """503 `session_store_unavailable`: Redis does not answer."""


class ConversationStore(Protocol):
    """Conversations and their turns."""

    async def create(self, conversation: Conversation) -> None:
        """A new, empty tree."""
        ...

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises: NotFoundError."""
        ...

    async def list_page(
        self, tenant: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> tuple[list[Conversation], bool]:
        """The tenant's listed conversations by creation, and whether there are more.

        Raises:
            NotFoundError: `after` is none of them.
        """
        ...

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> Conversation:
        """Replace the metadata. Raises: NotFoundError."""
        ...

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Forget a conversation with all its turns. Raises: NotFoundError."""
        ...

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        """Store a turn that starts (`in_progress`).

        Args:
            takes_head: its parent must be the head, and no other turn may hold it; it holds the
                head until `finish_turn`. Without it, it is a sibling that never conflicts.

        Raises:
            NotFoundError: the conversation or the parent is not there.
            ConversationLockedError: the head moved, or another turn holds it.
        """
        ...

    async def touch_turn(self, tenant: str, turn_id: str) -> None:
        """A turn still runs: renew its lease. One that ended, or is not there, is left alone."""
        ...

    async def finish_turn(self, turn: StoredTurn) -> None:
        """Replace a turn by what became of it, and let go of the head if it held it.

        `completed`, `incomplete` and `cancelled` move the head it held to it; `failed` does not,
        nor does a turn that continues one that is forgotten.
        A turn that was deleted meanwhile stays deleted. Repeating it changes nothing.
        """
        ...

    async def add_items(self, turn: StoredTurn) -> None:
        """A finished turn without a response, which becomes the head. Its `parent_id` is set to
        the head it found; raises as `begin_turn`."""
        ...

    async def replace_items(self, turn: StoredTurn) -> None:
        """Write a turn with other items and output (one was deleted). Raises: NotFoundError."""
        ...

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        """Raises: NotFoundError."""
        ...

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        """From the root to a turn, itself included. In use: it is the last to be dropped.

        Raises:
            NotFoundError: it, or a turn it continues, is not there.
        """
        ...

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        """All turns, parents before children. Raises: NotFoundError."""
        ...

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        """Compare and set the head.

        Raises:
            NotFoundError: no such conversation or turn.
            ConversationLockedError: the head is not `expected`, or a turn holds it.
        """
        ...

    async def delete_turn(self, tenant: str, turn_id: str) -> None:
        """Forget one turn: what continues it cannot be continued any more, nor be the head. If it
        led to the head, that goes back to its parent, or to nothing if one before that is forgotten
        too. A tree that is not listed goes with its last turn. Raises: NotFoundError."""
        ...


def no_conversation(conversation_id: str, *, param: str = "conversation") -> NotFoundError:
    return NotFoundError(
        f"no conversation {conversation_id!r} is stored here",
        code="conversation_not_found",
        param=param,
        status=404,
    )


def no_turn(turn_id: str) -> NotFoundError:
    return NotFoundError(
        f"no response {turn_id!r} is stored here", code="response_not_found", status=404
    )


def head_locked(conversation_id: str) -> ConversationLockedError:
    return ConversationLockedError(
        f"another turn of {conversation_id!r} is running, or has just become its head",
        code="conversation_locked",
        status=409,
    )
