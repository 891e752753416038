"""How many Python functions a decode step of one stream calls.

In the engine's process, from looking for messages to handing the outputs to the transport; what C
calls and does is not counted. A small model's weights are read in less time than Python takes for
this many calls: one that every step makes needs a reason, and what is off should make none. Nor is
garbage collected in a step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.process import garbage, server
from penstock.engine.protocol.messages import EngineInfo, EngineStats, Submit
from penstock.engine.protocol.sockets import GatewayId, Inbound
from penstock.engine.request import Request, RequestOutput, SamplingParams
from penstock.engine.startup import build_core

MAX_CALLS = 48
NUM_STEPS = 200  # of which some enter a new block
NUM_FIRST_STEPS = 10  # which are not counted


class CountingTransport:
    """Stands for the connections of gateways, of which one sends a request. Counts the calls of the
    steps that send its tokens, then stops the engine."""

    stop: Callable[[], None]

    def __init__(self, request: Request) -> None:
        self.calls: Counter[str] = Counter()
        self.num_sent = 0
        self.stats, self.last_step_s = EngineStats(), 0.0
        self._unread: list[Inbound] = [(1, Submit(request=request))]

    def receive(self, *, timeout_s: float | None) -> list[Inbound]:
        unread, self._unread = self._unread, []
        return unread

    def send(self, _: GatewayId, outputs: tuple[RequestOutput, ...]) -> None:
        self.num_sent += 1
        assert [len(output.token_ids) for output in outputs] == [1]
        if self.num_sent == NUM_FIRST_STEPS:
            sys.setprofile(self._count)
        elif self.num_sent == NUM_FIRST_STEPS + NUM_STEPS:
            sys.setprofile(None)
            self.stop()

    def interrupt(self) -> None:
        """Nobody waits."""

    def close(self, failure: str) -> None:
        """Nothing to close."""

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            self.calls[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1


@pytest.fixture
def built(tiny_checkpoint: Callable[..., Path]) -> tuple[EngineCore, EngineInfo]:
    path = tiny_checkpoint(max_position_embeddings=512)
    cache = CacheConfig(num_blocks=64)
    return build_core(EngineConfig(model=ModelConfig(model=str(path)), cache=cache))


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_a_decode_step_of_one_stream_calls_few_functions(
    built: tuple[EngineCore, EngineInfo], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    params = SamplingParams(
        max_tokens=400,
        temperature=temperature,
        seed=7,
        ignore_eos=True,
        speculation=temperature > 0,  # random weights repeat themselves: drafts would be right
    )
    request = Request(request_id="one", prompt_token_ids=(1, 2, 3), sampling_params=params)
    transport = CountingTransport(request)
    monkeypatch.setattr(server, "Transport", lambda *_, **__: transport)
    monkeypatch.setattr(server, "_STATS_INTERVAL_S", 3600.0)  # a slow step would have a larger part
    engine = server.EngineServer(*built, "")
    transport.stop = engine.stop
    engine.run()
    listed = "\n".join(f"{num / NUM_STEPS:7.2f} {of}" for of, num in transport.calls.most_common())
    num_calls = transport.calls.total() / NUM_STEPS
    assert num_calls <= MAX_CALLS, f"{num_calls} calls of a step:\n{listed}"


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


class BriefTransport(CountingTransport):
    """Stops the engine after some steps."""

    def send(self, *_: object) -> None:
        self.num_sent += 1
        if self.num_sent == 40:
            self.stop()


def test_garbage_is_collected_between_steps(
    built: tuple[EngineCore, EngineInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, info = built
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    request = Request(request_id="one", prompt_token_ids=(1, 2, 3), sampling_params=params)
    transport = BriefTransport(request)
    cycles = weakref.WeakSet[Cycle]()
    is_in_step, collections, step = False, list[bool](), core.step

    def wasteful_step() -> list[RequestOutput]:
        nonlocal is_in_step
        is_in_step = True
        for _ in range(200):
            cycles.add(Cycle())
        outputs = step()
        is_in_step = False
        return outputs

    def note(phase: str, _: object) -> None:
        collections.extend([is_in_step] * (phase == "start"))

    monkeypatch.setattr(server, "Transport", lambda *_, **__: transport)
    monkeypatch.setattr(garbage, "MANY_OBJECTS", 2_000)
    monkeypatch.setattr(core, "step", wasteful_step)
    engine = server.EngineServer(core, info, "")
    transport.stop = engine.stop
    garbage.keep_out_of_steps()
    gc.callbacks.append(note)
    try:
        engine.run()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        gc.unfreeze()
    assert collections
    assert not any(collections)
    assert len(cycles) < 40 * 200 / 2
