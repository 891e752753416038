"""The name of a finished sequence's KV."""

from __future__ import annotations

from penstock.engine.request import RequestOutput
from tests.engine.scheduling.stack import Stack

_PROMPT = [1, 2, 3, 4, 5]


def _last(stack: Stack, request_id: str) -> RequestOutput:
    return stack.outputs[request_id, 0][-1]


def test_it_names_the_last_full_block_of_the_chain() -> None:
    stack = Stack(enable_prefix_caching=True, block_size=4)
    stack.add("a", _PROMPT, max_tokens=5)
    stack.run()
    outputs = stack.outputs["a", 0]
    assert all(output.prefix_id is None for output in outputs[:-1])
    # Ten tokens, of which the last has no KV: two full blocks.
    known = {block.key: block.tokens for block in stack.blocks.tiers.cache}
    whole = [*_PROMPT, *stack.tokens("a")]
    prefix_id = outputs[-1].prefix_id
    assert prefix_id is not None
    assert list(memoryview(known[prefix_id]).cast("I")) == whole[4:8]


def test_equal_chains_have_equal_names_and_others_have_not() -> None:
    names = []
    for prompt, salt in ((_PROMPT, ""), (_PROMPT, ""), ([9, *_PROMPT[1:]], ""), (_PROMPT, "salt")):
        stack = Stack(enable_prefix_caching=True, block_size=4)
        stack.add("a", prompt, max_tokens=5, cache_salt=salt)
        stack.run()
        names.append(_last(stack, "a").prefix_id)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_there_is_none_without_a_full_block_or_without_a_cache() -> None:
    stack = Stack(enable_prefix_caching=True, block_size=4)
    stack.add("short", [1, 2], max_tokens=2)
    stack.run()
    assert _last(stack, "short").prefix_id is None
    stack = Stack(enable_prefix_caching=False, block_size=4)
    stack.add("a", _PROMPT, max_tokens=5)
    stack.run()
    assert _last(stack, "a").prefix_id is None
