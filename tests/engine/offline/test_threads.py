"""An `LLM` that several threads share, and one that a fork took along."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import LLM, EngineDeadError

from .conftest import GREEDY, PROMPTS, one

_NUM_THREADS = 8
_NUM_CALLS = 20
_END_S = 120.0  # for what is sure to come


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(_NUM_THREADS) as executor:
        yield executor


@pytest.fixture
def own(tiny: Path) -> Iterator[LLM]:
    """One that a test may end."""
    with LLM(str(tiny), num_blocks=40) as llm:
        yield llm


def answer(llm: LLM, prompt: str) -> Any:
    return one(llm, prompt, GREEDY).token_ids


def paused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first step from now on stands still: it sets the first event, and waits for the other."""
    step, is_inside, may_go_on = llm._core.step, threading.Event(), threading.Event()

    def pausing() -> Any:
        if not is_inside.is_set():
            is_inside.set()
            assert may_go_on.wait(_END_S)
        return step()

    monkeypatch.setattr(llm._core, "step", pausing)
    return is_inside, may_go_on


def test_calls_of_several_threads_do_not_mix(
    llm: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(prompt: str) -> Any:
        messages = [{"role": "user", "content": prompt}]
        (chatted,) = llm.chat(messages, GREEDY, use_tqdm=False)
        return answer(llm, prompt), chatted.outputs[0].token_ids

    prompts = [f"{PROMPTS[index % 3]} {index}" for index in range(_NUM_THREADS)]
    expected = [turn(prompt) for prompt in prompts]
    inside: list[str] = []

    def alone(name: str) -> Callable[..., Any]:
        """The core's function; others have time to come into it meanwhile."""
        function = getattr(llm._core, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            inside.append(name)
            num_before = len(inside)
            time.sleep(0)  # lets another thread run
            result = function(*arguments, **named)
            assert len(inside) == num_before, f"{inside} at once"
            inside.pop()
            return result

        return watched

    for name in ("add", "step", "abort", "drop_prefix"):
        monkeypatch.setattr(llm._core, name, alone(name))

    def calls(index: int) -> list[Any]:
        results = []
        for _ in range(_NUM_CALLS // 2):  # of two each
            results.append(turn(prompts[index]))
            llm.drop_prefix(prompts[index])
        return results

    for index, results in enumerate(pool.map(calls, range(_NUM_THREADS))):
        assert results == [expected[index]] * (_NUM_CALLS // 2)


def test_ctrl_c_ends_the_main_threads_call_and_others_go_on(
    llm: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llm, PROMPTS[0])
    submit = llm._core._executor.submit
    others: list[Future[Any]] = []

    def interrupted(batch: Any) -> Any:
        if not others:
            others.extend(pool.submit(answer, llm, PROMPTS[0]) for _ in range(3))
            signal.raise_signal(signal.SIGINT)
        return submit(batch)

    monkeypatch.setattr(llm._core._executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [other.result(_END_S) for other in others] == [expected] * 3
    assert answer(llm, PROMPTS[0]) == expected


def test_ctrl_c_reaches_a_call_that_waits(
    llm: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llm, PROMPTS[0])
    is_inside, may_go_on = paused(llm, monkeypatch)
    other = pool.submit(answer, llm, PROMPTS[0])
    assert is_inside.wait(_END_S)
    is_calling = threading.Event()

    def press() -> None:
        assert is_calling.wait(_END_S)
        time.sleep(0.1)  # most often it waits by then; if not, it is interrupted just as well
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def call() -> None:
        is_calling.set()
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    pressed = pool.submit(press)
    with pytest.raises(KeyboardInterrupt):
        call()
    pressed.result(_END_S)
    may_go_on.set()
    assert other.result(_END_S) == expected
    assert answer(llm, PROMPTS[0]) == expected


def test_close_waits_for_the_call_that_runs_and_refuses_those_that_wait(
    own: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(own, PROMPTS[0])
    is_inside, may_go_on = paused(own, monkeypatch)
    running = pool.submit(answer, own, PROMPTS[0])
    assert is_inside.wait(_END_S)
    waiting = [pool.submit(answer, own, PROMPTS[0]) for _ in range(3)]
    closing = pool.submit(own.close)
    while not own._is_closing:
        time.sleep(0.001)
    assert not closing.done()
    may_go_on.set()
    assert running.result(_END_S) == expected
    closing.result(_END_S)
    for call in waiting:
        with pytest.raises(EngineDeadError, match="closed"):
            call.result(_END_S)


@pytest.mark.parametrize(
    "nested",
    [
        lambda llm: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        lambda llm: llm.warm(PROMPTS),
        lambda llm: llm.drop_prefix(PROMPTS[0]),
        lambda llm: llm.close(),
    ],
)
def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on(
    nested: Callable[[LLM], Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llm, PROMPTS[0])
    step = llm._core.step
    refusals = []

    def calling() -> Any:
        with pytest.raises(RuntimeError, match="already inside a call of this LLM") as caught:
            nested(llm)
        refusals.append(caught.value)
        return step()

    monkeypatch.setattr(llm._core, "step", calling)
    assert answer(llm, PROMPTS[0]) == expected
    assert refusals


def test_a_forked_process_is_refused_even_while_another_thread_calls(
    llm: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llm, PROMPTS[0])
    is_inside, may_go_on = paused(llm, monkeypatch)
    running = pool.submit(answer, llm, PROMPTS[0])
    assert is_inside.wait(_END_S)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        pid = os.fork()
    if pid == 0:
        try:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        except EngineDeadError as error:
            llm.close()
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    try:
        os.close(writing)
        readable, _, _ = select.select([reading], [], [], _END_S)
        assert readable, "the forked process hangs"
        message = os.read(reading, 1000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
    assert message == f"this LLM belongs to process {os.getpid()}; make a new one after a fork"
    may_go_on.set()
    assert running.result(_END_S) == expected
