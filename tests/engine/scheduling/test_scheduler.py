"""Iteration-level scheduling over paged blocks, against a device that checks every block."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError, PromptTooLongError
from penstock.engine.request import FinishReason, ImageInput
from penstock.engine.scheduling import Scheduler

from .fake_device import FakeDevice, expected_output
from .stack import MAX_MODEL_LEN, Stack, make_request, prompts


def test_the_17th_token_takes_the_second_block() -> None:
    stack = Stack(block_size=16, num_blocks=8)
    stack.add("a", [1] * 15, max_tokens=3)
    stack.step()  # 15 prompt tokens; the 16th is sampled
    assert stack.blocks.tiers.device.num_held == 1
    stack.step()  # the 16th is computed
    assert stack.blocks.tiers.device.num_held == 1
    stack.step()  # the 17th would be, but it is the last: sampled, never computed
    assert stack.tokens("a") == expected_output([1] * 15, 3)
    stack.add("b", [1] * 16, max_tokens=3)
    stack.step()
    assert stack.blocks.tiers.device.num_held == 1
    stack.step()
    assert stack.blocks.tiers.device.num_held == 2


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
        assert stack.tokens(f"r{index}") == expected_output(prompt, 1 + index)
        assert stack.reason(f"r{index}") is FinishReason.LENGTH
    assert (stack.scheduler.counters.num_preemptions > 0) == (num_blocks < 400)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_microbatches_share_the_sequences_equally(num_steps: int) -> None:
    """Also when some have ended and others have come; a sequence is in one of them only."""
    config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_steps_in_flight=num_steps
    )
    stack = Stack(num_blocks=400, config=config, num_microbatches=num_steps)
    for index in range(12):
        stack.add(f"r{index}", [index], max_tokens=50 if index % 2 else 10)
    sizes: list[int] = []  # of the steps in flight, while all their sequences decode
    for number in range(60):
        if number == 24:
            for index in range(12, 18):
                stack.add(f"r{index}", [index], max_tokens=30)
        stack.step()
        batches = [batch for batch, *_ in stack.core._in_flight]
        seq_ids = [item.seq_id for batch in batches for item in batch.scheduled]
        assert len(set(seq_ids)) == len(seq_ids)
        sizes.append(max((len(batch.scheduled) for batch in batches), default=0))
        assert all(batch.num_tokens <= -(-64 // num_steps) for batch in batches)
    assert sizes[8] == 12 // num_steps
    assert sizes[-1] == 12 // num_steps
    stack.run()
    for index in range(18):
        length = 30 if index >= 12 else 50 if index % 2 else 10
        assert stack.tokens(f"r{index}") == expected_output([index], length)


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
    assert len(stack.ended) == 15
    assert stack.scheduler.num_running == 1


def test_decode_goes_on_while_a_long_prompt_is_computed() -> None:
    stack = Stack(num_blocks=400, config=SchedulerConfig(max_num_batched_tokens=8))
    stack.add("decoding", [1], max_tokens=30)
    stack.step()
    stack.add("long", [2] * 40, max_tokens=1)
    for _ in range(6):  # 40 tokens in chunks of 7 beside one decode token
        before = len(stack.tokens("decoding"))
        stack.step()
        assert len(stack.tokens("decoding")) == before + 1
    assert stack.reason("long") is FinishReason.LENGTH


def test_first_come_first_served() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=1))
    for index, request_id in enumerate(["a", "b", "c"]):
        # submitted in one order, arrived in the other
        stack.core.add(make_request(request_id, [1], arrival=10 - index, max_tokens=1))
    stack.run()
    assert list(stack.ended) == ["c", "b", "a"]


def test_the_latest_arrival_is_preempted_and_returns_with_its_tokens() -> None:
    stack = Stack(num_blocks=16, block_size=4)
    stack.add("first", [1] * 20, max_tokens=30)
    stack.add("second", [2] * 20, max_tokens=30)
    stack.run()
    assert stack.scheduler.counters.num_preemptions >= 1
    assert list(stack.ended) == ["first", "second"]
    assert stack.tokens("second") == expected_output([2] * 20, 30)


def test_abort_frees_its_blocks_at_once() -> None:
    stack = Stack()
    stack.add("a", [1] * 10, max_tokens=30)
    stack.add("b", [2] * 10, max_tokens=5)
    stack.step()
    used = stack.blocks.tiers.device.num_held
    stack.core.abort("a")
    assert stack.blocks.tiers.device.num_held == used - 3
    stack.core.abort("a")
    stack.core.abort("never heard of")
    stack.run()
    assert stack.tokens("b") == expected_output([2] * 10, 5)
    assert "a" not in stack.ended


def test_a_sequence_the_device_fails_ends_alone() -> None:
    stack = Stack()
    stack.add("a", [1] * 5, max_tokens=9)
    stack.add("b", [2] * 5, max_tokens=9)
    stack.step()
    stack.device.failing = {0: FinishReason.ERROR}
    (failed, _) = stack.step()
    assert failed.is_last
    assert (failed.request_id, failed.finish_reason) == ("a", FinishReason.ERROR)
    assert failed.error is not None
    stack.run()
    assert stack.tokens("b") == expected_output([2] * 5, 9)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_failure_is_no_trouble_to_steps_already_planned(steps_in_flight: int) -> None:
    config = SchedulerConfig(max_num_seqs=4, max_steps_in_flight=steps_in_flight)
    stack = Stack(enable_prefix_caching=True, config=config)
    stack.add("a", list(range(20)), max_tokens=5)
    stack.add("b", list(range(20)), max_tokens=5)
    stack.device.failing = {0: FinishReason.ERROR}
    stack.run()
    assert stack.reason("a") is FinishReason.ERROR
    assert stack.tokens("b") == expected_output(list(range(20)), 5)


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
        request = make_request("a", prompt, arrival=0, max_tokens=20)
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
    assert len(stack.tokens("a")) == MAX_MODEL_LEN - 60
    assert stack.reason("a") is FinishReason.LENGTH


def test_a_continuation_counts_earlier_output() -> None:
    prompt, whole = [5, 6], expected_output([5, 6], 10)
    stack = Stack()
    request = make_request("a", prompt, arrival=0, max_tokens=10)
    stack.core.add(replace(request, output_token_ids=tuple(whole[:4])))
    stack.run()
    assert stack.tokens("a") == whole[4:]


def test_impossible_requests_are_refused_and_leave_nothing() -> None:
    stack = Stack()
    stack.add("a", [1], max_tokens=2)
    with pytest.raises(InvalidRequestError, match="in use"):
        stack.core.add(make_request("a", [1], arrival=0))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        stack.core.add(make_request("b", [], arrival=0))
    with pytest.raises(PromptTooLongError, match="64"):
        stack.core.add(make_request("c", [1] * 64, arrival=0))
    stack.run()
    assert list(stack.ended) == ["a"]


def test_settings_that_cannot_work_say_so() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    with pytest.raises(ConfigError, match="16 tokens"):
        Scheduler(SchedulerConfig(), blocks, eos_token_ids=(), max_model_len=17)
    config = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="max-num-batched-tokens"):
        Scheduler(config, blocks, eos_token_ids=(), max_model_len=16)


def test_no_step_ends_in_an_image_that_is_seen_whole() -> None:
    """Nor exceeds its budget, beside decodes, other tenants, prefix hits and preemptions."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12)
    stack = Stack(
        num_blocks=16, config=config, enable_prefix_caching=True, has_bidirectional_images=True
    )
    given = {}
    for index in range(24):
        offset = 5 * (index % 3)
        image = ImageInput(digest="a", offset=offset, num_tokens=9, num_features=9)
        given[f"r{index}"] = [*range(offset), *[7] * 9, *[index] * (index % 4)]
        request = make_request(
            f"r{index}",
            given[f"r{index}"],
            max_tokens=1 + index % 13,
            arrival=index,
            tenant=f"t{index % 5}",
        )
        stack.scheduler.add(replace(request, images=(image,)))
    plan, ends = stack.scheduler.schedule, []

    def schedule() -> Batch:
        batch = plan()
        assert sum(item.num_new_tokens for item in batch.scheduled) <= 12
        for item in batch.scheduled:
            sequence = stack.scheduler._running_set.running[item.seq_id]
            (image,) = sequence.request.images
            ends.append(sequence.num_computed_tokens - image.offset)
        return batch

    stack.scheduler.schedule = schedule  # type: ignore[method-assign]
    stack.run()
    assert not set(ends) & set(range(1, 9))
    assert ends.count(0) > 0
    assert stack.scheduler.counters.num_preemptions > 0
    for index in range(24):
        tokens = expected_output(given[f"r{index}"], 1 + index % 13)
        assert stack.tokens(f"r{index}") == tokens


def test_an_idle_core_plans_nothing() -> None:
    stack = Stack()
    assert stack.core.step() == []
    assert stack.scheduler.schedule() == Batch(step=0, scheduled=())
