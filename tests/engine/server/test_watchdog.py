"""A step that does not end ends the engine; a slow one, an idle engine and a stopped one do not."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engine.process import EXIT_STUCK
from penstock.engine.transport.messages import Heartbeat
from penstock.engine.watchdog import Watchdog, life_line

from .stack import PATIENCE_S, Connect, Engine

TIMEOUT_S = 0.2
NUM_LOOKS = 60  # many times what it has patience for


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
def watched(engine: Engine, ends: Ends, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    dog = Watchdog(engine.server, timeout_s=timeout_s, show_life=ends.show_life, end=ends.codes.put)
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


def test_steps_that_end_are_no_stillness(engine: Engine, connect: Connect) -> None:
    gateway, ends = connect(), Ends(engine)
    gateway.submit("a", (1,), 1900)
    with watched(engine, ends, timeout_s=20.0):
        assert len(gateway.finish("a")[0]) == 1900
    assert ends.codes.empty()


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
    assert third > second + 0.5
    engine.device.set_free()
    while (last := since_step_s()) is not None:
        assert last < third, "it ended"


# Steps that end five times a second, for as long as the parent wants.
_HONEST = """
import os, sys, threading, time
from penstock.engine.watchdog import Watchdog

class Steps:
    last = time.monotonic()
    last_step_s = lambda self: self.last
    num_parts_done = lambda self: 0
    describe = lambda self: ""

steps = Steps()
Watchdog(steps, timeout_s=5.0, end=os._exit).start()
threading.Thread(target=lambda: (sys.stdin.read(), setattr(steps, "is_over", True))).start()
print("begun", flush=True)
while not hasattr(steps, "is_over"):
    time.sleep(0.2)
    steps.last = time.monotonic()
print("well", flush=True)
"""


def test_a_process_that_stood_still_is_not_ended() -> None:
    command = [sys.executable, "-c", _HONEST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            time.sleep(6.0)  # longer than it has patience
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        assert process.communicate(timeout=PATIENCE_S)[0] == "well\n"
        assert process.returncode == 0


def test_a_sign_of_life_waits_for_no_reader(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    show_life = life_line(writer)
    for _ in range(100_000):  # more than a pipe holds
        show_life()
    assert os.read(reader, 10) == bytes(10)
    os.close(reader)
    show_life()
    os.close(writer)
