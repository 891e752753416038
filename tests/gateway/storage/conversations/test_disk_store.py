"""What only a store on disk can do, or suffer: restarts, erasing, a full disk, damage."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.storage.conversations import disk_rows, disk_texts
from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.disk import Disk

from .conftest import DiskBed
from .making import TENANT, a_conversation, a_turn, finished, head_of, not_found, say

WORD = "gooseberry"


def files_with(folder: Path, word: str = WORD) -> list[str]:
    """Files that have a word, in any case, or in which SQLite finds it."""
    found = [
        path.name for path in sorted(folder.iterdir()) if word.encode() in path.read_bytes().lower()
    ]
    with sqlite3.connect(folder / "penstock.db") as connection:
        for (shard,) in connection.execute("SELECT id FROM shards").fetchall():
            connection.execute(
                f"CREATE VIRTUAL TABLE temp.words_{shard} USING fts5vocab(main, texts_{shard}, row)"
            )
            sql = f"SELECT term FROM temp.words_{shard} WHERE term LIKE ?"
            found += [term for (term,) in connection.execute(sql, (f"%{word[:6]}%",))]
    connection.close()
    return found


def content_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


def message(text: str, role: str = "user") -> dict[str, Any]:
    part = {"type": "input_text" if role == "user" else "output_text", "text": text}
    return {"id": f"msg_{role}", "type": "message", "role": role, "content": [part]}


def planted(conversation: Conversation, **fields: Any) -> StoredTurn:
    """A turn with the word in everything that it has."""
    thought = {"id": "rs_1", "type": "reasoning", "summary": [{"text": f"a {WORD}?"}]}
    call = {"id": "fc_1", "type": "function_call", "name": "eat", "arguments": f'["{WORD}"]'}
    turn = a_turn(
        conversation,
        items=(message(f"What is a {WORD}? Is the {WORD.title()} blue?"),),
        images={"digest": b"png" + WORD.encode() * 300},
        **fields,
    )
    output = (thought, call, message(f"A {WORD} is a berry.", "assistant"))
    return replace(finished(turn, output=output), response=f'{{"{WORD}": 1}}'.encode())


async def store_planted(store: DiskConversationStore, conversation: Conversation) -> StoredTurn:
    head = await head_of(store, conversation)
    turn = planted(conversation, parent_id=head)
    await store.begin_turn(turn, takes_head=True)
    await store.finish_turn(turn)
    return turn


def in_words(conversation: Conversation) -> dict[str, str]:
    return {"title": f"About a {WORD}", f"my {WORD}": f"{WORD} pie", "other": "kept"}


async def reopened(bed: DiskBed, folder: Path) -> DiskConversationStore:
    """The store of the next server."""
    for store in bed.stores:
        await store.close()
    bed.stores.clear()
    await bed.disk.close()
    bed.disk = Disk(folder, bed.migrations)
    bed.disk.open()
    bed.disk.start()
    store = bed.store()
    await store.start()
    return store


async def test_what_was_stored_is_there_after_a_restart(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    running = a_turn(conversation, first)
    await store.begin_turn(running, takes_head=True)
    num_bytes = store.num_bytes

    store = await reopened(disk_bed, tmp_path)
    shown = await store.get(TENANT, conversation.conversation_id)
    assert (shown.head, shown.running) == (first.turn_id, None)
    assert await store.path(TENANT, first.turn_id) == [first]
    assert (await store.turn(TENANT, running.turn_id)).status == "failed"
    assert store.num_bytes == num_bytes
    disk_bed.running.add(running.turn_id)  # its log is taken over
    assert (await store.get(TENANT, conversation.conversation_id)).running == running.turn_id
    await store.finish_turn(finished(running))
    assert await head_of(store, conversation) == running.turn_id


async def test_a_deleted_conversation_is_in_no_file(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, kept = disk_bed.store(), a_conversation(metadata={"title": "kept"})
    await store.create(kept)
    await say(store, kept)
    conversation = a_conversation(metadata=in_words(kept))
    await store.create(conversation)
    for _ in range(3):
        await store_planted(store, conversation)
    assert files_with(tmp_path)
    await store.delete(TENANT, conversation.conversation_id)
    await store.erased()
    assert files_with(tmp_path) == []
    assert (await store.search(TENANT, WORD, limit=1)) == ([], False)
    assert len((await store.search(TENANT, "kept", limit=9))[0]) == 1


async def test_a_deleted_turn_is_in_no_file(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    turn = await store_planted(store, conversation)
    await store.delete_turn(TENANT, turn.turn_id)
    await store.erased()
    assert files_with(tmp_path) == []
    assert await store.path(TENANT, first.turn_id) == [first]


async def test_a_deleted_item_is_in_no_file(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    turn = await store_planted(store, conversation)
    bare = replace(turn, items=(), output=(), response=b"", images={})
    await store.replace_items(bare)
    await store.erased()
    assert files_with(tmp_path) == []
    assert await store.turn(TENANT, turn.turn_id) == bare


async def test_an_old_title_is_in_no_file(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    conversation = replace(conversation, metadata=in_words(conversation))
    await store.create(conversation)
    await say(store, conversation)
    await store.update(TENANT, conversation.conversation_id, metadata={"title": "new"})
    await store.erased()
    assert files_with(tmp_path) == []


async def test_what_is_dropped_to_make_room_is_in_no_file(
    disk_bed: DiskBed, tmp_path: Path
) -> None:
    """The oldest by use goes first, and is counted; one that runs stays."""
    store = disk_bed.store(max_bytes=56_000)
    runs = a_conversation()
    await store.create(runs)
    running = a_turn(runs)
    await store.begin_turn(running, takes_head=True)
    dropped = a_conversation(metadata=in_words(runs))
    await store.create(dropped)
    await store_planted(store, dropped)
    for _ in range(3):
        other = a_conversation()
        await store.create(other)
        long = a_turn(other, items=(message("x" * 15_000),), status="completed")
        await store.begin_turn(long, takes_head=True)
        await store.finish_turn(finished(long))
    with not_found():
        await store.get(TENANT, dropped.conversation_id)
    await store.erased()
    assert files_with(tmp_path) == []
    assert store.num_bytes <= 56_000
    assert (await store.turn(TENANT, running.turn_id)).status == "in_progress"
    held = await store.holdings(TENANT)
    assert (held.num_conversations, held.num_dropped) == (4, 1)
    assert held.dropped_at is not None
    store = await reopened(disk_bed, tmp_path)
    assert (await store.holdings(TENANT)).num_dropped == 1


async def test_a_flood_of_one_tenant_costs_another_nothing(disk_bed: DiskBed) -> None:
    store = disk_bed.store(max_bytes=40_000)
    mine = a_conversation()
    await store.create(mine)
    await say(store, mine)
    for _ in range(12):
        flood = a_conversation(tenant="flood")
        await store.create(flood)
        long = a_turn(flood, items=(message("x" * 4000),))
        await store.begin_turn(long, takes_head=True)
        await store.finish_turn(finished(long))
    assert (await store.get(TENANT, mine.conversation_id)).head is not None
    assert (await store.holdings(TENANT)).num_dropped == 0
    held = await store.holdings("flood")
    assert held.num_dropped is not None
    assert held.num_dropped > 0
    assert held.num_conversations == 12 - held.num_dropped
    assert store.num_bytes <= 40_000


async def test_reading_keeps_a_conversation(disk_bed: DiskBed, tmp_path: Path) -> None:
    """The order of use outlives the server."""
    store = disk_bed.store()
    made = [a_conversation() for _ in range(3)]
    for conversation in made:
        await store.create(conversation)
        await say(store, conversation)
    await store.get(TENANT, made[0].conversation_id)
    store = await reopened(disk_bed, tmp_path)
    assert [key for _, key in store._shelf.droppable(TENANT)] == [
        made[index].conversation_id for index in (1, 2, 0)
    ]


async def test_of_much_that_comes_and_goes_nothing_stays(
    disk_bed: DiskBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows move between pages, and texts between segments: no copy is left behind."""
    monkeypatch.setattr(disk_texts, "SHARD_CHARS", 20_000)
    store = disk_bed.store()
    made = []
    for index in range(240):
        conversation = a_conversation(metadata={"title": f"title{index}goose"})
        await store.create(conversation)
        size = 50 + 37 * (index % 40)
        turn = a_turn(conversation, items=(message(f"word{index}goose " * (size // 10)),))
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(finished(turn))
        made.append(conversation)
        if index % 3 == 2:
            gone = made[index - 2]
            await store.delete(TENANT, gone.conversation_id)
    await store.erased()
    content = b"".join(content_of(tmp_path))
    left = [
        word
        for index in range(0, 240, 3)
        for word in (f"word{index}goose", f"title{index}goose")
        if word.encode() in content
    ]
    assert left == []
    assert b"word1goose" in content


async def test_what_could_not_be_erased_is_erased_by_the_next_server(
    disk_bed: DiskBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    await store_planted(store, conversation)
    with monkeypatch.context() as patched:
        patched.setattr(DiskConversationStore, "_erase_soon", lambda _: None)
        await store.delete(TENANT, conversation.conversation_id)
    store = await reopened(disk_bed, tmp_path)
    await store.erased()
    assert files_with(tmp_path) == []


async def test_many_can_be_deleted_at_once(disk_bed: DiskBed, tmp_path: Path) -> None:
    store = disk_bed.store()
    made = [a_conversation(metadata=in_words(a_conversation())) for _ in range(20)]
    for conversation in made:
        await store.create(conversation)
        await store_planted(store, conversation)
    await asyncio.gather(*(store.delete(TENANT, each.conversation_id) for each in made))
    await store.erased()
    assert files_with(tmp_path) == []
    assert store.num_bytes == 0


async def test_a_full_disk_is_said_and_later_it_goes_on(disk_bed: DiskBed) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)

    def limit(num_pages: int) -> None:
        assert disk_bed.disk._writer is not None
        disk_bed.disk._writer.execute(f"PRAGMA max_page_count = {num_pages}").fetchone()

    limit(1)
    big = a_turn(conversation, turn, items=(message("x" * 1_000_000),))
    with pytest.raises(StoreUnavailableError, match="the disk is full") as caught:
        await store.begin_turn(big, takes_head=True)
    assert (caught.value.status, caught.value.code) == (503, "session_store_unavailable")
    assert await store.path(TENANT, turn.turn_id) == [turn]  # what is there can be read
    limit(1 << 30)
    await store.begin_turn(big, takes_head=True)
    assert (await store.get(TENANT, conversation.conversation_id)).running == big.turn_id


async def test_after_damage_it_is_empty_and_goes_on(disk_bed: DiskBed, tmp_path: Path) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    disk_bed.disk._on_emptied = store.forget_all
    await store.create(conversation)

    def meet(_: sqlite3.Connection) -> None:
        error = sqlite3.DatabaseError("malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    with pytest.raises(Exception, match="damaged"):
        await disk_bed.disk.run(meet)
    with not_found():
        await store.get(TENANT, conversation.conversation_id)
    assert store.num_bytes == 0
    await store.create(conversation)
    await say(store, conversation)


async def test_a_search_goes_through_all_shards(
    disk_bed: DiskBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_texts, "SHARD_CHARS", 100)
    store, ids = disk_bed.store(), []
    for index in range(9):
        conversation = a_conversation()
        await store.create(conversation)
        turn = a_turn(conversation, items=(message(f"apple {'x' * 60} number{index}"),))
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(finished(turn))
        ids.append(conversation.conversation_id)
    hits, has_more = await store.search(TENANT, "apple", limit=5, offset=2)
    assert [hit.conversation.conversation_id for hit in hits] == ids[-3:-8:-1]
    assert has_more
    (hit,), _ = await store.search(TENANT, "apple number4", limit=5)
    assert hit.conversation.conversation_id == ids[4]


async def test_a_damaged_index_is_made_again(disk_bed: DiskBed) -> None:
    """What it is made of is not lost."""

    def damage(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM texts_1_data WHERE id > 10")

    store, conversation = disk_bed.store(), a_conversation()
    await store.create(conversation)
    for text in ("apple", "pear"):
        head = await head_of(store, conversation)
        turn = a_turn(conversation, items=(message(text),), parent_id=head)
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(finished(turn))
    await disk_bed.disk.run(damage)
    (hit,), _ = await store.search(TENANT, "pear", limit=5)
    assert hit.turn_id == turn.turn_id
    await disk_bed.disk.run(damage)
    await store.delete_turn(TENANT, turn.turn_id)
    await store.erased()
    assert (await store.search(TENANT, "pear", limit=5)) == ([], False)
    assert len((await store.search(TENANT, "apple", limit=5))[0]) == 1


async def test_damage_that_a_start_meets_does_not_prevent_it(
    disk_bed: DiskBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, conversation = disk_bed.store(), a_conversation()
    disk_bed.disk._on_emptied = store.forget_all

    def meet(_: sqlite3.Connection) -> None:
        error = sqlite3.DatabaseError("malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(disk_rows, "all_by_use", meet)
        await store.start()
    await store.create(conversation)
    assert len((await store.list_page(TENANT, limit=1))[0]) == 1
