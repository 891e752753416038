"""Whatever is done to a store, it answers as the one in memory."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations import disk_rows
from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn
from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
from penstock.gateway.storage.conversations.store import ConversationStore
from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ....redis_server import RedisServer
from .making import TENANT, a_conversation, a_turn, finished

_TENANTS = st.sampled_from([TENANT, TENANT, TENANT, "tenant b"])
_STATUSES = st.sampled_from(["completed", "incomplete", "cancelled", "failed"])


class StoresAgree(RuleBasedStateMachine):
    make: ClassVar[Callable[[], contextlib.AbstractAsyncContextManager[ConversationStore]]]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._exits = contextlib.AsyncExitStack()
        self._memory = MemoryConversationStore(1 << 30, clock=lambda: 0.0)
        self._other = self._runner.run(self._exits.enter_async_context(type(self).make()))

    def teardown(self) -> None:
        self._runner.run(self._exits.aclose())
        self._runner.close()

    def both(self, operate: Callable[[ConversationStore], Awaitable[Any]]) -> Any:
        async def outcome(store: ConversationStore) -> Any:
            try:
                return await operate(store)
            except RequestRefusedError as error:
                return type(error), str(error)

        expected = self._runner.run(outcome(self._memory))
        assert self._runner.run(outcome(self._other)) == expected
        return expected

    conversations = Bundle("conversations")
    turns = Bundle("turns")
    running = Bundle("running")

    @initialize(target=conversations)
    def begin(self) -> Any:
        made = [a_conversation(), a_conversation(is_listed=False)]
        for one in made:
            self.both(lambda store, one=one: store.create(one))
        return multiple(*made)

    @rule(target=conversations, is_listed=st.booleans(), created_at=st.integers(0, 3))
    def create(self, is_listed: bool, created_at: int) -> Conversation:
        conversation = a_conversation(is_listed=is_listed, created_at=created_at)
        self.both(lambda store: store.create(conversation))
        return conversation

    @rule(target=running, conversation=conversations, takes_head=st.booleans())
    def begin_at_head(self, conversation: Conversation, takes_head: bool) -> StoredTurn:
        key = (TENANT, conversation.conversation_id)
        found = self.both(lambda store: store.get(*key))
        turn = a_turn(conversation)
        if isinstance(found, Conversation):
            turn = replace(turn, parent_id=found.head)
        self.both(lambda store: store.begin_turn(turn, takes_head=takes_head))
        return turn

    @rule(target=running, parent=turns, takes_head=st.booleans())
    def begin_behind(self, parent: StoredTurn, takes_head: bool) -> StoredTurn:
        conversation = a_conversation(conversation_id=parent.conversation_id)
        turn = a_turn(conversation, parent)
        self.both(lambda store: store.begin_turn(turn, takes_head=takes_head))
        return turn

    @rule(target=turns, turn=consumes(running), status=_STATUSES)
    def finish(self, turn: StoredTurn, status: Any) -> StoredTurn:
        self.both(lambda store: store.finish_turn(finished(turn, status)))
        return turn

    @rule(turn=st.one_of(running, turns), status=_STATUSES, tenant=_TENANTS)
    def finish_again(self, turn: StoredTurn, status: Any, tenant: str) -> None:
        self.both(lambda store: store.finish_turn(replace(finished(turn, status), tenant=tenant)))

    @rule(target=turns, conversation=conversations)
    def add_items(self, conversation: Conversation) -> StoredTurn:
        turn = a_turn(conversation, status="completed")
        self.both(lambda store: store.add_items(turn))
        return turn

    @rule(turn=turns)
    def replace_items(self, turn: StoredTurn) -> None:
        self.both(lambda store: store.replace_items(replace(turn, items=())))

    @rule(turn=st.one_of(running, turns), tenant=_TENANTS)
    def read_turn(self, turn: StoredTurn, tenant: str) -> None:
        self.both(lambda store: store.turn(tenant, turn.turn_id))
        self.both(lambda store: store.path(tenant, turn.turn_id))

    @rule(turn=st.one_of(running, turns), tenant=_TENANTS, joins=st.booleans())
    def delete_turn(self, turn: StoredTurn, tenant: str, joins: bool) -> None:
        self.both(lambda store: store.delete_turn(tenant, turn.turn_id, joins=joins))

    @rule(conversation=conversations, turn=turns, to_nothing=st.booleans(), knows=st.booleans())
    def set_head(
        self, conversation: Conversation, turn: StoredTurn, to_nothing: bool, knows: bool
    ) -> None:
        key = (TENANT, conversation.conversation_id)
        found = self.both(lambda store: store.get(*key))
        expected = found.head if isinstance(found, Conversation) and knows else turn.turn_id
        head = None if to_nothing else turn.turn_id
        self.both(lambda store: store.set_head(*key, head, expected=expected))

    @rule(
        conversation=conversations,
        tenant=_TENANTS,
        metadata=st.sampled_from([None, {"title": "new"}, {}]),
        is_pinned=st.sampled_from([None, True, False]),
    )
    def update(
        self, conversation: Conversation, tenant: str, metadata: Any, is_pinned: bool | None
    ) -> None:
        key = (tenant, conversation.conversation_id)
        self.both(lambda store: store.update(*key, metadata=metadata, is_pinned=is_pinned))

    @rule(conversation=consumes(conversations), tenant=_TENANTS)
    def delete(self, conversation: Conversation, tenant: str) -> None:
        self.both(lambda store: store.delete(tenant, conversation.conversation_id))

    @rule(conversation=conversations, tenant=_TENANTS)
    def read(self, conversation: Conversation, tenant: str) -> None:
        self.both(lambda store: store.get(tenant, conversation.conversation_id))
        self.both(lambda store: store.tree(tenant, conversation.conversation_id))

    @rule(
        tenant=_TENANTS,
        limit=st.integers(1, 4),
        newest_first=st.booleans(),
        after=st.none() | conversations,
        pinned=st.sampled_from([None, True, False]),
    )
    def list_page(
        self,
        tenant: str,
        limit: int,
        newest_first: bool,
        after: Conversation | None,
        pinned: bool | None,
    ) -> None:
        cursor = None if after is None or pinned is not None else after.conversation_id
        self.both(
            lambda store: store.list_page(
                tenant, limit=limit, after=cursor, newest_first=newest_first, pinned=pinned
            )
        )


@contextlib.asynccontextmanager
async def in_redis(url: str) -> AsyncIterator[ConversationStore]:
    link = RedisLink(RedisAddress.parse(url), timeout_s=60)
    await link.client.flushdb()
    yield RedisConversationStore(link, starts_s=1e6)  # as time stands still
    await link.aclose()


@contextlib.asynccontextmanager
async def on_disk(folder: Path) -> AsyncIterator[ConversationStore]:
    disk = Disk(Path(tempfile.mkdtemp(dir=folder)), [disk_rows.SCHEMA])
    disk.open()
    disk.start()
    store = DiskConversationStore(disk, clock=lambda: 0.0)
    yield store
    await store.close()
    await disk.close()


_NUM_EXAMPLES = pytest.mark.parametrize(
    "num_examples", [12, pytest.param(60, marks=pytest.mark.exhaustive)]
)


def _run(make: Callable[[], Any], num_examples: int) -> None:
    machine = type("Machine", (StoresAgree,), {"make": staticmethod(make)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.redis
@_NUM_EXAMPLES
def test_the_store_in_redis_agrees(shared_server: RedisServer, num_examples: int) -> None:
    _run(partial(in_redis, shared_server.url), num_examples)


@_NUM_EXAMPLES
def test_the_store_on_disk_agrees(tmp_path: Path, num_examples: int) -> None:
    _run(partial(on_disk, tmp_path), num_examples)
