"""The journal's files: what is read is what was written, whatever was cut off or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from penstock.gateway.storage.disk import FILE_NAME, Disk
from penstock.gateway.storage.response_log import journal_files
from penstock.gateway.storage.response_log.codec import UnreadableEntryError
from penstock.gateway.storage.response_log.journal_files import Journal, read_content, row_of
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry

from .disks import Process, process
from .records import TENANT, add_delta, add_end, expired, header, until


def row(number: int, num_chars: int = 10) -> bytes:
    entry = DeltaEntry(number, num_chars * "x", (number,))
    return row_of(float(number), [(1, [entry])])


def numbers(journal: Journal, segment: int) -> list[float | None]:
    """Which rows a segment has; None: a damaged one."""

    def number_of(content: bytes | None) -> float | None:
        try:
            return read_content(content)[0]
        except UnreadableEntryError:
            return None

    return [number_of(content) for content in journal.rows(segment)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, 1 << 20)
    yield journal
    journal.close()


def damaged_or_cut(tmp_path: Path, data: bytes) -> list[float | None]:
    other = Journal(Path(tempfile.mkdtemp(dir=tmp_path)), 0)
    other.folder.mkdir()
    (other.folder / "1.log").write_bytes(data)
    return numbers(other, 1)


def test_whatever_is_cut_off_or_changed(journal: Journal, tmp_path: Path) -> None:
    """At each byte: what was cut off within a row leaves those before; a change is noticed, and
    what can be read after it is what was written."""
    rows = [row(number) for number in range(4)]
    for each in rows:
        journal.append(each)
    data = (journal.folder / "1.log").read_bytes()
    assert data == b"".join(rows)
    size = len(rows[0])
    assert [len(each) for each in rows] == 4 * [size], "so that the next lines are right"
    for end in range(len(data) + 1):
        found = damaged_or_cut(tmp_path, data[:end])
        assert found == [float(number) for number in range(end // size)]
    for position in range(len(data)):
        for bit in (0, 7):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            which = position // size
            found = damaged_or_cut(tmp_path, bytes(changed))
            later = [float(number) for number in range(which + 1, 4)]
            assert found in (
                [*(float(number) for number in range(which)), None, *later],
                [*(float(number) for number in range(which)), None],
            )


def test_a_hole_at_the_end(journal: Journal, tmp_path: Path) -> None:
    """As file systems leave it after a loss of power."""
    assert damaged_or_cut(tmp_path, row(1) + bytes(5000)) == [1.0]
    assert damaged_or_cut(tmp_path, row(1) + bytes(5000) + row(2)) == [1.0, None]


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel writes up to there, and refuses the rest, as when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_that_is_written_in_part_is_taken_back(journal: Journal) -> None:
    journal.append(row(1))
    path = journal.folder / "1.log"
    with largest_file(path.stat().st_size + 20), pytest.raises(OSError, match="too large"):
        journal.append(row(2))
    assert path.read_bytes() == row(1)
    journal.append(row(3))
    assert numbers(journal, 1) == [1.0, 3.0]
    assert not journal.is_full


def test_a_row_that_cannot_be_taken_back_ends_its_segment(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.segments[1] = 1
    journal.append(row(1))

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "a broken disk")

    size = (journal.folder / "1.log").stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        with largest_file(size + 20), pytest.raises(OSError, match="too large"):
            journal.append(row(2))
    assert journal.is_full
    journal.begin_next()
    journal.append(row(3))
    assert [numbers(journal, each) for each in journal.existing()] == [[1.0], [3.0]]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("not a folder")
    journal = Journal(tmp_path, 0)
    assert journal.existing() == []
    assert list(journal.rows(1)) == [None]
    for _ in range(2):
        with pytest.raises(OSError, match=r"exist|directory"):
            journal.append(row(1))


# -- killed between any two writes ----------------------------------------------------------------

_ACTIONS = ("create", "append", "append", "append", "end", "delete", "wait", "rotate", "whole")


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
@given(
    actions=some.lists(some.sampled_from(_ACTIONS), min_size=10, max_size=60),
    seed=some.integers(0, 1 << 30),
    cut=some.integers(1, 50),
    share=some.floats(0, 1),
    is_slow=some.booleans(),
)
def test_killed_between_any_two_writes(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[str],
    seed: int,
    cut: int,
    share: float,
    is_slow: bool,
) -> None:
    """Or within a row: the next process has all that readers had seen, nothing that was not so, and
    nothing of what was deleted; and so has the one after it."""
    folder = tmp_path_factory.mktemp("lives")
    left = _Left(folder, cut, share)
    asyncio.run(_live(left, actions, random.Random(seed), is_slow=is_slow))
    asyncio.run(_check(left))
    shutil.rmtree(folder)


class _Left:
    """What a process left that was killed in its `cut`-th write.

    Args:
        share: how much of that write is there, if it is a row.

    Attributes:
        seen: entries by response.
        truth: what each response has become.
        deleted: responses.
    """

    def __init__(self, folder: Path, cut: int, share: float) -> None:
        self.first, self.folder = folder / "first", folder / "left"
        self.logs: list[ResponseLog] = []
        self.seen: dict[str, list[Entry]] = {}
        self.deleted: set[str] = set()
        self.now_deleted: set[str] = set()
        self._cut, self._share, self._num = cut, share, itertools.count(1)

    @property
    def truth(self) -> dict[str, list[Entry]]:
        return {log.header.response_id: log.entries for log in self.logs}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        transaction = Disk._transaction

        def commit(disk: Disk, jobs: Any) -> Any:
            replies = transaction(disk, jobs)
            if next(self._num) == self._cut:
                self._leave()
            return replies

        def write(_: Process, fd: int, data: bytes) -> int:
            if next(self._num) != self._cut:
                return os.write(fd, data)
            num = os.write(fd, data[: int(self._share * len(data))])
            self._leave()
            return num + os.write(fd, data[num:])

        with (
            patch.object(Disk, "_transaction", commit),
            patch.object(Process, "write", write),
            patch.object(Disk, "erase_soon", lambda _: None),  # files are copied one after another
        ):
            yield

    def _leave(self) -> None:
        for log in list(self.logs):
            if log.is_resumable:
                self.seen[log.header.response_id] = log.entries[: log.replica.num_visible]
        self.deleted |= self.now_deleted
        self.folder.mkdir()
        for name in (FILE_NAME, f"{FILE_NAME}-wal"):
            shutil.copy2(self.first / name, self.folder / name)
        (self.folder / journal_files.FOLDER).mkdir()
        for path in (self.first / journal_files.FOLDER).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # the reader thread has deleted it
                shutil.copy2(path, self.folder / journal_files.FOLDER / path.name)


async def _live(left: _Left, actions: list[str], chosen: random.Random, *, is_slow: bool) -> None:
    left.first.mkdir()
    async with process(left.first, segment_bytes=300) as one:
        with left.patched(), patch.object(journal_files, "write", partial(Process.write, one)):
            one.store._num_slow = 1000 if is_slow else 0
            for action in actions:
                await _act(one, action, left, chosen)
            for _ in range(3):
                await asyncio.sleep(0.001)


async def _act(one: Process, action: str, left: _Left, chosen: random.Random) -> None:
    running = [log for log in left.logs if not any(isinstance(e, EndEntry) for e in log.entries)]
    ended = [log for log in left.logs if log.is_ended]
    if action == "create":
        left.logs.append(await one.store.create(header()))
    elif action == "append" and running:
        for _ in range(chosen.randrange(1, 6)):
            add_delta(chosen.choice(running))
        await asyncio.sleep(0)
    elif action == "end" and running:
        add_end(chosen.choice(running))
    elif action == "delete" and ended:
        left.logs.remove(log := chosen.choice(ended))
        await one.store.delete(TENANT, log.header.response_id)
        left.now_deleted.add(log.header.response_id)
    elif action == "wait":
        await asyncio.sleep(chosen.choice((0, 0.001)))
    elif action == "rotate" and not one.store._is_appending:
        one.store._journal.begin_next()
        one.store._drop_dead()
    elif action == "whole" and running:
        each = one.store._running[chosen.choice(running).header.response_id]
        one.store._store([each])


async def _check(left: _Left) -> None:
    if not left.folder.exists():
        return  # there were fewer writes
    folder, seen, truth = left.folder, left.seen, left.truth
    for life in range(3):
        async with process(folder, segment_bytes=300) as one:
            assert not one.carried_on.keys() & left.deleted
            for response_id in left.deleted:
                with expired():
                    await one.store.find(TENANT, response_id)
            for response_id in truth.keys() & seen.keys():
                carried_on = one.carried_on.get(response_id)
                found = carried_on or await one.store.find(TENANT, response_id)
                assert found.entries == truth[response_id][: len(found.entries)]
                assert len(found.entries) >= len(seen[response_id])
                if carried_on is not None:
                    assert found.outage is not None
                    assert found.outage.is_complete
                    add_delta(found)
                    await until(partial(is_published, found))
                seen[response_id] = truth[response_id] = list(found.entries)
            folder = one.killed(str(life))


def is_published(log: ResponseLog) -> bool:
    return log.replica.num_visible == len(log.entries)
