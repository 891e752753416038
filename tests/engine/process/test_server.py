"""The engine's end of the wire, spoken to over a real socket."""

from __future__ import annotations

import time

from penstock.engine.protocol.messages import Abort, DropPrefix, Heartbeat, Step, Submit
from penstock.engine.request import FinishReason, Request, SamplingParams

from ..scheduling.fake_device import expected_output
from .stack import Connect, Engine, outputs_of


def test_a_request_comes_back_token_by_token(connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", (1, 2, 3), 40)
    tokens, last, numbers = gateway.finish("a")
    assert tokens == expected_output([1, 2, 3], 40)
    assert last.finish_reason is FinishReason.LENGTH
    assert numbers == list(range(1, 41)), "one numbered frame per iteration"


def test_all_streams_of_an_iteration_share_a_frame(engine: Engine, connect: Connect) -> None:
    gateway, other = connect(), connect()
    engine.device.hold()
    gateway.submit("r0", (0,), 5)
    engine.wait_for_step(1)
    for index in range(1, 8):
        gateway.submit(f"r{index}", (index,), 5)
    other.submit("theirs", (9,), 5)
    engine.wait_for_mail(8)
    engine.device.set_free()
    steps = []
    while True:
        step = gateway.receive()
        assert isinstance(step, Step)
        steps.append(step)
        if any(output.finish_reason for output in outputs_of(step)):
            break
    assert max(len(outputs_of(step)) for step in steps) == 8
    assert {o.request_id for s in steps for o in outputs_of(s)} <= {f"r{i}" for i in range(8)}
    assert other.finish("theirs")[0] == expected_output([9], 5)


def test_an_abort_frees_blocks_within_a_step(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.hold(but=1)
    gateway.submit("a", (1,) * 100, 1500)
    gateway.receive()
    engine.wait_for_step(2)
    assert engine.blocks.tiers.device.num_held >= 7
    gateway.send(Abort(request_ids=("a", "unknown")))
    engine.wait_for_mail()
    engine.device.allow(1)
    engine.wait_for_step(3)
    assert engine.blocks.tiers.device.num_held == 0
    assert not engine.device.begun[-1].scheduled, "the step that forgets it"
    engine.device.set_free()
    gateway.submit("b", (1,), 3)
    assert gateway.finish("b")[0] == expected_output([1], 3)


def test_one_gateway_cannot_abort_anothers_request(engine: Engine, connect: Connect) -> None:
    gateway, other = connect(), connect()
    engine.device.hold(but=1)
    gateway.submit("a", (1,), 200)
    gateway.receive()
    engine.wait_for_step(2)
    other.send(Abort(request_ids=("a",)))
    engine.wait_for_mail()
    engine.device.set_free()
    assert gateway.finish("a")[1].finish_reason is FinishReason.LENGTH


def test_refusals_name_the_reason(connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", (), 5)
    _, refused, _ = gateway.finish("a")
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error == "the prompt has no tokens"


def test_one_branch_is_aborted_and_the_others_go_on(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.hold(but=3)
    params = SamplingParams(max_tokens=30, n=3)
    gateway.send(
        Submit(request=Request(request_id="a", prompt_token_ids=(1, 2), sampling_params=params))
    )
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    is_over = False
    while not is_over:
        step = gateway.receive()
        assert isinstance(step, Step)
        for output in outputs_of(step):
            tokens[output.index].extend(output.token_ids)
            is_over |= output.is_last
        if step.number == 3:
            engine.wait_for_step(4)
            gateway.send(Abort(branches=(("a", 1), ("unknown", 0))))
            engine.wait_for_mail()
            engine.device.set_free()
    assert 3 <= len(tokens[1]) <= 4, "what the step it met brought is the last"
    for index in (0, 2):
        assert tokens[index] == expected_output([1, 2], 30, index)
    engine.wait_for_idle_blocks()


def test_a_refusal_names_the_parameter(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    params = SamplingParams(max_tokens=1900, n=8)
    gateway.send(
        Submit(request=Request(request_id="a", prompt_token_ids=(1,), sampling_params=params))
    )
    _, output, _ = gateway.finish("a")
    assert output.is_refused
    assert output.is_last
    assert output.param == "n"
    assert "952 KV blocks of 16 tokens, and there are 200" in (output.error or "")


def test_a_prefix_is_found_until_it_is_dropped(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    prompt = tuple(range(40))

    def num_cached(request_id: str) -> int:
        gateway.submit(request_id, prompt, 1)
        return gateway.finish(request_id)[1].num_cached_tokens

    assert [num_cached("a"), num_cached("b")] == [0, 39]
    gateway.send(DropPrefix(token_ids=prompt))
    assert num_cached("c") == 0


def test_the_numbers_of_memory_are_told(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", tuple(range(40)), 20)
    step = gateway.receive()
    assert isinstance(step, Step)
    assert step.stats.num_blocks_used == 3
    assert (step.stats.num_slots_allocated, step.stats.num_slots_empty) == (48, 8)
    gateway.finish("a")
    beat = gateway.receive(beats=True)
    while not isinstance(beat, Heartbeat):
        beat = gateway.receive(beats=True)
    assert beat.stats is not None
    assert (beat.stats.num_blocks_used, beat.stats.num_blocks_cached) == (0, 4)
    assert beat.stats.prefix_cache_queries_total == 40


def test_stats_come_with_the_steps_that_show_something_new(connect: Connect) -> None:
    gateway = connect()
    began_s = time.monotonic()
    gateway.submit("a", (1,), 300)
    steps = []
    while not steps or not outputs_of(steps[-1])[-1].is_last:
        step = gateway.receive()
        assert isinstance(step, Step)
        steps.append(step)
    told = [step.stats for step in steps if step.stats is not None]
    assert steps[0].stats is not None
    assert steps[-1].stats is not None
    assert steps[-1].stats.generation_tokens_total == len(steps) == 300
    assert len(told) <= 3 + (time.monotonic() - began_s) / 0.1
