"""What the log store on disk leaves to the next process, and what it does when the disk fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.disk import FILE_NAME
from penstock.gateway.storage.response_log import disk_store
from penstock.gateway.storage.response_log.codec import encode_appended
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.disk_journal import checked
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry

from ....support.tiers import tiered
from .disks import POOL, Process, process
from .records import TENANT, add_delta, add_end, expired, header, read_to_end, seen, until


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Process]:
    async with process(tmp_path) as one:
        yield one


async def begin(started: Process, num_deltas: int = 0, **words: Any) -> ResponseLog:
    log = await started.store.create(header(**words))
    for _ in range(num_deltas):
        add_delta(log)
    await seen(log, num_deltas)
    return log


# -- the next process ---------------------------------------------------------------------------


async def test_what_ran_goes_on_and_what_had_ended_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed, twice in a row, leaves all that anybody has seen; also if no engine
    was there the second time."""
    monkeypatch.setattr(disk_store, "_NUM_DEAD", -100)  # a log is stored whole at a start
    async with process(tmp_path) as first:
        ended, running, begun = [await begin(first, num) for num in (3, 5, 0)]
        add_end(ended)
        whole = await read_to_end(ended)
        folder = first.killed("first")
    for epoch, pool in ((2, b""), (3, POOL)):
        async with process(folder, pool=pool) as one:
            ids = {running.header.response_id, begun.header.response_id}
            assert one.carried_on.keys() == ids
            log = one.carried_on[running.header.response_id]
            assert (log.header, log.replica.epoch) == (running.header, epoch)
            assert log.entries == running.entries
            assert log.replica.num_visible == len(running.entries), "who resumes gets them at once"
            assert log.outage is not None
            assert (log.outage.pool, log.outage.is_complete) == (POOL, True)
            assert one.carried_on[begun.header.response_id].entries == []
            found = await one.store.find(TENANT, ended.header.response_id)
            assert await read_to_end(found) == whole
            add_delta(log)
            running.entries.append(log.entries[-1])
            await seen(log, len(log.entries))
            folder = one.killed(f"after {epoch}")


async def test_what_ended_after_it_was_taken_over_has_ended(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        running = await begin(first, 5)
        folder = first.killed("first")
    async with process(folder) as second:
        log = second.carried_on[running.header.response_id]
        add_delta(log)
        add_end(log)
        whole = await read_to_end(log)
    async with process(folder) as third:
        assert not third.carried_on
        assert not await third.journal()
        assert await read_to_end(await third.store.find(TENANT, log.header.response_id)) == whole


async def test_it_tells_how_long_nothing_was_heard(tmp_path: Path) -> None:
    """By the clock on the wall: of the journal's last row, or of the response's begin."""
    async with process(tmp_path) as first:
        made = header()
        await first.store.create(made)
        folder = first.killed("first")
    async with process(folder) as second:
        (log,) = second.carried_on.values()
        assert log.outage is not None
        assert log.outage.silent_s > 3600, "it began in 2023"
        add_delta(log)
        await seen(log, 1)
        folder = second.killed("second")
    async with process(folder) as third:
        (log,) = third.carried_on.values()
        assert log.outage is not None
        assert log.outage.silent_s < 3600


async def test_a_server_that_stops_leaves_what_runs(tmp_path: Path) -> None:
    """Readers are told to resume; the next server goes on. What had ended can be read until the
    last moment."""
    async with process(tmp_path) as first:
        running, ended = await begin(first, 5), await begin(first, 1)
        add_end(ended)
        add_delta(running)  # and is not stored yet
        with running.read() as reader:
            await first.store.hand_over()
            got = [entry for entry in reader.take() if not isinstance(entry, LogNotice)]
            assert got == running.entries
            with pytest.raises(RequestRefusedError, match="resume") as caught:
                await next_of(reader)
        assert (caught.value.status, caught.value.code) == (503, "response_moved")
        with pytest.raises(RequestRefusedError, match="resume"):
            await first.store.find(TENANT, running.header.response_id)
        assert await first.store.find(TENANT, ended.header.response_id) is ended
        with pytest.raises(StoreUnavailableError):
            await first.store.create(header())
    async with process(tmp_path) as second:
        assert second.carried_on[running.header.response_id].entries == running.entries


# -- rows and transactions ----------------------------------------------------------------------


@contextlib.contextmanager
def held(started: Process) -> Any:
    """No transaction ends before the context does."""
    gate = threading.Event()
    started.disk.submit(lambda _: gate.wait(), lambda *_: None)
    try:
        yield
    finally:
        gate.set()


async def test_an_event_is_seen_when_it_is_stored(started: Process) -> None:
    """At the end of the iteration; and if the disk was slow lately, after the writer thread has
    written it: then nothing is held up."""
    log = await begin(started)
    add_delta(log)
    assert log.replica.num_visible == 0
    await asyncio.sleep(0)
    assert log.replica.num_visible == 1
    published: list[int] = []
    started.store._num_slow = 2
    with log.read(log.entries[0].last_number) as reader:
        with held(started):
            add_delta(log)
            add_delta(log)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert log.replica.num_visible == 1
            add_delta(log)
            assert not reader.take()
            assert reader.when_ready(lambda: published.append(log.replica.num_visible))
        await seen(log, 4)
    assert published == [3], "the fourth is the next row's"
    assert await started.journal_rows() == 3


async def test_an_end_is_seen_after_its_commit(started: Process) -> None:
    """Which holds up no other response."""
    ending, other = await begin(started, 1), await begin(started, 1)
    with held(started):
        add_delta(ending)
        add_end(ending)
        add_delta(other)
        await asyncio.sleep(0)
        assert (ending.replica.num_visible, other.replica.num_visible) == (1, 2)
    assert len(await read_to_end(ending)) == 3


async def test_a_slow_disk_is_noticed(started: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await begin(started, 1)
    now_s = itertools.count()
    monkeypatch.setattr(disk_store.time, "perf_counter", lambda: next(now_s))
    add_delta(log)
    await seen(log, 2)
    with held(started):
        add_delta(log)
        await asyncio.sleep(0)
        assert log.replica.num_visible == 2
    await seen(log, 3)


async def test_an_iteration_of_all_responses_is_one_row(started: Process) -> None:
    """And what comes while a row is written is the next one."""
    logs = [await begin(started) for _ in range(5)]
    before = await started.journal_rows()
    for log in logs:
        add_delta(log)
        add_delta(log)
    await seen(logs[-1], 2)
    assert await started.journal_rows() == before + 1
    started.store._num_slow = 100
    with held(started):
        for log in logs:
            add_delta(log)
        await asyncio.sleep(0)  # these are handed to the disk
        for _ in range(10):
            for log in logs:
                add_delta(log)
            await asyncio.sleep(0)
    await seen(logs[-1], 13)
    assert await started.journal_rows() == before + 3
    assert len(await read_now(logs[0])) == 13


async def read_now(log: ResponseLog) -> list[Any]:
    with log.read() as reader:
        return [*reader.take(), *reader.take()]


# -- the journal --------------------------------------------------------------------------------


async def test_of_what_has_ended_the_journal_keeps_nothing(started: Process) -> None:
    for _ in range(3):
        log = await begin(started, 10)
        add_end(log)
        await read_to_end(log)
    (path,) = await started.journal()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    started.store._beat_now()
    assert not await started.journal()
    assert await started.rows("log_running") == 0
    assert await started.rows("log_ended") == 3


async def test_the_journal_keeps_what_is_needed(tmp_path: Path) -> None:
    """When a response has ended, the segments go that only it needed."""
    async with process(tmp_path, segment_bytes=1000) as started:
        first = await begin(started)
        for number in range(300):
            add_delta(first)
            await seen(first, number + 1)
        assert len(await started.journal()) > 10
        second = await begin(started, 1)
        third = await begin(started, 1)
        add_end(first)
        await read_to_end(first)
        assert len(await started.journal()) < 3
        folder = started.killed("first")
    async with process(folder) as one:
        for log in (second, third):
            assert one.carried_on[log.header.response_id].entries == log.entries


async def test_a_response_that_runs_long_does_not_keep_the_journal_of_others(
    tmp_path: Path,
) -> None:
    async with process(tmp_path, max_bytes=1 << 30, segment_bytes=100_000) as started:
        long = await begin(started, 3)
        num_most = 0
        for _ in range(4):
            other = await started.store.create(header())
            for _ in range(20):
                for _ in range(1000):
                    add_delta(other, "")
                await seen(other, len(other.entries))
                add_delta(long)
                num_most = max(num_most, sum(started.store._journal.segments.values()))
            add_end(other)
            await read_to_end(other)
        started.store._beat_now()
        await seen(long, len(long.entries))
        assert num_most < 80_000
        folder = started.killed("first")
    async with process(folder) as second:
        assert second.carried_on[long.header.response_id].entries == long.entries


async def test_what_is_appended_while_a_log_is_stored_whole_is_kept(tmp_path: Path) -> None:
    """Although the journal is in a later segment when the transaction ends."""
    async with process(tmp_path) as started:
        log = await begin(started, 3)
        with held(started):
            started.store._store([started.store._running[log.header.response_id]])
            add_delta(log)
            await asyncio.sleep(0)
            started.store._journal.begin_next()
        await started.disk.run(lambda _: None)
        assert await started.journal_rows() == 2, "of its segment: the deltas before and after"
        folder = started.killed("first")
    async with process(folder) as second:
        assert second.carried_on[log.header.response_id].entries == log.entries


async def test_what_is_deleted_is_in_no_file(started: Process) -> None:
    """Although the segment of the journal that has it is needed for what still runs."""

    def is_there() -> bool:
        paths = [path for path in started.disk.path.parent.rglob("*") if path.is_file()]
        return any(b"a secret word" in path.read_bytes() for path in paths)

    running, deleted = await begin(started, 1), await begin(started)
    add_delta(deleted, "a secret word")
    add_delta(running, "another word")
    await seen(deleted, 1)
    assert is_there()
    add_end(deleted)
    await read_to_end(deleted)
    await started.store.delete(TENANT, deleted.header.response_id)
    await started.disk.erased()
    assert not is_there()
    add_delta(running, "and one more")
    await seen(running, 3)
    folder = started.killed("copy")
    async with process(folder) as second:
        assert second.carried_on[running.header.response_id].entries == running.entries


async def test_a_key_is_not_used_again(tmp_path: Path) -> None:
    """The journal may still have what an earlier response appended under it."""
    async with process(tmp_path) as first:
        running, ended = await begin(first, 1), await begin(first, 5)
        add_end(ended)
        await read_to_end(ended)
        folder = first.killed("first")
    async with process(folder) as second:
        begun = [await begin(second) for _ in range(3)]
        folder = second.killed("second")
    async with process(folder) as third:
        assert len(third.carried_on) == 4
        assert third.carried_on[running.header.response_id].entries == running.entries
        assert not any(third.carried_on[log.header.response_id].entries for log in begun)


async def test_a_journal_of_the_first_version_is_read(tmp_path: Path) -> None:
    """It was a table; what ran goes on, and nothing is left of it when that has ended."""
    async with process(tmp_path) as first:
        running, ended = await begin(first, 3), await begin(first, 1)
        add_end(ended)
        await read_to_end(ended)
        (path,) = await first.journal()
        folder = first.killed("first")
    database = sqlite3.connect(folder / FILE_NAME)
    with database:
        (folder / "journal" / path.name).unlink()
        for number, entry in enumerate(running.entries):
            ((key,),) = database.execute("SELECT key FROM log_running").fetchall()
            data = checked(encode_appended([(key, [entry])]))
            database.execute("INSERT INTO log_journal VALUES (?, ?, ?)", (number, 1e9, data))
        database.execute("ALTER TABLE log_ended RENAME COLUMN last_segment TO last_row")
        database.execute("UPDATE log_ended SET last_row = 400")
        database.execute("PRAGMA user_version = 1")
    database.close()
    async with process(folder) as second:
        log = second.carried_on[running.header.response_id]
        assert log.entries == running.entries
        add_delta(log)
        await seen(log, 4)
        folder = second.killed("second")
    async with process(folder) as third:
        assert third.carried_on[log.header.response_id].entries == log.entries
        await third.store.delete(TENANT, ended.header.response_id)
        assert await third.rows("log_journal") == 0
        folder = third.killed("third")
    async with process(folder) as fourth:
        assert fourth.carried_on[log.header.response_id].entries == log.entries


async def test_a_log_of_an_earlier_process_is_deleted_while_others_run(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        deleted = await begin(first, 5)
        add_end(deleted)
        await read_to_end(deleted)
    async with process(tmp_path) as second:
        running = await begin(second, 1)
        await second.store.delete(TENANT, deleted.header.response_id)
        assert await second.journal_rows() == 1, "nothing had to be stored again"
        folder = second.killed("second")
    async with process(folder) as third:
        assert third.carried_on[running.header.response_id].entries == running.entries
        with expired():
            await third.store.find(TENANT, deleted.header.response_id)


async def test_a_claim_is_given_back_before_it_is_stored(started: Process) -> None:
    """As when a response with an idempotency key is refused."""
    log = await started.store.create(header())
    add_end(log)
    await started.store.delete(TENANT, log.header.response_id)
    assert await started.store.create(log.header)


async def test_bounds_hold_for_what_earlier_processes_stored(tmp_path: Path) -> None:
    now_s = 0.0
    bounds: dict[str, Any] = {"max_bytes": 20_000, "ttl_s": 100, "clock": lambda: now_s}
    made = []
    for _ in range(3):
        async with process(tmp_path, **bounds) as one:
            for _ in range(6):
                log = await begin(one)
                add_delta(log, 1000 * "x")
                add_end(log)
                await read_to_end(log)
                made.append(log.header.response_id)
            there = [await is_there(one, response_id) for response_id in made]
            assert there == sorted(there), "the oldest went"
            assert await one.rows("log_ended") == sum(there) >= 6
    assert not all(there)
    now_s = 101.0
    async with process(tmp_path, **bounds) as one:
        assert not any([await is_there(one, response_id) for response_id in made])
        assert await one.rows("log_ended") == 0


async def is_there(one: Process, response_id: str) -> bool:
    try:
        await one.store.find(TENANT, response_id)
    except RequestRefusedError:
        with expired():
            await one.store.find(TENANT, response_id)
        return False
    return True


# -- a disk that takes nothing ------------------------------------------------------------------


async def limit(started: Process, room: bool) -> None:
    started.has_room = room
    await started.disk.run(started.execute(f"PRAGMA max_page_count = {1 << 30 if room else 1}"))


async def lock(started: Process, room: bool) -> None:
    started.has_room = room
    assert started.disk._writer is not None
    started.disk._writer.execute(f"PRAGMA query_only = {not room}")


@pytest.mark.parametrize(
    ("set_room", "why"), [(limit, "the disk is full"), (lock, "cannot be used")],
    ids=["full", "read-only"],
)  # fmt: skip
async def test_a_full_disk_holds_up_nothing_and_later_has_everything(
    tmp_path: Path, set_room: Any, why: str
) -> None:
    async with process(tmp_path) as started:
        running, ending = await begin(started, 3), await begin(started, 3)
        await set_room(started, False)
        for log in (running, ending):
            add_delta(log, 100_000 * "x")
            await seen(log, 4)
            assert not log.is_resumable
        add_end(ending)
        assert await started.store.find(TENANT, ending.header.response_id) is ending
        assert len(await read_to_end(ending)) == 5
        large = dataclasses.replace(header(), echo={"instructions": 100_000 * "x"})
        with pytest.raises(StoreUnavailableError, match=why) as caught:
            await started.store.create(large)
        assert caught.value.code == "session_store_unavailable"
        with pytest.raises(StoreUnavailableError):
            await started.store.delete(TENANT, ending.header.response_id)
        await set_room(started, True)
        await until(lambda: running.is_resumable and ending.is_resumable)
        add_delta(running)
        await seen(running, 5)
        folder = started.killed("first")
    async with process(folder) as second:
        assert second.carried_on[running.header.response_id].entries == running.entries
        found = await second.store.find(TENANT, ending.header.response_id)
        assert await read_to_end(found) == ending.entries


async def test_what_could_not_be_stored_is_not_left_to_the_next_server(started: Process) -> None:
    """It would go on from where the disk has it; so it gets its end here."""
    log = await begin(started, 3)
    await limit(started, False)
    add_delta(log, 100_000 * "x")
    await seen(log, 4)
    await started.store.hand_over()
    assert log.failure is None
    add_end(log)
    assert log.is_ended


async def test_after_a_damage_what_runs_is_stored_again(tmp_path: Path) -> None:
    def meet(_: sqlite3.Connection) -> None:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    async with process(tmp_path) as started:
        logs = [await begin(started, 3) for _ in range(20)]
        ended = await begin(started, 1)
        add_end(ended)
        await read_to_end(ended)
        with contextlib.suppress(Exception):
            await started.disk.run(meet)
        for log in logs:
            add_delta(log)
        await until(lambda: all(log.is_resumable for log in logs))
        add_end(logs[0])
        assert len(await read_to_end(logs[0])) == 5
        with expired():
            await started.store.find(TENANT, ended.header.response_id)
        folder = started.killed("first")
    async with process(folder) as second:
        assert len(second.carried_on) == len(logs) - 1
        for log in logs[1:]:
            assert second.carried_on[log.header.response_id].entries == log.entries


@pytest.mark.parametrize(
    ("table", "column"), [("journal", ""), ("log_running", "log"), ("log_ended", "log")]
)
async def test_a_flipped_byte_is_noticed(
    tmp_path: Path, table: str, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite does not notice it: a damaged text would be told as the model's."""
    async with process(tmp_path) as first:
        running, ended = await begin(first, 3), await begin(first, 3)
        add_delta(running, "a text")
        await seen(running, 4)
        add_end(ended)
        await read_to_end(ended)
        folder = first.killed("first")
    if table == "journal":
        (path,) = (folder / table).iterdir()
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    database = sqlite3.connect(folder / FILE_NAME)
    with database:
        for row, data in database.execute(f"SELECT rowid, {column} FROM {table}") if column else ():
            flipped = bytearray(data)
            flipped[-1] ^= 1
            database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (flipped, row))
    database.close()
    async with process(folder) as second:
        log = second.carried_on.get(running.header.response_id)
        if table == "journal":
            assert log is not None
            assert log.outage is not None
            assert not log.outage.is_complete
            assert all(isinstance(entry, DeltaEntry) for entry in log.entries)
        else:
            assert (log is None) == (table == "log_running")
        if table == "log_ended":
            with expired():
                await second.store.find(TENANT, ended.header.response_id)
        else:
            found = await second.store.find(TENANT, ended.header.response_id)
            assert await read_to_end(found) == ended.entries
    assert caplog.records


# -- anything in any order ----------------------------------------------------------------------

Seen = dict[str, list[Entry]]


@pytest.mark.parametrize("seed", tiered(range(60), first=range(10)))
async def test_whatever_happens_nothing_that_was_seen_is_lost(tmp_path: Path, seed: int) -> None:
    """Responses begin, grow, end and are deleted; the disk takes nothing for a while; and processes
    are killed at any moment. The next one has all that readers have seen, unless they were told
    that it cannot be resumed; and nothing of what was deleted."""
    chosen = random.Random(seed)
    folder = tmp_path
    seen: Seen = {}
    deleted: set[str] = set()
    for life in range(4):
        async with process(folder, max_bytes=1 << 30) as one:
            for response_id, entries in seen.items():
                log = one.carried_on.get(response_id) or await one.store.find(TENANT, response_id)
                assert log.entries[: len(entries)] == entries
            for response_id in deleted:
                with expired():
                    await one.store.find(TENANT, response_id)
            logs = list(one.carried_on.values())
            for _ in range(chosen.randrange(40, 160)):
                await do_something(one, logs, chosen, seen, deleted)
            await lock(one, True)  # so that it can be held up
            for log in logs:
                seen.pop(log.header.response_id, None)
                if log.is_resumable:
                    seen[log.header.response_id] = log.entries[: log.replica.num_visible]
            folder = one.killed(str(life))


async def do_something(
    one: Process, logs: list[ResponseLog], chosen: random.Random, seen: Seen, deleted: set[str]
) -> None:
    what = chosen.choices(
        ("create", "append", "end", "delete", "wait", "full", "room"), (2, 12, 2, 1, 6, 1, 3)
    )[0]
    running = [log for log in logs if not any(isinstance(each, EndEntry) for each in log.entries)]
    if what == "create":
        with contextlib.suppress(StoreUnavailableError):
            logs.append(await one.store.create(header()))
    elif what == "append" and running:
        for _ in range(chosen.randrange(1, 4)):
            add_delta(chosen.choice(running))
    elif what == "end" and running:
        add_end(chosen.choice(running))
    elif what == "delete" and len(running) < len(logs):
        log = chosen.choice([log for log in logs if log not in running])
        response_id = log.header.response_id
        logs.remove(log)
        seen.pop(response_id, None)
        with contextlib.suppress(StoreUnavailableError):
            await one.store.delete(TENANT, response_id)
            deleted.add(response_id)
    elif what == "wait":
        await asyncio.sleep(chosen.choice((0, 0, 0.001, 0.005)))
    elif what in ("full", "room"):
        await lock(one, what == "room")
        one.store._retry_in(0.0)
