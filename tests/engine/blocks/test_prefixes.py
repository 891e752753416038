"""Equal tokens are computed once and kept once: full blocks are shared, the last one is copied."""

from __future__ import annotations

import pytest

from penstock.engine.config import SchedulerConfig
from penstock.engine.request import FinishReason, Retention
from tests.engine.scheduling.fake_device import expected_output
from tests.engine.scheduling.stack import Stack, prompts


def cached_stack(**settings: object) -> Stack:
    arguments: dict[str, object] = {
        "num_blocks": 200,
        "block_size": 16,
        "enable_prefix_caching": True,
        "max_model_len": 2048,
        "config": SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=4096),
    } | settings
    return Stack(**arguments)  # type: ignore[arg-type]


SYSTEM = [number % 50 for number in range(1000)]


def test_ten_requests_of_one_step_share_their_system_prompt() -> None:
    """1,000 + 16 tokens of prompt and 16 of answer, ten times, submitted together."""
    stack = cached_stack(num_blocks=1000, config=SchedulerConfig(max_num_batched_tokens=20_000))
    peak = 0
    for user in range(10):
        stack.add(f"u{user}", [*SYSTEM, *[user] * 16], max_tokens=16)
    while stack.core.has_work():
        stack.step()
        peak = max(peak, stack.blocks.tiers.device.num_held)
    unshared = 10 * -(-1032 // 16)
    print(f"{peak} blocks, {peak / unshared:.1%} of {unshared} unshared")
    assert peak <= 0.15 * unshared
    assert len(stack.device.batches[0].scheduled) == 10, "all were computed in one step"
    for user in range(10):
        assert stack.tokens(f"u{user}") == expected_output([*SYSTEM, *[user] * 16], 16)


def test_a_later_turn_computes_only_its_new_tokens() -> None:
    stack = cached_stack()
    history: list[int] = list(range(37))
    for turn in range(4):
        prompt = [*history, *[40 + turn] * 9]
        before = stack.device.num_computed
        stack.add(f"t{turn}", prompt, max_tokens=10)
        stack.run()
        num_new = stack.device.num_computed - before
        # 9 new tokens, 9 of the answer (its last is never computed) and, from the second turn
        # on, the last one of the answer before.
        assert num_new == (37 + 9 + 9 if turn == 0 else 1 + 9 + 9)
        assert stack.num_cached(f"t{turn}") == (0 if turn == 0 else len(history) - 1)
        history = [*prompt, *stack.tokens(f"t{turn}")]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_an_equal_prompt_computes_one_token(length: int) -> None:
    stack = cached_stack()
    prompt = SYSTEM[:length]
    stack.add("first", prompt, max_tokens=3)
    stack.run()
    stack.add("second", prompt, max_tokens=3)
    before = stack.device.num_computed
    stack.step()
    assert stack.device.num_computed - before == 1
    stack.run()
    assert stack.tokens("second") == stack.tokens("first") == expected_output(prompt, 3)
    assert stack.num_cached("second") == length - 1


def test_a_block_is_findable_while_its_owner_runs() -> None:
    stack = cached_stack()
    stack.add("first", SYSTEM[:40], max_tokens=100)
    stack.step()
    stack.add("second", SYSTEM[:40], max_tokens=2)
    stack.step()
    # The two full blocks, and a copy of the third, which an earlier step filled in part and its
    # owner goes on filling.
    assert stack.num_cached("second") == 39
    stack.run()
    assert stack.tokens("first") == expected_output(SYSTEM[:40], 100)


def test_what_the_same_step_computes_is_shared_but_not_copied() -> None:
    stack = cached_stack()
    for name in ("first", "second"):
        stack.add(name, SYSTEM[:40], max_tokens=2)
    stack.run()
    assert stack.num_cached("second") == 32
    assert stack.blocks.counters.num_copied == 0


def test_salts_and_lengths_keep_requests_apart() -> None:
    stack = cached_stack()
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "")):
        stack.add(name, SYSTEM[:33], max_tokens=1, cache_salt=salt)
        stack.run()
    assert [stack.num_cached(name) for name in "abcd"] == [0, 0, 32, 32]
    bound = cached_stack(kv_depends_on_prompt_len=True)
    for name, length in (("a", 33), ("b", 40), ("c", 40)):
        bound.add(name, SYSTEM[:length], max_tokens=1)
        bound.run()
    assert [bound.num_cached(name) for name in "abc"] == [0, 0, 39]


def test_off_means_off() -> None:
    stack = cached_stack(enable_prefix_caching=False)
    for name in ("a", "b"):
        stack.add(name, SYSTEM[:40], max_tokens=2)
        stack.run()
        assert stack.num_cached(name) == 0
    assert stack.blocks.tiers.device.num_cached == 0
    assert stack.blocks.counters.prefix_queries == 0


def test_prompt_logprobs_bypass_hits_and_come_once() -> None:
    stack = cached_stack(config=SchedulerConfig(max_num_batched_tokens=7))
    stack.add("plain", SYSTEM[:40], max_tokens=2)
    stack.run()
    before = stack.device.num_computed
    stack.add("scored", SYSTEM[:40], max_tokens=0, prompt_logprobs=3)
    stack.run()
    assert stack.device.num_computed - before == 40
    assert [-entry.logprob for entry in stack.prompt_logprobs("scored")] == list(range(1, 40))
    assert stack.num_cached("scored") == 0


def test_evicted_prefixes_come_back_from_the_host() -> None:
    stack = cached_stack(num_blocks=8, num_host_blocks=40, max_model_len=100)
    first, *others = prompts(5, seed=3, longest=90)
    first = (first * 90)[:90]
    for number, prompt in enumerate([first, *[(p * 90)[:90] for p in others]]):
        stack.add(f"r{number}", prompt, max_tokens=2)
        stack.run()
    assert stack.blocks.tiers.device.num_evictions > 0
    before = stack.device.num_computed
    stack.add("again", first, max_tokens=2)
    stack.run()
    assert stack.device.num_computed - before == 2
    assert stack.num_cached("again") == 89
    assert stack.blocks.counters.prefix_host_hits == 89
    assert stack.tokens("again") == expected_output(first, 2)


def test_a_failed_sequence_leaves_nothing_to_find() -> None:
    stack = cached_stack()
    stack.add("bad", SYSTEM[:40], max_tokens=5)
    stack.device.failing = {0: FinishReason.ERROR}
    stack.step()
    stack.add("good", SYSTEM[:40], max_tokens=1)
    stack.run()
    assert stack.num_cached("good") == 0


def test_a_warmed_prefix_is_found_and_a_dropped_one_is_not() -> None:
    stack = cached_stack()
    stack.add("warm", SYSTEM[:70], max_tokens=0)
    stack.run()
    assert stack.tokens("warm") == []
    stack.add("other", [*SYSTEM[:40], *[3] * 20], max_tokens=1)
    stack.run()
    assert stack.num_cached("other") == 40
    # What "other" also begins with stays; the two blocks and the tail after it go.
    assert stack.core.drop_prefix(SYSTEM[:70]) == 3
    stack.blocks.check_integrity()
    stack.add("after", SYSTEM[:70], max_tokens=1)
    stack.run()
    assert stack.num_cached("after") == 40
    assert stack.core.drop_prefix([49] * 40) == 0


def test_what_somebody_uses_is_not_dropped() -> None:
    stack = cached_stack()
    stack.add("user", SYSTEM[:64], max_tokens=20)
    stack.step()
    assert stack.core.drop_prefix(SYSTEM[:64]) == 0
    stack.run()
    assert stack.tokens("user") == expected_output(SYSTEM[:64], 20)


def test_retention_decides_who_is_evicted() -> None:
    """Nine of ten blocks cached by three prompts; a fourth needs three: whose go?"""

    def survivors(*retentions: Retention | None, wait_s: float = 0.0) -> list[int]:
        stack = cached_stack(num_blocks=10, max_model_len=60)
        kept = [[name] * 48 for name in (1, 2, 3)]
        for number, (prompt, retention) in enumerate(zip(kept, retentions, strict=True)):
            stack.add(f"k{number}", prompt, max_tokens=0, retention=retention)
            stack.run()
        stack.clock.now_s += wait_s
        stack.add("new", [9] * 58, max_tokens=0)
        stack.run()
        found = []
        for number, prompt in enumerate(kept):
            table_hits = stack.blocks.counters.prefix_hits
            stack.add(f"again{number}", prompt[:17], max_tokens=0)
            stack.run()
            found.append(stack.blocks.counters.prefix_hits - table_hits)
        return [number for number, hits in enumerate(found) if hits == 16]

    long, short = Retention(duration_s=100.0), Retention(duration_s=10.0)
    dear = Retention(duration_s=100.0, priority=5)
    assert survivors(None, None, None) == [1, 2]  # least recently used
    assert survivors(long, None, None) == [0, 2]  # wanted
    assert survivors(long, long, short, wait_s=50.0) == [0, 1]  # expired goes first
    assert survivors(dear, long, long) == [0, 2]  # of the wanted, lowest priority, then oldest
    assert survivors(long, long, long) == [1, 2]  # never pinned
