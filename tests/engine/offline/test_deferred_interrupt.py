"""Ctrl-C is handed on between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.engine.offline.deferred_interrupt import interrupt_deferred


@pytest.fixture(autouse=True)
def _handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_it_is_asked_for() -> None:
    done = []

    def work() -> None:
        with interrupt_deferred() as deliver:
            deliver()  # nothing has come
            press()
            done.append("the step")
            deliver()
            done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the step"]


def test_one_that_nobody_asked_for_comes_at_the_end() -> None:
    done = []

    def work() -> None:
        with interrupt_deferred():
            press()
            done.append("the last step")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the last step"]


def test_a_second_one_goes_through_at_once() -> None:
    done = []

    def work() -> None:
        with interrupt_deferred():
            press()
            press()
            done.append("a step that hangs")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_another_error_is_not_hidden_by_it() -> None:
    def work() -> None:
        with interrupt_deferred():
            press()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_outside_the_main_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with interrupt_deferred() as deliver:
            seen.append(signal.getsignal(signal.SIGINT))
            deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
