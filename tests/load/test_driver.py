"""When turns are sent and what they hold, on a clock that the tests move.

The transport is a fake: it answers after a time, or does what a test tells it. Time is the event
loop's own, and stands still while anything is ready to run, so that every instant is exact.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest
import uvloop

from penstock.load.client.records import Call, Dialogue, Fault, StreamRecord, Turn
from penstock.load.workloads import driver
from penstock.load.workloads.driver import ClosedLoop, OpenLoop, RunResult


class VirtualLoop(asyncio.SelectorEventLoop):
    """Skips to the next timer when nothing is ready."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class FakeTransport:
    """Answers each call in a few seconds, with text that names the call.

    Args:
        answer_s: how long each takes, by dialogue; else one second.
        faults: of turns, by dialogue and number.
        on_stream: done first, before any wait.
    """

    def __init__(
        self,
        answer_s: dict[int, float] | None = None,
        *,
        faults: dict[tuple[int, int], Fault] | None = None,
        on_stream: Callable[[StreamRecord], None] | None = None,
    ) -> None:
        self.calls: list[tuple[float, Call]] = []
        self.num_in_flight = self.most_in_flight = self.num_cancelled = 0
        self._answer_s = answer_s or {}
        self._faults = faults or {}
        self._on_stream = on_stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    async def stream(self, call: Call, record: StreamRecord) -> None:
        loop = asyncio.get_running_loop()
        self.calls.append((loop.time() - 1000.0, call))
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        if self._on_stream is not None:
            self._on_stream(record)
        try:
            await asyncio.sleep(self._answer_s.get(record.dialogue, 1.0))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        record.ended_s = loop.time()
        record.event_times_s.append(record.ended_s)
        record.text = f"answer {record.dialogue}.{record.turn}"
        record.response_id = f"id {record.dialogue}.{record.turn}"
        fault = self._faults.get((record.dialogue, record.turn))
        if fault is not None:
            record.fault(fault)

    @property
    def times_s(self) -> list[float]:
        """From the start of the run to each call."""
        return [time_s for time_s, _ in self.calls]


Play = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a coroutine to its end on a virtual clock that starts at 1000 s."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            clock = SimpleNamespace(
                perf_counter=runner.get_loop().time, process_time=time.process_time
            )
            monkeypatch.setattr(driver, "time", clock)
            return runner.run(coroutine)

    return run


def single(num: int) -> list[Dialogue]:
    return [
        Dialogue(turns=(Turn(text=f"say {index}", max_tokens=8 + index),)) for index in range(num)
    ]


def talk(*, num_turns: int, system: str = "be kind") -> Dialogue:
    turns = (Turn(text=f"turn {number}", max_tokens=4) for number in range(num_turns))
    return Dialogue(turns=tuple(turns), system=system)


def scheduled(result: RunResult) -> list[float]:
    return [record.scheduled_s - result.began_s for record in result.records]


def sent(result: RunResult) -> list[float]:
    return [record.sent_s - result.began_s for record in result.records]


# -- times ------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_in_flight(play: Play) -> None:
    transport = FakeTransport({0: 5.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0})
    result = play(driver.run(transport, single(5), arrivals=ClosedLoop(2), model="m"))
    assert transport.most_in_flight == 2
    # One place holds the first dialogue for 5 s, the other one all else.
    assert scheduled(result) == sent(result) == [0.0, 0.0, 1.0, 3.0, 4.0]
    assert result.duration_s == 5.0


def test_time_lost_by_the_client_counts(play: Play) -> None:
    """No coordinated omission: a client that was busy does not move the schedule."""

    def be_busy(record: StreamRecord) -> None:
        if record.dialogue == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now_s += 3.0

    transport = FakeTransport(on_stream=be_busy)
    result = play(driver.run(transport, single(4), arrivals=OpenLoop((0, 1, 2, 6)), model="m"))
    assert scheduled(result) == [0.0, 1.0, 2.0, 6.0]
    assert sent(result) == [0.0, 3.0, 3.0, 6.0]


def test_a_cap_holds_back_but_time_counts_from_when_it_was_due(play: Play) -> None:
    transport = FakeTransport({0: 10.0, 1: 10.0, 2: 1.0, 3: 1.0})
    arrivals = OpenLoop((0.0, 1.0, 2.0, 3.0), max_concurrency=2)
    result = play(driver.run(transport, single(4), arrivals=arrivals, model="m"))
    assert transport.most_in_flight == 2
    assert scheduled(result) == [0.0, 1.0, 2.0, 3.0]
    assert sent(result) == [0.0, 1.0, 10.0, 11.0]


def test_later_turns_are_due_after_the_answer(play: Play) -> None:
    dialogues = [talk(num_turns=3), talk(num_turns=1)]
    transport = FakeTransport({0: 5.0})
    result = play(driver.run(transport, dialogues, arrivals=OpenLoop((1.0, 2.0)), model="m"))
    assert scheduled(result) == [1.0, 6.0, 11.0, 2.0]
    assert [(record.dialogue, record.turn) for record in result.records] == [
        (0, 0), (0, 1), (0, 2), (1, 0),
    ]  # fmt: skip


# -- what is sent -----------------------------------------------------------------------------


def test_full_history_repeats_all_that_was_said(play: Play) -> None:
    transport = FakeTransport()
    play(driver.run(transport, [talk(num_turns=3)], arrivals=ClosedLoop(1), model="m"))
    said = [
        ("system", "be kind"),
        ("user", "turn 0"),
        ("assistant", "answer 0.0"),
        ("user", "turn 1"),
        ("assistant", "answer 0.1"),
        ("user", "turn 2"),
    ]
    for (_, call), num_messages in zip(transport.calls, (2, 4, 6), strict=True):
        assert [(each.role, each.content) for each in call.messages] == said[:num_messages]
        assert call.previous_response_id is None


def test_history_by_id_sends_the_new_turn_alone(play: Play) -> None:
    transport = FakeTransport()
    run = driver.run(
        transport,
        [talk(num_turns=3)],
        arrivals=ClosedLoop(1),
        model="m",
        history="previous_response_id",
    )
    play(run)
    calls = [call for _, call in transport.calls]
    assert [call.previous_response_id for call in calls] == [None, "id 0.0", "id 0.1"]
    assert [[each.role for each in call.messages] for call in calls] == [
        ["system", "user"], ["user"], ["user"],
    ]  # fmt: skip


def test_a_call_carries_all_its_turn_says(play: Play) -> None:
    turns = (
        Dialogue(turns=(Turn(text=(7, 8, 9), max_tokens=3),)),
        Dialogue(turns=(Turn(text="hello", max_tokens=5),)),
    )
    transport = FakeTransport()
    settings = {"model": "name", "extra": {"temperature": 0}, "ignore_eos": False}
    result = play(driver.run(transport, turns, arrivals=ClosedLoop(1), **settings))
    ids, words = (call for _, call in transport.calls)
    assert (ids.prompt_token_ids, ids.messages, ids.max_tokens) == ((7, 8, 9), (), 3)
    assert [each.content for each in words.messages] == ["hello"]
    assert (words.prompt_token_ids, words.ignore_eos, ids.ignore_eos) == ((), False, False)
    assert {ids.model, words.model} == {"name"}
    assert ids.extra == {"temperature": 0}
    assert [record.expected_tokens for record in result.records] == [-1, -1]


# -- ends -------------------------------------------------------------------------------------


def test_a_failed_turn_ends_its_dialogue_alone(play: Play) -> None:
    dialogues = [talk(num_turns=4), talk(num_turns=3)]
    transport = FakeTransport(faults={(0, 1): Fault.CUT})
    result = play(driver.run(transport, dialogues, arrivals=ClosedLoop(1), model="m"))
    assert [(record.dialogue, record.turn) for record in result.records] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert result.num_unsent == 2
    assert [record.faults for record in result.records] == [[], [Fault.CUT], [], [], []]


def test_walking_away_closes_every_stream(play: Play) -> None:
    transport = FakeTransport(dict.fromkeys(range(6), 50.0))

    async def leave() -> None:
        arrivals = OpenLoop(tuple(range(6)), max_concurrency=3)
        async with asyncio.timeout(4.5):
            await driver.run(transport, single(6), arrivals=arrivals, model="m")

    with pytest.raises(TimeoutError):
        play(leave())
    assert (len(transport.calls), transport.num_cancelled, transport.num_in_flight) == (3, 3, 0)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_sent_early_on_a_real_loop(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Event loops round: a turn sent before it was due would have too short a latency."""
    offsets_s = tuple(0.003 * number + 0.0007 for number in range(40))

    class Instant(FakeTransport):
        async def stream(self, call: Call, record: StreamRecord) -> None:
            record.ended_s = time.perf_counter()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(
            driver.run(Instant(), single(40), arrivals=OpenLoop(offsets_s), model="m")
        )
    for record in result.records:
        assert record.sent_s >= record.scheduled_s
