"""Who enters the next engine when: suspects one at a time, the others at once."""

from __future__ import annotations

import pytest

from penstock.engine.protocol.messages import Message, Submit
from penstock.engine.request import Request, RequestOutput, SamplingParams
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.open_streams import OpenStreams
from penstock.gateway.engines.routing import EngineLoad
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.sources import next_of


class Desk:
    """Open streams, what they had the engine told, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.posted: list[Message] = []
        self.load = EngineLoad()
        self.life = "the only one"
        self.streams = OpenStreams(
            lambda _: self, max_engine_deaths=9, engine_wait_s=60.0, clock=lambda: self.now_s
        )

    def post(self, message: Message) -> None:
        self.posted.append(message)

    def note_work(self) -> None:
        """It has no clock for this."""

    def open(self, *request_ids: str) -> list[EngineStream]:
        params = SamplingParams(max_tokens=100)
        return [
            self.streams.open(
                Request(request_id=each, prompt_token_ids=(1,), sampling_params=params)
            )
            for each in request_ids
        ]

    def die(self) -> list[str]:
        """The engine dies and comes back; who was submitted to the next."""
        self.streams.lose_engine(self, "a test")
        return self.told(self.streams.continue_all)

    def told(self, action: object) -> list[str]:
        self.posted.clear()
        assert callable(action)
        action()
        return [each.request.request_id for each in self.posted if isinstance(each, Submit)]

    def token(self, wire_id: str) -> None:
        self.streams.deliver([RequestOutput(request_id=wire_id, token_ids=(7,))], {})


def test_after_a_death_what_was_new_enters_later_first_alone_then_more_at_a_time() -> None:
    desk = Desk()
    desk.open("a", "b", "c", "d", "e")
    desk.token("a")
    assert desk.die() == ["a~1"]
    assert desk.told(lambda: desk.token("a~1")) == ["b~1"]
    assert desk.told(lambda: desk.token("b~1")) == ["c~1", "d~1"]
    assert desk.told(lambda: desk.token("c~1")) == []
    assert desk.told(lambda: desk.token("d~1")) == ["e~1"]


def test_what_waits_in_the_queue_is_still_new() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.streams.deliver([RequestOutput(request_id="a", queue_position=3, num_tokens_ahead=9)], {})
    assert desk.die() == ["a~1"]


async def test_one_that_kills_alone_is_to_blame_and_the_rest_go_on() -> None:
    desk = Desk()
    a, b = desk.open("a", "b")
    assert desk.die() == ["a~1"]
    assert desk.die() == ["b~1"]  # a killed alone, so b is less suspicious
    assert desk.told(lambda: desk.token("b~1")) == ["a~2"]
    assert desk.die() == ["b~2"]
    with pytest.raises(GenerationFailedError, match="3 times with this request: a test"):
        await next_of(a)
    assert b.num_deaths == 0  # forgiven
    desk.token("b~2")
    [output, *_] = await next_of(b)
    assert output.token_ids == (7, 7)


async def test_nobody_is_blamed_for_a_death_with_others_that_were_new() -> None:
    """As where somebody sends one request after the other that kills engines."""
    desk = Desk()
    [innocent] = desk.open("a")
    for number in range(1, 5):
        desk.open(f"killer{number}")  # beside the one that is on trial
        desk.die()
    assert innocent in desk.streams._streams
    assert not innocent.is_over


def test_nothing_enters_beside_one_that_enters_alone() -> None:
    desk = Desk()
    desk.open("a")
    desk.die()
    assert desk.die() == ["a~2"]
    assert desk.told(lambda: desk.open("later", "later still")) == []
    assert desk.told(lambda: desk.token("a~2")) == ["later", "later still"]


def test_an_engine_at_fault_makes_no_suspects() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.streams.lose_engine(desk, "a test", is_at_fault=True)
    assert desk.told(desk.streams.continue_all) == ["a~1", "b~1"]


def test_a_trial_ends_with_its_request_or_with_time() -> None:
    desk = Desk()
    a, _, c, *_ = desk.open("a", "b", "c", "d", "e")
    assert desk.die() == ["a~1"]
    assert desk.told(lambda: desk.streams.abort(a)) == ["b~1"]
    desk.now_s += 9
    assert desk.told(desk.streams.tick) == []
    desk.streams.abort(c)
    desk.now_s += 2
    assert desk.told(desk.streams.tick) == ["d~1", "e~1"]


def test_the_end_of_all_lets_no_suspect_in() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.die()
    desk.die()
    assert desk.told(lambda: desk.streams.fail_all("shutting down")) == []
    assert len(desk.streams) == 0
