"""Who enters the next engine when: suspects one at a time, the others at once."""

from __future__ import annotations

import pytest

from penstock.engine.request import Request, RequestOutput, SamplingParams
from penstock.engine.transport.messages import Abort, Message, Submit
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
        self.streams = OpenStreams(
            lambda _: self, max_engine_lives=9, engine_wait_s=60.0, clock=lambda: self.now_s
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
        self.streams.deliver([RequestOutput(request_id=wire_id, token_ids=(7,))])


def test_after_two_deaths_each_waits_for_the_output_of_the_one_before() -> None:
    desk = Desk()
    desk.open("a", "b", "c")
    assert desk.die() == ["a~1", "b~1", "c~1"]
    desk.token("c~1")  # lives
    assert desk.die() == ["c~2", "a~2"]
    assert desk.told(lambda: desk.token("c~2")) == []
    assert desk.told(lambda: desk.token("a~2")) == ["b~2"]


async def test_the_one_on_trial_is_to_blame_and_the_rest_go_on() -> None:
    desk = Desk()
    a, b = desk.open("a", "b")
    desk.die()
    assert desk.die() == ["a~2"]
    assert desk.die() == ["b~2"]
    with pytest.raises(GenerationFailedError, match="3 times with this request: a test"):
        await next_of(a)
    desk.token("b~2")
    [output] = await next_of(b)
    assert output.token_ids == (7,)


def test_a_trial_ends_with_its_request_or_with_time() -> None:
    desk = Desk()
    a, _, c, _ = desk.open("a", "b", "c", "d")
    desk.die()
    assert desk.die() == ["a~2"]
    assert desk.told(lambda: desk.streams.abort(a)) == ["b~2"]
    desk.streams.abort(c)  # it waits: the engine need not know
    assert not any(isinstance(each, Abort) and "c~2" in each.request_ids for each in desk.posted)
    desk.now_s += 9
    assert desk.told(desk.streams.tick) == []
    desk.now_s += 2
    assert desk.told(desk.streams.tick) == ["d~2"]


def test_the_end_of_all_lets_no_suspect_in() -> None:
    desk = Desk()
    desk.open("a", "b")
    desk.die()
    desk.die()
    assert desk.told(lambda: desk.streams.fail_all("shutting down")) == []
    assert len(desk.streams) == 0
