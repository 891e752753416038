"""The database on disk: jobs, transactions, a full disk, damage."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.gateway.storage.disk import Disk, DiskError, NewerSchemaError

_SCHEMA = ("CREATE TABLE words (word TEXT PRIMARY KEY)",)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    disk = Disk(tmp_path, _SCHEMA)
    disk.open()
    disk.start()
    yield disk
    await disk.close()


def _put(connection: sqlite3.Connection, word: str = "one") -> None:
    connection.execute("INSERT INTO words VALUES (?)", (word,))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _words(connection: sqlite3.Connection) -> list[str]:
    return [word for (word,) in connection.execute("SELECT word FROM words ORDER BY word")]


async def test_a_failed_job_leaves_the_others_of_its_transaction(disk: Disk) -> None:
    puts = [disk.run(lambda each, word=word: _put(each, word)) for word in ("a", "b", "a", "c")]
    replies = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(reply) for reply in replies] == [
        type(None), type(None), sqlite3.IntegrityError, type(None),
    ]  # fmt: skip
    assert await disk.look(_words) == ["a", "b", "c"]


async def test_a_job_undoes_what_it_had_changed_before_it_failed(disk: Disk) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        _put(connection)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await disk.run(fail)
    assert await disk.look(_words) == []


async def test_the_file_is_private_and_outlives_the_process(disk: Disk, tmp_path: Path) -> None:
    await disk.run(_put)
    for path in _files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    other = sqlite3.connect(disk.path)  # as after a kill: nothing was closed
    assert _words(other) == ["one"]
    other.close()


async def test_reads_see_what_was_committed_before(disk: Disk) -> None:
    for number in range(20):
        await disk.run(lambda each, number=number: _put(each, str(number)))
        assert len(await disk.look(_words)) == number + 1


async def test_a_full_disk_refuses_and_later_goes_on(disk: Disk) -> None:
    def limit(pages: int) -> None:
        assert disk._writer is not None
        disk._writer.execute(f"PRAGMA max_page_count = {pages}")

    await disk.run(lambda _: limit(1))
    with pytest.raises(DiskError, match="the disk is full"):
        await disk.run(lambda each: _put(each, "x" * 100_000))
    await disk.run(lambda _: limit(1_000_000))
    await disk.run(_put)
    assert await disk.look(_words) == ["one"]


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4096] = bytes(range(256))[:1] * 3996  # the root page of the schema
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_damage, lambda path: path.write_bytes(b"nonsense " * 999)])
async def test_a_damaged_file_is_set_aside(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    first = Disk(tmp_path, _SCHEMA)
    first.open()
    first.start()
    await first.run(_put)
    await first.close()
    assert callable(damage)
    damage(first.path)
    second = Disk(tmp_path, _SCHEMA)
    with caplog.at_level(logging.ERROR):
        second.open()
    second.start()
    assert await second.look(_words) == []
    await second.close()
    assert [path.suffix[:9] for path in _files(tmp_path)] == [".db", ".damaged-"]
    assert len(caplog.records) == 1


async def test_damage_that_is_met_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    emptied = asyncio.Event()
    disk = Disk(tmp_path, _SCHEMA, on_emptied=emptied.set)
    disk.open()
    disk.start()
    await disk.run(_put)

    def meet(_: sqlite3.Connection) -> None:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    with pytest.raises(DiskError, match="damaged"):
        await disk.run(meet)
    await disk.run(lambda each: _put(each, "two"))
    assert await disk.look(_words) == ["two"]
    assert emptied.is_set()
    await disk.close()


async def test_migrations_run_once_and_a_later_schema_is_refused(tmp_path: Path) -> None:
    more = (*_SCHEMA, "ALTER TABLE words ADD COLUMN language TEXT DEFAULT 'en'")
    for schema in (_SCHEMA, more, more):
        disk = Disk(tmp_path, schema)
        disk.open()
        disk.start()
        await disk.close()
    with pytest.raises(NewerSchemaError, match="later version"):
        Disk(tmp_path, _SCHEMA).open()


async def test_what_was_deleted_is_in_no_file(disk: Disk, tmp_path: Path) -> None:
    def is_there() -> bool:
        return any(b"gooseberry" in path.read_bytes() for path in _files(tmp_path))

    await disk.run(lambda each: _put(each, "gooseberry"))
    assert is_there()
    await disk.run(lambda each: each.execute("DELETE FROM words").close())
    assert await disk.truncate()
    assert not is_there()


async def test_the_log_of_writes_becomes_small_again(disk: Disk, tmp_path: Path) -> None:
    """Although something is always being written: else each write would look for a checkpoint."""
    wal = tmp_path / f"{disk.path.name}-wal"
    sizes = []
    for number in range(120):
        put = disk.run(lambda each, word=f"{number} {'x' * 400_000}": _put(each, word))
        await asyncio.gather(put, disk.look(lambda _: None))
        sizes.append(wal.stat().st_size)
    assert max(sizes) > 30_000_000
    assert min(sizes[sizes.index(max(sizes)) :]) < 10_000_000
