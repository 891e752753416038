"""Samples and beams are forks of one block table: shared until written."""

from __future__ import annotations

import pytest

from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import BeamSearch, FinishReason, num_blocks_needed

from .fake_device import expected_output
from .stack import Stack, make_request
from .test_histories import beams_alone


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 23])
def test_samples_share_the_prompt_and_differ(
    length: int, steps_in_flight: int, is_caching: bool
) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_steps_in_flight=steps_in_flight)
    stack = Stack(config=config, enable_prefix_caching=is_caching)
    prompt = list(range(length))
    stack.add("a", prompt, max_tokens=9, n=4)
    stack.run()
    outputs = [stack.tokens("a", index) for index in range(4)]
    assert outputs == [expected_output(prompt, 9, index) for index in range(4)]
    assert len(set(map(tuple, outputs))) == 4
    # The prompt once, its last token again for each further sample's own draw.
    assert stack.device.num_computed == length + 3 + 4 * 8
    assert list(stack.ended) == ["a"]


def test_blocks_are_copied_only_where_they_are_written() -> None:
    stack = Stack(block_size=16, num_blocks=64)
    stack.add("a", list(range(40)), max_tokens=8, n=4)
    stack.step()
    stack.step()  # the prompt in chunks of 16
    stack.step()
    assert stack.blocks.tiers.device.num_held == 3
    assert stack.blocks.counters.num_copied == 0
    stack.step()  # all four write into the third block: three copies of it, none of the others
    assert stack.blocks.tiers.device.num_held == 3 + 3
    assert stack.blocks.counters.num_copied == 3
    stack.run()
    assert stack.blocks.counters.num_copied == 3


def test_a_prompt_that_ends_with_a_block_needs_no_copy() -> None:
    stack = Stack(block_size=16, num_blocks=64, config=SchedulerConfig())
    stack.add("a", list(range(33)), max_tokens=4, n=3)  # the last token begins a block
    stack.run()
    assert stack.blocks.counters.num_copied == 0


def test_one_sample_is_aborted_alone() -> None:
    stack = Stack()
    stack.add("a", [1, 2, 3], max_tokens=10, n=3)
    stack.step()
    stack.step()
    used = stack.blocks.tiers.device.num_held
    stack.core.abort("a", index=1)
    stack.blocks.check_integrity()
    assert stack.blocks.tiers.device.num_held < used
    stack.run()
    assert stack.tokens("a", 2) == expected_output([1, 2, 3], 10, 2)
    assert stack.reason("a", 1) is None
    assert not stack.scheduler.has_request("a")


def test_the_first_sample_may_end_with_its_first_token() -> None:
    prompt = [5, 6, 7]
    eos = expected_output(prompt, 1, 0)[0]
    stack = Stack(eos_token_ids=(eos,))
    stack.add("a", prompt, max_tokens=6, n=3)
    stack.run()
    assert stack.tokens("a", 0) == [eos]
    assert stack.reason("a", 0) is FinishReason.STOP
    for index in (1, 2):
        whole = expected_output(prompt, 6, index)
        end = whole.index(eos) + 1 if eos in whole else 6
        assert stack.tokens("a", index) == whole[:end]


def test_samples_wait_until_all_have_a_place() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=4))
    stack.add("busy", [1], max_tokens=6)
    stack.add("four", [2, 3], max_tokens=3, n=4)
    stack.step()
    assert stack.scheduler.num_running == 1
    stack.run()
    assert max(len(batch.scheduled) for batch in stack.device.batches) == 4
    assert stack.tokens("four", 3) == expected_output([2, 3], 3, 3)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_are_what_the_search_alone_finds(
    early_stopping: bool, is_caching: bool, steps_in_flight: int
) -> None:
    search = BeamSearch(width=4, early_stopping=early_stopping)  # type: ignore[arg-type]
    prompt = list(range(9))
    request = make_request(
        "a", prompt, n=3, temperature=0.0, max_tokens=12, beam_search=search,
        stop_token_ids=(3, 11, 20),
    )  # fmt: skip
    config = SchedulerConfig(max_num_seqs=4, max_steps_in_flight=steps_in_flight)
    stack = Stack(config=config, enable_prefix_caching=is_caching)
    stack.core.add(request)
    stack.run()
    expected = beams_alone(request)
    assert len(expected) == 3
    for rank, hypothesis in enumerate(expected):
        (output,) = stack.outputs["a", rank]
        assert output.token_ids == hypothesis.token_ids
        assert (output.score, output.stop_token_id) == (
            hypothesis.score,
            hypothesis.stop_token_id,
        )
    assert stack.blocks.counters.num_copied > 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    stack = Stack(num_blocks=20, block_size=4, config=SchedulerConfig(max_num_seqs=8))
    cases = [
        ({"n": 9, "max_tokens": 1}, "9 sequences at once are more than the 8"),
        ({"n": 8, "max_tokens": 60}, "8 sequences of 8 prompt and up to 56 output tokens may need"),
        (
            {"n": 4, "max_tokens": 40, "temperature": 0.0, "beam_search": BeamSearch(width=4)},
            "need 48 KV blocks of 4 tokens, and there are 20",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(InvalidRequestError, match=message) as refused:
            stack.add("a", [1] * 8, **settings)
        assert refused.value.param == "n"
    assert stack.scheduler.counters.num_refused == len(cases)
    stack.add("b", [1] * 8, n=8, max_tokens=5)
    stack.run()


def test_the_longest_need_counts_shared_blocks_once() -> None:
    params = make_request("a", [1], n=4, max_tokens=9).sampling_params
    # 40 + 8 tokens written: three blocks each, of which two are full of prompt.
    assert num_blocks_needed(params, 40, 16) == 2 + 4 * 1
    alone = make_request("a", [1], max_tokens=9).sampling_params
    assert num_blocks_needed(alone, 40, 16) == 3


def test_a_shared_block_its_owner_filled_is_left_to_those_who_look_for_it() -> None:
    """The first sample fills the block it shares and ends; the second must not write over it."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1)  # one after the other
    stack = Stack(enable_prefix_caching=True, config=config)
    prompt = [1, 2, 3]
    stack.add("a", prompt, max_tokens=2, n=2)
    stack.run()
    again = [*prompt, stack.tokens("a", 0)[0], 9]
    stack.add("b", again, max_tokens=2)
    stack.run()
    assert stack.tokens("b") == expected_output(again, 2)


@pytest.mark.parametrize("index", [0, 1])
def test_a_sample_can_be_aborted_before_it_has_parted(index: int) -> None:
    stack = Stack()
    stack.add("a", list(range(40)), max_tokens=5, n=3)
    stack.step()  # inside the prompt
    stack.core.abort("a", index=index)
    assert stack.scheduler.has_request("a")
    stack.run()
    assert stack.tokens("a", index) == []
    for other in {0, 1, 2} - {index}:
        assert stack.tokens("a", other) == expected_output(list(range(40)), 5, other)
    stack.add("b", list(range(40)), max_tokens=5, n=2)
    for each in (0, 1):
        stack.core.abort("b", index=each)
    assert not stack.scheduler.has_request("b")
    stack.run()


def test_a_search_that_can_find_nothing_fails() -> None:
    stack = Stack()
    everything = tuple(range(50))  # every token would end it, and none may yet
    stack.add(
        "a", [1, 2, 3], max_tokens=5, min_tokens=2, temperature=0.0,
        stop_token_ids=everything, beam_search=BeamSearch(width=2),
    )  # fmt: skip
    stack.run()
    assert stack.reason("a") is FinishReason.ERROR
    assert "a" in stack.ended


@pytest.mark.parametrize("kind", ["one", "samples", "beams"])
def test_forks_do_not_stand_behind_long_prompts(kind: str) -> None:
    stack = Stack(
        num_blocks=4000,
        block_size=16,
        max_model_len=4096,
        config=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=64),
    )
    params: dict[str, object] = {"max_tokens": 20}
    if kind == "samples":
        params["n"] = 4
    if kind == "beams":
        params |= {"temperature": 0.0, "beam_search": BeamSearch(width=4, early_stopping="never")}
    stack.add("short", [1, 2, 3], **params)
    for number in range(10):
        stack.add(f"long{number}", [number] * 1000, max_tokens=1, arrival=1.0 + number)
    for _ in range(22):
        stack.step()
    assert "short" in stack.ended


def test_min_tokens_beyond_the_room_do_not_trouble_samples() -> None:
    stack = Stack()
    stack.add("a", [1] * 60, max_tokens=30, min_tokens=10, n=2)
    stack.run()
    assert len(stack.tokens("a", 1)) == 4


@pytest.mark.parametrize("is_swapping", [True, False])
def test_cached_tokens_are_what_the_request_found_when_it_came(is_swapping: bool) -> None:
    stack = Stack(
        num_blocks=14,
        block_size=4,
        max_model_len=56,
        num_host_blocks=50 * is_swapping,
        enable_prefix_caching=True,
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    stack.add("b", [49] * 9, max_tokens=30)
    stack.step()
    stack.add("a", list(range(37)), max_tokens=3, n=3, arrival=1.0)  # nothing of it is cached
    stack.run()
    assert stack.scheduler.counters.num_preemptions > 0
    assert stack.num_cached("a") == 0
    assert stack.blocks.counters.prefix_queries == 9 + 37
