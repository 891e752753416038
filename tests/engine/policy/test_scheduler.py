"""Iteration-level scheduling over paged blocks, against a device that checks every block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError, PromptTooLongError
from penstock.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from penstock.engine.scheduling import Scheduler

from .fake_device import VOCAB_SIZE, FakeDevice, expected_output

MAX_MODEL_LEN = 64


class Stack:
    """Core, policy and fake device, and what came out of them."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, config: SchedulerConfig | None = None
    ) -> None:
        config = config or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
        self.blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
        self.scheduler = Scheduler(
            config, self.blocks, eos_token_ids=(), max_model_len=MAX_MODEL_LEN
        )
        self.device = FakeDevice(num_blocks=num_blocks, block_size=block_size)
        self.core = EngineCore(
            self.scheduler, self.device, max_steps_in_flight=config.max_steps_in_flight
        )
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, request_id: str, prompt: list[int], **params: int) -> None:
        self.tokens[request_id] = []
        self.core.add(make_request(request_id, prompt, len(self.tokens), **params))

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        self.blocks.check_integrity()
        for output in outputs:
            self.tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.reasons, "finished twice"
                self.reasons[output.request_id] = output.finish_reason
        return outputs

    def run(self) -> None:
        for _ in range(100_000):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work()
        assert self.blocks.num_used_blocks == 0, "blocks leaked"
        assert self.device.rows == {}, "the device was not told who left"


def make_request(request_id: str, prompt: list[int], arrival: float, **params: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),  # type: ignore[arg-type]
        arrival_s=float(arrival),
    )


def prompts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def test_the_17th_token_takes_the_second_block() -> None:
    stack = Stack(block_size=16, num_blocks=8)
    stack.add("a", [1] * 15, max_tokens=3)
    stack.step()  # 15 prompt tokens; the 16th is sampled
    assert stack.blocks.num_used_blocks == 1
    stack.step()  # the 16th is computed
    assert stack.blocks.num_used_blocks == 1
    stack.step()  # the 17th would be, but it is the last: sampled, never computed
    assert stack.tokens["a"] == expected_output([1] * 15, 3)
    stack.add("b", [1] * 16, max_tokens=3)
    stack.step()
    assert stack.blocks.num_used_blocks == 1
    stack.step()
    assert stack.blocks.num_used_blocks == 2


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("num_blocks", [16, 24, 400])
def test_every_stream_gets_its_own_tokens(
    steps_in_flight: int, is_chunked: bool, num_blocks: int
) -> None:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=16 if is_chunked else MAX_MODEL_LEN,
        enable_chunked_prefill=is_chunked,
        max_steps_in_flight=steps_in_flight,
    )
    stack = Stack(num_blocks=num_blocks, config=config)
    cases = prompts(20)
    for index, prompt in enumerate(cases):
        stack.add(f"r{index}", prompt, max_tokens=1 + index)
    stack.run()
    for index, prompt in enumerate(cases):
        assert stack.tokens[f"r{index}"] == expected_output(prompt, 1 + index)
        assert stack.reasons[f"r{index}"] is FinishReason.LENGTH
    assert (stack.scheduler.counters.num_preemptions > 0) == (num_blocks < 400)


def test_a_step_never_exceeds_its_budgets() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7))
    for index, prompt in enumerate(prompts(10)):
        stack.add(f"r{index}", prompt, max_tokens=5)
    stack.run()
    assert max(batch.num_tokens for batch in stack.device.batches) == 7
    assert max(len(batch.scheduled) for batch in stack.device.batches) == 3


def test_short_requests_never_wait_for_a_long_one() -> None:
    stack = Stack(num_blocks=400, config=SchedulerConfig(max_num_seqs=16))
    stack.add("long", [1, 2, 3], max_tokens=50)
    for index in range(15):
        stack.add(f"short{index}", [index], max_tokens=2)
    for _ in range(2):
        stack.step()
    assert len(stack.reasons) == 15
    assert stack.scheduler.num_running == 1


def test_decode_goes_on_while_a_long_prompt_is_computed() -> None:
    stack = Stack(num_blocks=400, config=SchedulerConfig(max_num_batched_tokens=8))
    stack.add("decoding", [1], max_tokens=30)
    stack.step()
    stack.add("long", [2] * 40, max_tokens=1)
    for _ in range(6):  # 40 tokens in chunks of 7 beside one decode token
        before = len(stack.tokens["decoding"])
        stack.step()
        assert len(stack.tokens["decoding"]) == before + 1
    assert stack.reasons["long"] is FinishReason.LENGTH


def test_first_come_first_served() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=1))
    for index, request_id in enumerate(["a", "b", "c"]):
        stack.tokens[request_id] = []
        # submitted in one order, arrived in the other
        stack.core.add(make_request(request_id, [1], 10 - index, max_tokens=1))
    stack.run()
    assert list(stack.reasons) == ["c", "b", "a"]


def test_the_latest_arrival_is_preempted_and_returns_with_its_tokens() -> None:
    stack = Stack(num_blocks=16, block_size=4)
    stack.add("first", [1] * 20, max_tokens=30)
    stack.add("second", [2] * 20, max_tokens=30)
    stack.run()
    assert stack.scheduler.counters.num_preemptions >= 1
    assert list(stack.reasons) == ["first", "second"]
    assert stack.tokens["second"] == expected_output([2] * 20, 30)


def test_abort_frees_its_blocks_at_once() -> None:
    stack = Stack()
    stack.add("a", [1] * 10, max_tokens=30)
    stack.add("b", [2] * 10, max_tokens=5)
    stack.step()
    used = stack.blocks.num_used_blocks
    stack.core.abort("a")
    assert stack.blocks.num_used_blocks == used - 3
    stack.core.abort("a")
    stack.core.abort("never heard of")
    stack.run()
    assert stack.tokens["b"] == expected_output([2] * 10, 5)
    assert "a" not in stack.reasons


def test_a_sequence_the_device_fails_ends_alone() -> None:
    stack = Stack()
    stack.add("a", [1] * 5, max_tokens=9)
    stack.add("b", [2] * 5, max_tokens=9)
    stack.step()
    stack.device.failing = {0}
    (failed, _) = stack.step()
    assert (failed.request_id, failed.finish_reason) == ("a", FinishReason.ERROR)
    assert failed.error is not None
    stack.run()
    assert stack.tokens["b"] == expected_output([2] * 5, 9)


def test_stop_ids_min_tokens_and_ignore_eos() -> None:
    prompt = [3, 1, 4]
    output = expected_output(prompt, 20)
    eos = output[4]
    first = output.index(eos)

    def run(**params: object) -> tuple[list[int], FinishReason]:
        blocks = BlockManager(num_blocks=64, block_size=4)
        scheduler = Scheduler(
            SchedulerConfig(), blocks, eos_token_ids=(eos,), max_model_len=MAX_MODEL_LEN
        )
        core = EngineCore(scheduler, FakeDevice(num_blocks=64, block_size=4))
        request = make_request("a", prompt, 0, max_tokens=20)
        settled = replace(request.sampling_params, **params)  # type: ignore[arg-type]
        core.add(replace(request, sampling_params=settled))
        token_ids: list[int] = []
        reason = None
        while core.has_work():
            for out in core.step():
                token_ids.extend(out.token_ids)
                reason = out.finish_reason
        assert reason is not None
        return token_ids, reason

    assert run() == (output[: first + 1], FinishReason.STOP)
    assert run(ignore_eos=True) == (output, FinishReason.LENGTH)
    assert run(ignore_eos=True, stop_token_ids=(eos,)) == (output[: first + 1], FinishReason.STOP)
    later = [index for index, token in enumerate(output) if token == eos and index + 1 >= 10]
    expected = (
        (output[: later[0] + 1], FinishReason.STOP) if later else (output, FinishReason.LENGTH)
    )
    assert run(min_tokens=10) == expected


def test_output_ends_at_the_context() -> None:
    stack = Stack()
    stack.add("a", [1] * 60, max_tokens=50)
    stack.run()
    assert len(stack.tokens["a"]) == MAX_MODEL_LEN - 60
    assert stack.reasons["a"] is FinishReason.LENGTH


def test_a_continuation_counts_earlier_output() -> None:
    prompt, whole = [5, 6], expected_output([5, 6], 10)
    stack = Stack()
    stack.tokens["a"] = []
    request = make_request("a", prompt, 0, max_tokens=10)
    stack.core.add(replace(request, output_token_ids=tuple(whole[:4])))
    stack.run()
    assert stack.tokens["a"] == whole[4:]


def test_impossible_requests_are_refused_and_leave_nothing() -> None:
    stack = Stack()
    stack.add("a", [1], max_tokens=2)
    with pytest.raises(InvalidRequestError, match="in use"):
        stack.core.add(make_request("a", [1], 0))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        stack.core.add(make_request("b", [], 0))
    with pytest.raises(PromptTooLongError, match="64"):
        stack.core.add(make_request("c", [1] * 64, 0))
    stack.run()
    assert list(stack.reasons) == ["a"]


def test_settings_that_cannot_work_say_so() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    with pytest.raises(ConfigError, match="16 tokens"):
        Scheduler(SchedulerConfig(), blocks, eos_token_ids=(), max_model_len=17)
    config = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="max-num-batched-tokens"):
        Scheduler(config, blocks, eos_token_ids=(), max_model_len=16)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_history_keeps_blocks_and_tokens_right(data: st.DataObject) -> None:
    """Random adds, aborts and steps: nothing leaks, nothing is shared wrongly, all ends."""
    config = SchedulerConfig(
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(1, 40)),
        max_steps_in_flight=data.draw(st.integers(1, 3)),
    )
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    smallest = -(-MAX_MODEL_LEN // block_size)
    stack = Stack(
        num_blocks=smallest + data.draw(st.integers(0, smallest)),
        block_size=block_size,
        config=config,
    )
    cases: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for index in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort"]))
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=50))
            max_tokens = data.draw(st.integers(1, 13))
            cases[f"r{index}"] = (prompt, max_tokens)
            stack.add(f"r{index}", prompt, max_tokens=max_tokens)
        elif action == "step":
            stack.step()
        elif cases:
            aborted.add(request_id := data.draw(st.sampled_from(sorted(cases))))
            if request_id not in stack.reasons:
                stack.core.abort(request_id)
                stack.blocks.check_integrity()
    stack.run()
    for request_id, (prompt, max_tokens) in cases.items():
        expected = expected_output(prompt, max_tokens)
        if request_id in stack.reasons:
            assert stack.tokens[request_id] == expected
        else:
            assert request_id in aborted
            assert stack.tokens[request_id] == expected[: len(stack.tokens[request_id])]


def test_an_idle_core_plans_nothing() -> None:
    stack = Stack()
    assert stack.core.step() == []
    assert stack.scheduler.schedule() == Batch(step=0, scheduled=())
