"""Drafts change no token: the same requests with and without them, in every way that a step can go.

The drafts are taken from what a request predicts, here its own output with some tokens changed, and
from the text itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.engine import LLM, ConfigError, InvalidRequestError, SamplingParams
from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request
from penstock.engine.startup import build_core

NUM_PROMPTS, MAX_TOKENS = 32, 40
NGRAM = {"method": "ngram"}


def core_with(
    dtype: Any = "bfloat16",
    *,
    num_blocks: int = 2000,
    model: ModelConfig | None = None,
    **scheduler: Any,
) -> EngineCore:
    model = replace(model or ModelConfig(), dtype=dtype, max_model_len=1024)
    cache = CacheConfig(num_blocks=num_blocks, num_host_blocks=200)
    config = EngineConfig(model=model, cache=cache, scheduler=SchedulerConfig(**scheduler))
    core, _ = build_core(config)
    return core


def requests(predictions: Sequence[tuple[int, ...]] = (), **params: Any) -> list[Request]:
    """Greedy and seeded, over prompts of very different lengths."""
    rng = random.Random(3)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(
                rng.randrange(300, 1000) for _ in range(rng.choice([5, 90, 300]))
            ),
            sampling_params=SamplingParams(
                **{"max_tokens": MAX_TOKENS, "seed": number, "temperature": float(number % 2)}
                | params
            ),
            prediction_token_ids=predictions[number] if predictions else (),
        )
        for number in range(NUM_PROMPTS)
    ]


def run(
    core: EngineCore, asked: Sequence[Request], *, at_once: bool = True
) -> list[tuple[Any, ...]]:
    """The tokens, log-probabilities and ends of each request."""
    found: dict[str, tuple[list[int], list[Any], list[Any]]] = {}
    groups = [asked] if at_once else [[request] for request in asked]
    for group in groups:
        for request in group:
            core.add(request)
        while core.has_work():
            for output in core.step():
                tokens, logprobs, ends = found.setdefault(output.request_id, ([], [], []))
                tokens += output.token_ids
                logprobs += output.logprobs
                ends += [output.finish_reason] if output.finish_reason else []
            core.scheduler.blocks.check_integrity()
    return [found[request.request_id] for request in asked]


def changed(outputs: Sequence[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    """The outputs with some tokens changed, left out or put in."""
    rng = random.Random(4)
    found = []
    for tokens, *_ in outputs:
        prediction = list(tokens)
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(prediction) + 1)
            prediction[place : place + rng.randrange(2)] = [5] * rng.randrange(2)
        found.append(tuple(prediction))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_the_same(dtype: str):
    """Alone, together, in chunks, preempted by swap and by recomputation, with little memory."""
    plain = core_with(dtype)
    expected = run(plain, requests(logprobs=2, ignore_eos=True))
    predictions = changed(expected)
    plain.close()
    for kind, settings in {
        "alone": {},
        "together": {},
        "chunked": {"max_num_batched_tokens": 64},
        "swapped": {"num_blocks": 80, "preemption": "swap"},
        "recomputed": {"num_blocks": 80, "preemption": "recompute"},
        "in flight": {"max_steps_in_flight": 2},
    }.items():
        core = core_with(dtype, speculative_config=NGRAM, **settings)
        asked = requests(predictions, logprobs=2, ignore_eos=True)
        assert run(core, asked, at_once=kind != "alone") == expected, kind
        counters = core.scheduler.drafting.counters
        if kind == "alone":
            assert counters.num_accepted_tokens > 0.5 * NUM_PROMPTS * MAX_TOKENS
            assert counters.num_accepted_tokens < counters.num_draft_tokens  # some were wrong
        assert sum(counters.accepted_by_position) == counters.num_accepted_tokens
        if kind in ("swapped", "recomputed"):
            assert core.scheduler.counters.num_swaps + core.scheduler.counters.num_recomputes > 0
        core.close()


def test_ends_and_limits_are_the_same():
    """EOS and stop tokens among right drafts, `min_tokens`, and `max_tokens` inside them."""
    plain, drafting = core_with(), core_with(speculative_config=NGRAM)
    everything = run(plain, requests(ignore_eos=True))
    stops = tuple({tokens[7] for tokens, *_ in everything})
    for params in (
        {"stop_token_ids": stops},
        {"stop_token_ids": stops, "min_tokens": 12},
        {"max_tokens": 9, "ignore_eos": True},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"logit_bias": {20: 5.0}, "presence_penalty": 0.5},
    ):
        expected = run(plain, requests(**params))
        asked = requests([tokens for tokens, *_ in everything], **params)
        assert run(drafting, asked, at_once=False) == expected, params
    assert drafting.scheduler.drafting.counters.num_accepted_tokens > 0


def test_a_prediction_needs_no_setting():
    plain = core_with()
    (expected, *_) = run(plain, requests(ignore_eos=True))
    (request, *_) = requests([tuple(expected[0])] * NUM_PROMPTS, ignore_eos=True)
    num_steps = plain.scheduler.counters.num_steps
    assert run(plain, [request]) == [expected]
    assert plain.scheduler.counters.num_steps - num_steps < MAX_TOKENS / 4


def test_an_offline_prediction():
    """By a text for each prompt; the parameters can turn drafts off."""
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    messages = [{"role": "user", "content": "Tell me a story."}]
    with LLM(max_model_len=1024) as llm:

        def num_steps() -> int:
            return llm._core.scheduler.counters.num_steps

        prompts = ["Once there was a", "Long ago, in"]
        plain = llm.generate(prompts, greedy, use_tqdm=False)
        texts = [each.outputs[0].text for each in plain]
        [spoken] = llm.chat(messages, greedy, use_tqdm=False)
        for params, is_on in (
            (greedy, True),
            (msgspec.structs.replace(greedy, speculation=False), False),
        ):
            before = num_steps()
            told = llm.generate(prompts, params, prediction=texts, use_tqdm=False)
            assert (num_steps() - before < 24) is is_on
            assert [each.outputs for each in told] == [each.outputs for each in plain]
            before = num_steps()
            [again] = llm.chat(messages, params, prediction=spoken.outputs[0].text, use_tqdm=False)
            assert (num_steps() - before < 24) is is_on
            assert again.outputs == spoken.outputs
        long = llm.generate(prompts, greedy, prediction="story " * 5000, use_tqdm=False)
        assert [each.outputs for each in long] == [each.outputs for each in plain]
        for wrong, message in (
            (["a"], "1 predictions for 2 prompts"),
            (7, "prediction must be a text or a list of texts"),
            ([b"a", "b"], "prediction must be a text or a list of texts"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.generate(prompts, greedy, prediction=wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_speculation_is_off_for_one_request():
    """Beside one that has drafts, with `--speculative-config`."""
    core = core_with(speculative_config=NGRAM)
    asked = requests(ignore_eos=True)[:2]
    expected = run(core, asked)
    told = [
        msgspec.structs.replace(
            request,
            prediction_token_ids=tuple(tokens),
            sampling_params=msgspec.structs.replace(request.sampling_params, speculation=is_on),
        )
        for request, (tokens, *_), is_on in zip(asked, expected, (True, False), strict=True)
    ]
    before = core.scheduler.drafting.counters.num_accepted_tokens
    assert run(core, told[1:]) == expected[1:]
    assert core.scheduler.drafting.counters.num_accepted_tokens == before
    assert run(core, told) == expected
    assert core.scheduler.drafting.counters.num_accepted_tokens > before + MAX_TOKENS / 2


def test_text_that_repeats_itself():
    """From a text through `LLM`: fewer steps, the same answer."""
    answers, num_steps = [], []
    for config in (None, NGRAM):
        with LLM(max_model_len=1024, speculative_config=config) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
            answers.append(
                llm.generate("one two " * 20, params, use_tqdm=False)[0].outputs[0].token_ids
            )
            num_steps.append(llm._core.scheduler.counters.num_steps)
    assert answers[0] == answers[1]
    assert num_steps[1] < num_steps[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ({"method": "magic"}, "method must be ngram or draft_model, not 'magic'"),
        (
            {"num_speculative_tokens": 0},
            "num_speculative_tokens must be a whole number from 1 to 31",
        ),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number"),
        ({"draft": 1}, "has no key 'draft'"),
    ],
)
def test_wrong_settings_are_refused(value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(speculative_config=value)


def test_a_continuation_goes_on_alike():
    """As after the death of an engine: the output so far comes with the request."""
    plain, drafting = core_with(), core_with(speculative_config=NGRAM)
    expected = run(plain, requests(ignore_eos=True))
    asked = [
        msgspec.structs.replace(
            request,
            output_token_ids=tuple(tokens[: 1 + number]),
            prediction_token_ids=tuple(tokens),
        )
        for number, (request, (tokens, *_)) in enumerate(
            zip(requests(ignore_eos=True), expected, strict=True)
        )
    ]
    for number, (tokens, *_) in enumerate(run(drafting, asked)):
        assert tokens == expected[number][0][1 + number :]
    assert drafting.scheduler.drafting.counters.num_accepted_tokens > 0
