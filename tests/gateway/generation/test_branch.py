"""What an output is does not depend on how its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.chat_formats import (
    OutputFormat,
    OutputReader,
    OutputSyntax,
    Piece,
    Tool,
    items_of,
)
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.request import FinishReason, RequestOutput, SamplingParams
from penstock.engine.text import OutputText, Tokenizer
from penstock.gateway.generation.branch import Branch

CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>\nHm < m, it says.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
TOKENIZER = Tokenizer.from_directory(DEMO_MODEL_PATH)
IDS = tuple(TOKENIZER.encode(TEXT))


def outcome(cuts: Sequence[int], *, begins: bool, stop: str, max_calls: int | None) -> Any:
    """Of `IDS`, which arrive cut at these places."""
    output_format = OutputFormat(
        syntax=OutputSyntax("hermes", "qwen3", begins), tools=(Tool("clock"),), max_calls=max_calls
    )
    params = SamplingParams(max_tokens=len(IDS), stop=(stop,) if stop else ())
    branch = Branch(0, OutputText(TOKENIZER, params), params, OutputReader(output_format))
    pieces: list[Piece] = []
    edges = [0, *sorted(cuts), len(IDS)]
    for start, end in pairwise(edges):
        reason = FinishReason.LENGTH if end == len(IDS) else None
        output = RequestOutput(request_id="r", token_ids=IDS[start:end], finish_reason=reason)
        delta = branch.add(output)
        assert delta.finish_reason is branch.finish_reason
        pieces += delta.parts
        if branch.finish_reason is not None:
            break
    counted = (branch.num_reasoning_tokens, len(branch.token_ids))
    return items_of(pieces), counted, branch.finish_reason


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("stop", ["", "it", "see"])
@pytest.mark.parametrize("max_calls", [None, 1])
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, len(IDS)), unique=True))
def test_tokens_may_arrive_in_any_groups(
    cuts: list[int], begins: bool, stop: str, max_calls: int | None
) -> None:
    case: dict[str, Any] = {"begins": begins, "stop": stop, "max_calls": max_calls}
    singly = outcome(range(1, len(IDS)), **case)
    assert outcome(cuts, **case) == singly
    assert singly[1][0] > 0, "there are thoughts"
