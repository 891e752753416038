"""The contract of a conversation store, implemented by `memory_store`, `disk_store` and
`redis_store`. What an operation makes of a conversation is in `tree`.

Every method takes the caller's tenant; another tenant's data is not found. Ids are those of `ids`;
a malformed id is not found.

Whether a turn runs is asked of the store of response logs. One that does not run reads as `failed`
and no longer holds the head, so that a gateway that died does not lock a conversation. If the
gateway was only slow, it can still finish the turn, but another may have taken the head by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

from penstock.engine.settings.declaration import default_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Holdings,
    SearchHit,
    StoredTurn,
    TurnSummary,
)

StoreKind = Literal["memory", "disk", "redis"]
DEFAULT_TTL_S: float = default_of(GatewayConfig, "session_ttl_s")
STARTS_S = 30.0  # a turn counts as running for so long before it must have a log
# Of what a conversation has of items without a response, which no engine's context bounds: whoever
# reads the conversation decodes them all, and 8 MiB of small parts take 0.2 s and 80 MB.
MAX_ADDED_BYTES = 8 << 20


class NotFoundError(RequestRefusedError):
    """The conversation, turn or parent is not stored, or no longer."""


class ConversationLockedError(RequestRefusedError):
    """409 `conversation_locked`: another turn runs on the head, or has moved it. The header keeps
    stock clients from retrying, as they do after other 409s."""

    headers = MappingProxyType({"x-should-retry": "false"})


class StoreUnavailableError(RequestRefusedError):
    """503 `session_store_unavailable`: Redis cannot be used; the message says why."""


class UnreadableDataError(RequestRefusedError):
    """409 `stored_data_unreadable`: Redis holds something at a key that this server did not write.
    The header keeps clients from retrying."""

    headers = MappingProxyType({"x-should-retry": "false"})

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} cannot be read: something else has written to its keys in Redis",
            code="stored_data_unreadable",
            status=409,
        )


def store_unavailable(why: str) -> StoreUnavailableError:
    """
    Args:
        why: as "Redis is out of memory".
    """
    return StoreUnavailableError(
        f"conversations and responses cannot be stored or read now: {why}; try again later",
        code="session_store_unavailable",
        status=503,
    )


class ConversationStore(Protocol):
    """Conversations and their turns.

    Attributes:
        kind: where they are.
        is_durable: whether they are there after the server was restarted.
    """

    kind: StoreKind
    is_durable: bool

    async def create(self, conversation: Conversation) -> None:
        """Store a new, empty tree."""
        ...

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises: NotFoundError."""
        ...

    async def list_page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        pinned: bool | None = None,
    ) -> tuple[list[Conversation], bool]:
        """The tenant's listed conversations, by the time of the last turn that has ended (without
        turns, of creation), then by id; and whether there are more.

        Args:
            pinned: only those that are pinned, or that are not.

        Raises:
            NotFoundError: `after` is not one of them.
        """
        ...

    async def search(
        self, tenant: str, query: str, *, limit: int, offset: int = 0
    ) -> tuple[list[SearchHit], bool]:
        """The tenant's listed conversations that have all words of a query in their title or in the
        messages of one turn, those with the newest such turn first; and whether there are more.
        What a word is, and matches, is in `texts`. A turn is found when it has ended.

        Raises:
            RequestRefusedError: 501 `search_not_supported`: this store has no index.
        """
        ...

    async def holdings(self, tenant: str) -> Holdings: ...

    async def update(
        self,
        tenant: str,
        conversation_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
    ) -> Conversation:
        """Replace the metadata, pin or unpin; None: as it is. This is no use: the place in the list
        stays. Raises: NotFoundError."""
        ...

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation with all its turns. Raises: NotFoundError."""
        ...

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        """Store a turn that starts (`in_progress`).

        Args:
            takes_head: the turn holds the head until `finish_turn`; its parent must be the head,
                and no other turn may hold it. Otherwise the turn is a sibling and never conflicts.

        Raises:
            NotFoundError: the conversation or the parent does not exist.
            ConversationLockedError: the head has moved, or another turn holds it.
        """
        ...

    async def finish_turn(self, turn: StoredTurn) -> None:
        """Replace a turn by its final state, and release the head if it held it.

        With `completed`, `incomplete` or `cancelled` the turn becomes the head if it held it; with
        `failed` it does not, nor if a turn before it was deleted. A turn that was deleted meanwhile
        stays deleted. The call is idempotent.
        """
        ...

    async def add_items(self, turn: StoredTurn) -> None:
        """Store a finished turn without a response as the new head. Its `parent_id` becomes the
        previous head.

        Raises:
            StoreLimitError: the conversation would have more than its tenant may store, or more
                than `MAX_ADDED_BYTES` of such turns.
            RequestRefusedError: as `begin_turn`.
        """
        ...

    async def replace_items(self, turn: StoredTurn) -> None:
        """Replace a turn's content (an item was deleted); what only the old one used is deleted.
        Raises: NotFoundError."""
        ...

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        """Raises: NotFoundError."""
        ...

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        """The turns from the root to a turn, inclusive. This counts as use, so the conversation is
        the last to be dropped.

        Raises:
            NotFoundError: the turn, or one before it, does not exist.
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
            NotFoundError: the conversation or turn does not exist.
            ConversationLockedError: the head is not `expected`, or a turn holds it.
        """
        ...

    async def delete_turn(self, tenant: str, turn_id: str, *, joins: bool = False) -> None:
        """Delete one turn. Turns after it can no longer be continued, nor be the head. If it led to
        the head, its parent becomes the head, or no turn if one before that was deleted too. An
        unlisted tree is deleted with its last turn.

        Args:
            joins: turns after it continue its parent instead, and the head stays if it is one of
                them. What they keep of their prompts is as it was.

        Raises:
            NotFoundError: there is no such turn.
            ConversationLockedError: with `joins`, a turn of the conversation runs.
        """
        ...


def search_not_supported() -> RequestRefusedError:
    return RequestRefusedError(
        "conversations in Redis cannot be searched; those that one gateway keeps on disk "
        "(--data-dir) or in memory can",
        code="search_not_supported",
        status=501,
    )


def no_conversation(conversation_id: str, *, param: str = "conversation") -> NotFoundError:
    return NotFoundError(
        f"there is no conversation {conversation_id!r}",
        code="conversation_not_found",
        param=param,
        status=404,
    )


def no_turn(turn_id: str) -> NotFoundError:
    return NotFoundError(f"there is no response {turn_id!r}", code="response_not_found", status=404)


def head_locked(conversation_id: str) -> ConversationLockedError:
    return ConversationLockedError(
        f"another turn of {conversation_id!r} is running or has just become its head",
        code="conversation_locked",
        status=409,
    )
