"""Every reader gets every event once, and one end, whatever happens to gateways and to Redis: the
machine of a log, its cursors, leases and steps, in a model world (`model`).

`FAULTS` are mistakes that were easy to make. Each is found, or the world would be too quiet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.storage.response_log import redis_steps
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.cursor import Cursor
from penstock.gateway.storage.response_log.leases import Leases
from penstock.gateway.storage.response_log.record import DeltaEntry
from penstock.gateway.storage.response_log.replica import Replica, Role

from ....support.tiers import tiered
from .model import World

Choices = list[tuple[int, int]]
HAPPENINGS = st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 63)), max_size=200)
SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_MAX_S = 30.0


# -- worlds -------------------------------------------------------------------------------------


def run(world: World, choices: Choices) -> None:
    for which, how in choices:
        happenings = world.happenings()
        happenings[which % len(happenings)](how)
    world.settle()
    world.check()


@given(HAPPENINGS)
@SETTINGS
def test_a_redis_that_is_waited_for(choices: Choices) -> None:
    run(World(may_give_up=False), choices)


@given(HAPPENINGS)
@SETTINGS
def test_a_redis_that_is_away_for_too_long(choices: Choices) -> None:
    run(World(), choices)


@given(st.lists(st.sampled_from(["append", "write", "written", "failed", "retry"]), max_size=60))
def test_a_disk_that_takes_nothing_for_a_while(happenings: list[str]) -> None:
    """What is shown without it is not resumable, until it has the whole log."""
    replica = Replica(Role.OWNED, num_opening_events=2)
    cursor = Cursor(replica, [])
    found: list[Any] = []
    on_disk, writing, is_whole = 0, 0, False

    for happening in [*happenings, "failed", "retry", "write", "written"]:
        if happening == "append":
            replica.append(1, DeltaEntry(replica.next_number, "x", (1,)))
        elif happening == "write" and not writing and not replica.pending & do.MEND:
            writing = len(replica.entries)
        elif happening == "written" and writing:
            on_disk, writing = writing, 0
            if is_whole:
                replica.stored_whole(1, on_disk)
                is_whole = False
            else:
                replica.acknowledged(1, on_disk)
        elif happening == "failed":
            writing, is_whole = 0, False
            replica.give_up(1)
        elif happening == "retry" and not writing:
            replica.retried(1)
            is_whole = is_whole or not replica.is_resumable
        found += cursor.take()
        assert len(found) == replica.num_visible
        assert not replica.is_resumable or replica.num_visible <= on_disk
    assert found == replica.entries
    assert replica.is_resumable or not replica.entries


# -- faults -------------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch], None]


def _append_of_an_earlier_run(patch: pytest.MonkeyPatch) -> None:
    append = Replica.append
    patch.setattr(Replica, "append", lambda self, _, entry: append(self, self.epoch, entry))


def _reply_to_an_earlier_run(patch: pytest.MonkeyPatch) -> None:
    acknowledged = Replica.acknowledged

    def faulty(self: Replica, epoch: int, num_entries: int) -> int:
        num_entries = min(num_entries, len(self.entries))
        return acknowledged(self, self.epoch, num_entries)

    patch.setattr(Replica, "acknowledged", faulty)


def _refused_id_is_success(patch: pytest.MonkeyPatch) -> None:
    unsure = Replica.unsure

    def faulty(self: Replica, epoch: int) -> int:
        if self.role is Role.OWNED and not self.is_stored:
            return self.acknowledged(epoch, len(self.entries))
        return unsure(self, epoch)

    patch.setattr(Replica, "unsure", faulty)


def _nothing_is_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "unsure", lambda self, _: self.pending)


def _fence_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    last_read = Replica.last_read

    def faulty(self: Replica, epoch: int, last: tuple[int, int] | None) -> int:
        if last is not None and last[0] > epoch:
            last = self.position
        return last_read(self, epoch, last)

    patch.setattr(Replica, "last_read", faulty)


def _entries_outlive_a_takeover(patch: pytest.MonkeyPatch) -> None:
    fenced = Replica.fenced

    def faulty(self: Replica, epoch: int) -> int:
        kept = list(self.entries)
        commands = fenced(self, epoch)
        self.entries[:] = kept
        return commands

    patch.setattr(Replica, "fenced", faulty)


def _page_is_read_twice(patch: pytest.MonkeyPatch) -> None:
    received = Replica.received

    def faulty(self: Replica, _: Any, at: tuple[int, int], entry: Any) -> bool:
        if entry is not None and self.role is Role.FOLLOWED:
            entry = type(entry)(**{**_fields(entry), "number": self.next_number})
        return received(self, self.position, at, entry)

    patch.setattr(Replica, "received", faulty)


def _fields(entry: Any) -> dict[str, Any]:
    names = getattr(entry, "__struct_fields__", None) or entry.__dataclass_fields__
    return {name: getattr(entry, name) for name in names if name != "is_end"}


def _claim_without_reading(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: Replica, epoch: int) -> int:
        if self.role is not Role.FOLLOWED:
            return do.NOTHING
        self.role, self.epoch, self.number = Role.OWNED, epoch, 0
        return do.RUN

    patch.setattr(Replica, "claimed", faulty)


def _no_broken_mark(patch: pytest.MonkeyPatch) -> None:
    give_up = Replica.give_up

    def faulty(self: Replica, epoch: int) -> int:
        commands = give_up(self, epoch)
        self.is_partial = False
        return commands & ~do.MEND

    patch.setattr(Replica, "give_up", faulty)


def _readers_of_what_is_not_stored_stay(patch: pytest.MonkeyPatch) -> None:
    fenced = Replica.fenced
    patch.setattr(Replica, "fenced", lambda self, epoch: fenced(self, epoch) & ~do.REJOIN)


def _a_fence_is_anybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis_steps, "_is_fence_of", lambda found, _: bool(found))


def _a_cursor_repeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cursor, "_without_known", lambda _, found: found)


def _a_cursor_skips(patch: pytest.MonkeyPatch) -> None:
    begin = Cursor.__init__

    def faulty(self: Cursor, replica: Replica, *args: Any, **options: Any) -> None:
        begin(self, replica, *args, **options)
        self._place = replica.num_visible

    patch.setattr(Cursor, "__init__", faulty)


def _nobody_takes_over_twice(patch: pytest.MonkeyPatch) -> None:
    scanned = Leases.scanned

    def faulty(self: Leases, *args: Any, **options: Any) -> list[str]:
        due = scanned(self, *args, **options)
        seen = self.__dict__.setdefault("seen", set())
        new = [gateway for gateway in due if gateway not in seen]
        seen.update(due)
        return new

    patch.setattr(Leases, "scanned", faulty)


FAULTS: dict[str, Fault] = {
    fault.__name__.removeprefix("_").replace("_", " "): fault
    for fault in (
        _append_of_an_earlier_run,
        _reply_to_an_earlier_run,
        _refused_id_is_success,
        _nothing_is_verified,
        _fence_is_overlooked,
        _entries_outlive_a_takeover,
        _page_is_read_twice,
        _claim_without_reading,
        _no_broken_mark,
        _readers_of_what_is_not_stored_stay,
        _a_fence_is_anybodys,
        _a_cursor_repeats,
        _a_cursor_skips,
        _nobody_takes_over_twice,
    )
}
# These are found within a second or two, and the others within half a minute.
QUICK = (
    "append of an earlier run",
    "refused id is success",
    "nothing is verified",
    "fence is overlooked",
    "entries outlive a takeover",
    "no broken mark",
    "a cursor repeats",
    "a cursor skips",
)


def find(max_s: float) -> int | None:
    """The number of a world in which something is wrong, within so much time of this process."""
    until_s = time.process_time() + max_s
    seed = 0
    while time.process_time() < until_s:
        draws = random.Random(seed)
        choices = [(draws.randrange(10_000), draws.randrange(64)) for _ in range(200)]
        try:
            run(World(may_give_up=seed % 2 == 0), choices[: draws.randrange(200)])
        except Exception:  # an assertion, of the world or of the machine
            return seed
        seed += 1
    return None


@pytest.mark.parametrize("fault", tiered(FAULTS, first=QUICK))
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert find(_MAX_S) is not None
