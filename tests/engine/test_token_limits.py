"""`allowed_token_ids` and `bad_words` through the whole engine: whatever happens to a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import LLM, BeamSearch, InvalidRequestError, SamplingParams
from penstock.engine.request import FinishReason, Request, StructuredOutputs
from penstock.engine.text import Tokenizer
from penstock.engine.text.bad_words import bad_words_token_ids

from .lettered import EOS, lettered, text_of
from .test_structured_outputs import PROMPT, ask, build, run

ALLOWED = (*range(60, 90), EOS)
BAD = ((61,), *((first, second) for first in range(60, 90) for second in range(62, 90, 3)))
LISTS: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": ALLOWED},
    {"bad_words_token_ids": BAD},
    {"allowed_token_ids": ALLOWED, "bad_words_token_ids": (*BAD, (63, 64, 66))},
)


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lettered(tiny_checkpoint(), tmp_path_factory.mktemp("lettered") / "model")


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_blocks=80) as llm:
        yield llm


def limited(name: str = "r", **params: Any) -> Request:
    return ask(name, **{"structured_outputs": None} | params)


def allowed_after(output: list[int], params: dict[str, Any], vocab_size: int = 160) -> set[int]:
    """By the definitions alone."""
    left = set(params.get("allowed_token_ids", range(vocab_size)))
    for *before, last in params.get("bad_words_token_ids", ()):
        if output[len(output) - len(before) :] == before:
            left.discard(last)
    return left


def check(token_ids: tuple[int, ...], params: dict[str, Any]) -> None:
    for at, token_id in enumerate(token_ids):
        assert token_id in allowed_after(list(token_ids[:at]), params), (at, token_ids)


@pytest.mark.parametrize("search", [None, BeamSearch(width=1), BeamSearch(width=4)])
@pytest.mark.parametrize("lists", LISTS)
def test_tokens_equal_transformers(
    path: Path, reference: Any, search: BeamSearch | None, lists: dict[str, Any]
) -> None:
    width = 1 if search is None else search.width
    expected = (
        reference(path)
        .generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=24,
            eos_token_id=EOS,
            pad_token_id=0,
            prefix_allowed_tokens_fn=lambda _, token_ids: sorted(
                allowed_after(token_ids[len(PROMPT) :].tolist(), lists)
            ),
        )[:, len(PROMPT) :]
        .tolist()
    )
    found = run(
        build(path), limited(temperature=0.0, beam_search=search, n=width, max_tokens=24, **lists)
    )
    for index in range(width):
        token_ids = found["r", index].token_ids
        assert list(token_ids) == expected[index][: len(token_ids)]
        check(token_ids, lists)


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, **LISTS[0]},
    {"temperature": 1.0, "seed": 1, "n": 3, **LISTS[1]},
    {"temperature": 1.2, "seed": 2, "min_tokens": 20, "repetition_penalty": 1.3, **LISTS[2]},
    {"temperature": 0.0, "beam_search": BeamSearch(width=3), "n": 3, **LISTS[2]},
    {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 3, **LISTS[0]},
    {"temperature": 1.0, "seed": 4, "ignore_eos": True},
)


def requests() -> list[Request]:
    return [
        limited(f"r{number}", prompt=[30 + number, *PROMPT[number:]], **KINDS[number % len(KINDS)])
        for number in range(2 * len(KINDS))
    ]


@pytest.mark.exhaustive
def test_outputs_depend_on_nothing_but_their_request(path: Path) -> None:
    """Alone, in a batch, swapped out, computed again, and with steps of few tokens."""
    core = build(path)
    expected = {key: output for each in requests() for key, output in run(core, each).items()}
    for (name, _), output in expected.items():
        check(output.token_ids, KINDS[int(name[1:]) % len(KINDS)])
    for settings in (
        {},
        {"max_num_batched_tokens": 24},
        {"num_blocks": 40, "preemption": "swap"},
        {"num_blocks": 40, "preemption": "recompute"},
    ):
        found = run(build(path, **settings), *requests())
        assert {key: output.token_ids for key, output in found.items()} == {
            key: output.token_ids for key, output in expected.items()
        }


@pytest.mark.parametrize("kind", [KINDS[0], {**KINDS[1], "n": 1}], ids=["greedy", "sampled"])
def test_an_output_goes_on_from_any_of_its_tokens(path: Path, kind: dict[str, Any]) -> None:
    core = build(path)
    whole = run(core, limited(**{**kind, "max_tokens": 12}))["r", 0].token_ids
    for num_known in range(1, len(whole)):
        request = limited(**{**kind, "max_tokens": 12})
        rest = Request(
            request_id="rest",
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            output_token_ids=whole[:num_known],
        )
        assert run(core, rest)["rest", 0].token_ids == whole[num_known:]


LETTERS = StructuredOutputs("regex", "[a-f]{5}")


@pytest.mark.parametrize(
    ("params", "reason", "num_tokens"),
    [
        ({"allowed_token_ids": (70, 71)}, "length", 60),  # no end token is allowed
        ({"allowed_token_ids": (70, EOS), "min_tokens": 60}, "length", 60),
        ({"allowed_token_ids": (70,), "stop_token_ids": (70,)}, "stop", 1),
        ({"allowed_token_ids": (70,), "bad_words_token_ids": ((70, 70),)}, "stop", 1),
        ({"structured_outputs": LETTERS, "bad_words_token_ids": ((EOS,),)}, "stop", None),
        ({"structured_outputs": LETTERS, "allowed_token_ids": (5,)}, "grammar", 0),
    ],
)
def test_why_outputs_end(
    path: Path, params: dict[str, Any], reason: str, num_tokens: int | None
) -> None:
    core = build(path)
    found = run(core, limited(temperature=0.7, seed=1, **params), ask("neighbour", seed=2))
    output = found["r", 0]
    assert output.finish_reason is FinishReason(reason)
    assert num_tokens is None or len(output.token_ids) == num_tokens
    if "structured_outputs" in params and num_tokens is None:
        assert len(text_of(list(output.token_ids))) == 5
    assert found["neighbour", 0].token_ids == run(core, ask(seed=2))["r", 0].token_ids


def test_words_are_never_generated(demo: LLM) -> None:
    prompts = ["Tell me a story.", "Who are you?"]
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    texts = [each.outputs[0].text for each in demo.generate(prompts, plain, use_tqdm=False)]
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})[:6]
    assert words
    bad = SamplingParams(temperature=0.0, max_tokens=40, bad_words=tuple(words))
    for result in demo.generate(prompts, bad, use_tqdm=False):
        output = list(result.outputs[0].token_ids)
        for token_ids in bad_words_token_ids(demo.tokenizer, words):
            ends = range(len(token_ids), len(output) + 1)
            assert all(tuple(output[end - len(token_ids) : end]) != token_ids for end in ends)
    assert [each.outputs[0].text for each in demo.generate(prompts, bad, use_tqdm=False)] != texts


def test_the_tokens_of_words(demo: LLM) -> None:
    tokenizer: Tokenizer = demo.tokenizer
    found = bad_words_token_ids(tokenizer, [" the", "the", "and"])
    assert [tokenizer.decode(each) for each in found] == ["the", " the", "and", " and"]
    assert [len(each) for each in found] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (1, 1024)}, "allowed_token_ids"),
        ({"allowed_token_ids": (4,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_lists_that_leave_nothing_are_refused(
    demo: LLM, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        demo.generate(["a"], SamplingParams(**params), use_tqdm=False)
    assert refusal.value.param == param
