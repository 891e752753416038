"""Many conversations on disk: pages of the list, searches, and what a start takes.

    python -m tests.support.stored_conversations [--folder FOLDER] [--conversations 100000]

A folder that was filled before is only measured. Words are drawn as often as in a language (Zipf).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from penstock.gateway.storage.conversations import disk_rows
from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
from penstock.gateway.storage.conversations.ids import new_conversation_id, new_response_id
from penstock.gateway.storage.conversations.records import Conversation, Item, StoredTurn
from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.response_log import disk_journal
from penstock.load.report.tables import table

_TENANT = "t"
_NUM_WORDS = 50_000
_NUM_AT_ONCE = 50
_NUM_TURNS, _QUESTION_WORDS, _ANSWER_WORDS = 2, 20, 120
_PAGE, _HITS = 100, 20
_REPEATS = 9
_DRAW = random.Random(1)
_WORDS = [
    "".join(_DRAW.choices("abcdefghijklmnopqrstuvwxyz", k=_DRAW.randint(2, 10)))
    for _ in range(_NUM_WORDS)
]
_ODDS = list(itertools.accumulate(1 / rank for rank in range(1, _NUM_WORDS + 1)))


def _text(num_words: int) -> str:
    return " ".join(_DRAW.choices(_WORDS, cum_weights=_ODDS, k=num_words))


def _message(role: str, num_words: int) -> Item:
    content = [{"type": "text", "text": _text(num_words)}]
    return {"id": "msg_1", "type": "message", "role": role, "content": content}


async def _fill(store: DiskConversationStore, numbers: range) -> None:
    for start in range(0, len(numbers), _NUM_AT_ONCE):
        await asyncio.gather(*(_one(store, at) for at in numbers[start : start + _NUM_AT_ONCE]))


async def _one(store: DiskConversationStore, at: int) -> None:
    conversation = Conversation(
        conversation_id=new_conversation_id(),
        tenant=_TENANT,
        created_at=at,
        metadata={"title": _text(5)},
    )
    await store.create(conversation)
    parent = None
    for _ in range(_NUM_TURNS):
        turn = StoredTurn(
            turn_id=new_response_id(conversation.conversation_id),
            conversation_id=conversation.conversation_id,
            tenant=_TENANT,
            parent_id=parent,
            status="completed",
            created_at=at,
            items=(_message("user", _QUESTION_WORDS),),
            output=(_message("assistant", _ANSWER_WORDS),),
        )
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(turn)
        parent = turn.turn_id


async def _timed(name: str, operation: Callable[[], Awaitable[Any]]) -> tuple[str, str, str]:
    """A row: milliseconds of the first time, and of the median of the others."""
    took_ms = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        await operation()
        took_ms.append(1e3 * (time.perf_counter() - begun_s))
    median = sorted(took_ms[1:])[len(took_ms) // 2 - 1]
    return name, f"{took_ms[0]:.1f}", f"{median:.1f}"


async def _measure(folder: Path, num: int) -> None:
    disk = Disk(folder, (disk_rows.SCHEMA, disk_journal.SCHEMA))
    begun_s = time.perf_counter()
    disk.open()
    disk.start()
    store = DiskConversationStore(disk, 1 << 40)
    await store.start()
    start_ms = 1e3 * (time.perf_counter() - begun_s)
    known = (await store.holdings(_TENANT)).num_conversations
    begun_s = time.perf_counter()
    await _fill(store, range(known, num))
    filled_s = time.perf_counter() - begun_s
    page, _ = await store.list_page(_TENANT, limit=_PAGE)
    middle = (await store.list_page(_TENANT, limit=_PAGE, after=page[-1].conversation_id))[0][-1]
    queries = {
        "the most frequent word": _WORDS[0],
        "a rare word": _WORDS[-5000],
        "three rare words": " ".join(_WORDS[-5003:-5000]),
        "a frequent and a rare word": f"{_WORDS[2]} {_WORDS[-5000]}",
        "the beginning of words": _WORDS[2][:3],
        "no word of any": "qqqqqqq",
    }
    rows = [
        await _timed("a page", lambda: store.list_page(_TENANT, limit=_PAGE)),
        await _timed(
            "a later page",
            lambda: store.list_page(_TENANT, limit=_PAGE, after=middle.conversation_id),
        ),
        *[
            await _timed(f"search: {name}", partial(store.search, _TENANT, query, limit=_HITS))
            for name, query in queries.items()
        ],
        await _timed("one conversation", lambda: store.get(_TENANT, middle.conversation_id)),
        await _timed("counts", lambda: store.holdings(_TENANT)),
    ]
    await store.delete(_TENANT, page[0].conversation_id)
    begun_s = time.perf_counter()
    await store.erased()
    erased_ms = 1e3 * (time.perf_counter() - begun_s)
    rows.append(("a deleted one is erased", f"{erased_ms:.1f}", ""))
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())  # noqa: ASYNC240
    print(table(("", "first ms", "median ms"), rows))
    print(f"{num} conversations of {_NUM_TURNS} turns: {num_bytes / 2**20:,.0f} MiB on disk")
    print(f"start with {known}: {start_ms:.0f} ms; {num - known} stored in {filled_s:.0f} s")
    print(f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB resident")
    await store.close()
    await disk.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--conversations", type=int, default=100_000)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = parsed.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(_measure(folder, parsed.conversations))


if __name__ == "__main__":
    main()
