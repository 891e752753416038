"""A step that does not end ends the engine; a slow one, an idle engine and a stopped one do not."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engine.process.launch import EXIT_STUCK
from penstock.engine.process.watchdog import Watchdog, heartbeat
from penstock.engine.protocol.messages import Heartbeat

from .stack import PATIENCE_S, Connect, Engine, wait_until

BEGAN_S = time.monotonic()
TIMEOUT_S, NUM_PATIENT_LOOKS = 0.2, 10
NUM_LOOKS = 40  # many times what it has patience for


class Ends:
    """What a watchdog is given: counts its looks, and takes note of the end."""

    def __init__(self, engine: Engine, *, shows_parts: bool = False) -> None:
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.looks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._engine = engine
        self._shows_parts = shows_parts

    def show_life(self) -> None:
        self._engine.device.num_parts += self._shows_parts
        self.looks.put(None)

    def wait_for_looks(self, number: int) -> None:
        for _ in range(number):
            self.looks.get(timeout=PATIENCE_S)


@contextmanager
def watched(engine: Engine, ends: Ends) -> Iterator[None]:
    dog = Watchdog(engine.server, timeout_s=TIMEOUT_S, show_life=ends.show_life, end=ends.codes.put)
    dog.start()
    try:
        yield
    finally:
        dog.stop()


def test_a_step_that_does_not_end_ends_the_engine(
    engine: Engine, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, ends = connect(), Ends(engine)
    engine.device.hold(but=1)
    gateway.submit("a", (1,), 10)
    gateway.receive()
    engine.wait_for_step(2)
    with watched(engine, ends):
        assert ends.codes.get(timeout=PATIENCE_S) == EXIT_STUCK
    text = caplog.text
    assert "no step has ended for" in text
    assert "stepped_device.py" in text, "the stack of who hangs"
    assert "thread penstock-transport" in text
    assert "CPU pool: a device that is held" in text


def test_a_step_that_gets_on_is_waited_for(engine: Engine, connect: Connect) -> None:
    gateway, ends = connect(), Ends(engine, shows_parts=True)
    engine.device.hold(but=1)
    gateway.submit("a", (1,), 2)
    gateway.receive()
    engine.wait_for_step(2)
    with watched(engine, ends):
        ends.wait_for_looks(NUM_LOOKS)
    assert ends.codes.empty()


def test_an_idle_engine_is_let_be(engine: Engine, connect: Connect) -> None:
    gateway, ends = connect(), Ends(engine)
    gateway.submit("a", (1,), 3)
    gateway.finish("a")
    with watched(engine, ends):
        ends.wait_for_looks(NUM_LOOKS)
    assert ends.codes.empty()


def test_each_step_that_ends_is_seen(engine: Engine, connect: Connect) -> None:
    gateway, ends_s = connect(), list[float]()
    engine.device.hold()
    gateway.submit("a", (1,), 5)
    for number in range(1, 5):
        engine.wait_for_step(number)
        ends_s.append(engine.server.last_step_s() or 0.0)
        engine.device.allow(1)
    assert ends_s[0] > 0.0
    assert ends_s == sorted(set(ends_s))
    engine.device.set_free()
    gateway.finish("a")
    wait_until(lambda: engine.server.last_step_s() is None)


class OldSteps:
    """The last one ended an hour ago, as it seems after a machine stood still; as long as they go
    on, another has ended before the watchdog loses its patience."""

    def __init__(self) -> None:
        self._number = self._num_looks = 0
        self.go_on = True

    def last_step_s(self) -> float:
        self._num_looks += 1
        if self.go_on and self._num_looks % (NUM_PATIENT_LOOKS - 1) == 0:
            self._number += 1
        return BEGAN_S - 3600.0 + self._number

    def num_parts_done(self) -> int:
        return 0

    def describe(self) -> str:
        return ""


def test_looks_are_counted_and_no_time() -> None:
    """Else a process that stood still, and whose steps end, would be ended for it."""
    steps, looks, codes = OldSteps(), queue.SimpleQueue[None](), queue.SimpleQueue[int]()
    dog = Watchdog(steps, timeout_s=TIMEOUT_S, show_life=lambda: looks.put(None), end=codes.put)
    dog.start()
    for _ in range(NUM_LOOKS):
        looks.get(timeout=PATIENCE_S)
    assert codes.empty()
    steps.go_on = False
    assert codes.get(timeout=PATIENCE_S) == EXIT_STUCK
    dog.stop()


def test_heartbeats_tell_how_long_a_step_takes(engine: Engine, connect: Connect) -> None:
    gateway = connect()

    def since_step_s() -> float | None:
        while True:
            beat = gateway.receive(beats=True)
            if isinstance(beat, Heartbeat):
                return beat.since_step_s

    assert since_step_s() is None
    engine.device.hold(but=1)
    gateway.submit("a", (1,), 2)
    engine.wait_for_step(2)
    first, second, third = since_step_s(), since_step_s(), since_step_s()
    assert first is not None
    assert second is not None
    assert third is not None
    assert third > second > first
    engine.device.set_free()
    while since_step_s() is not None:
        pass


def test_a_sign_of_life_waits_for_no_reader(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    show_life = heartbeat(writer)
    for _ in range(100_000):  # more than a pipe holds
        show_life()
    assert os.read(reader, 10) == bytes(10)
    os.close(reader)
    show_life()
    os.close(writer)
