"""Outputs that run into a loop end there, and others do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engine import LLM
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import (
    MAX_PATTERN_SIZE,
    BeamSearch,
    FinishReason,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)

from .fake_device import expected_output
from .stack import Stack

_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ends_with_a_pattern(output: list[int], asked: RepetitionDetection) -> bool:
    """By the definition: the end is some tokens, `min_count` times."""
    for size in range(asked.min_pattern_size, asked.max_pattern_size + 1):
        num = size * asked.min_count
        if num <= len(output) and output[-num:] == output[-size:] * asked.min_count:
            return True
    return False


@given(
    prompt=_TOKENS, output=_TOKENS, smallest=st.integers(1, 5), more=st.integers(0, 12),
    count=st.integers(2, 5),
)  # fmt: skip
@example(prompt=[1, 1, 1], output=[1], smallest=1, more=0, count=2)  # a prompt's are not counted
@example(prompt=[0], output=[1, 2, 1, 2, 1, 2], smallest=2, more=0, count=3)
def test_it_finds_what_the_definition_says(
    prompt: list[int], output: list[int], smallest: int, more: int, count: int
) -> None:
    asked = RepetitionDetection(
        min_pattern_size=smallest, max_pattern_size=smallest + more, min_count=count
    )
    found = asked.is_found([*prompt, *output], len(output))
    assert found == ends_with_a_pattern(output, asked)


@pytest.mark.parametrize(
    "values",
    [
        {"max_pattern_size": 0},
        {"max_pattern_size": MAX_PATTERN_SIZE + 1},
        {"max_pattern_size": 4, "min_pattern_size": 5},
        {"max_pattern_size": 4, "min_pattern_size": 0},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": "4"},
    ],
)
def test_what_has_no_meaning_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError):
        RepetitionDetection(**{"min_count": 2, **values})


def test_a_beam_search_has_no_loops() -> None:
    asked = RepetitionDetection(max_pattern_size=4, min_count=2)
    with pytest.raises(InvalidRequestError, match="repetition_detection") as caught:
        SamplingParams(
            max_tokens=4, temperature=0.0, beam_search=BeamSearch(width=2),
            repetition_detection=asked,
        )  # fmt: skip
    assert caught.value.param == "repetition_detection"


@pytest.mark.parametrize("min_tokens", [0, 30])
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_each_sample_ends_where_its_own_loop_is_found(
    steps_in_flight: int, min_tokens: int
) -> None:
    """The fake device draws from 50 tokens: two of the same come one after the other by chance."""
    asked = RepetitionDetection(max_pattern_size=3, min_count=2)
    stack = Stack(
        config=SchedulerConfig(max_num_seqs=8, max_steps_in_flight=steps_in_flight), num_blocks=256
    )
    prompt, most = [1, 2, 3], 60
    stack.add("a", prompt, max_tokens=most, n=8, min_tokens=min_tokens, repetition_detection=asked)
    stack.run()
    reasons = []
    for index in range(8):
        whole = expected_output(prompt, most, index)
        loops = [
            num
            for num in range(max(min_tokens, 1), most + 1)
            if ends_with_a_pattern(whole[:num], asked)
        ]
        assert stack.tokens("a", index) == whole[: min([*loops, most])]
        last = stack.outputs["a", index][-1]
        reasons.append(last.finish_reason)
        assert (last.finish_reason is FinishReason.REPETITION) == bool(loops)
        assert last.stop_token_id is None
    assert set(reasons) == {FinishReason.REPETITION, FinishReason.LENGTH}


# -- as the page asks ------------------------------------------------------------------------------

_SETTINGS = Path(__file__).parents[3] / "clients/browser/settings.js"
_TOPICS = (
    "rain", "the moon", "bread", "a bicycle", "penstock", "music", "sleep", "a cache", "a garden",
    "LLM serving",
)  # fmt: skip
_FORMS = (
    "Explain {} to a child.", "Write a short story about {}.", "What is {}?", "List facts on {}.",
    "Write a poem about {}.", "Tell me a joke about {}.", "Write a dialogue about {}.",
    "Describe {} in detail.", "Make a table about {}.", "Ask me five questions about {}.",
)  # fmt: skip
_MOST_TOKENS = 256  # until a loop ends: the longest pattern, as often as it must be there


@pytest.fixture(scope="module")
def page() -> RepetitionDetection:
    [line] = re.findall(r"const LOOPS = \{(.*)\}", _SETTINGS.read_text())
    return RepetitionDetection(
        **{name: int(num) for name, num in re.findall(r"(\w+): (\d+)", line)}
    )


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(max_model_len=1024) as llm:
        yield llm


@pytest.mark.exhaustive
def test_ordinary_answers_have_no_loop(demo: LLM, page: RepetitionDetection) -> None:
    asks = [form.format(topic) for topic in _TOPICS for form in _FORMS]
    answers = demo.chat(
        [[{"role": "user", "content": ask}] for ask in asks],
        [SamplingParams(temperature=0.2, top_p=0.9, seed=seed, max_tokens=_MOST_TOKENS,
                        repetition_detection=page) for seed in range(len(asks))],
        use_tqdm=False,
    )  # fmt: skip
    assert "repetition" not in {answer.outputs[0].stop_reason for answer in answers}


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_words", [8, 11, 16])
def test_a_planted_loop_ends_soon(demo: LLM, page: RepetitionDetection, num_words: int) -> None:
    """A grammar has the model say the same words for ever."""
    words = "the fox sat by the mill and saw how much rain fell on that old"
    text = " ".join(words.split()[:num_words])
    loop = StructuredOutputs("regex", f"Once upon a time, (and {text}, )*")
    params = SamplingParams(
        temperature=0, max_tokens=900, structured_outputs=loop, repetition_detection=page
    )
    [answer] = demo.generate("x", params, use_tqdm=False)
    [output] = answer.outputs
    begin = len(demo.tokenizer.encode("Once upon a time, ", add_special_tokens=False))
    assert (output.finish_reason, output.stop_reason) == ("stop", "repetition")
    assert len(output.token_ids) <= begin + _MOST_TOKENS
