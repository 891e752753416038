"""Drafts change no token: the same requests with and without them, in every way that a step can go.

The drafts are taken from what a request predicts, here its own output with some tokens changed, and
from the text itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.engine import (
    LLM,
    ConfigError,
    InvalidRequestError,
    SamplingParams,
    structured_outputs,
)
from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request
from penstock.engine.sampling.grammars import StepMasks
from penstock.engine.startup import build_core
from penstock.kernels.cpu.isa import ISA_VARIABLE, usable_isas

NUM_PROMPTS, MAX_TOKENS = 20, 14  # two for each of FEATURES
NGRAM = {"method": "ngram"}
AUTO = {"method": "auto"}
NONE = {"method": "none"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["red", "green"]},
        "age": {"type": "integer"},
    },
    "required": ["name", "kind", "age"],
}
# What changes a draw, or asks for several; each prompt has one of them.
FEATURES: list[dict[str, Any]] = [
    {"logit_bias": {20: 4.0, 30: -9.0}},
    {"top_n_sigma": 1.0},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"n": 3},
    {"structured_outputs": structured_outputs(json_schema=PERSON)},
    {"structured_outputs": structured_outputs(regex=r"[a-z]{2,5}( [a-z]{1,4}){1,3}"), "n": 2},
    {
        "structured_outputs": structured_outputs(choice=["yes", "no, thanks", "no, never"]),
        "min_tokens": 3,
        "presence_penalty": 0.5,
    },
    {"min_tokens": 7, "stop_token_ids": tuple(range(0, 1000, 3)), "ignore_eos": False},
    {
        "allowed_token_ids": tuple(range(300, 312)),
        "bad_words_token_ids": ((305,), *((token_id, 300) for token_id in range(300, 306))),
    },
]
Outputs = dict[tuple[str, int], tuple[list[int], list[Any], list[Any]]]


def core_with(
    dtype: Any = "bfloat16",
    *,
    num_blocks: int = 2000,
    block_size: int = 16,
    model: ModelConfig | None = None,
    **scheduler: Any,
) -> EngineCore:
    model = replace(model or ModelConfig(), dtype=dtype, max_model_len=256)
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, num_host_blocks=200)
    scheduler = {"speculative_config": NONE} | scheduler
    config = EngineConfig(model=model, cache=cache, scheduler=SchedulerConfig(**scheduler))
    core, _ = build_core(config)
    return core


def requests(
    predictions: Mapping[str, tuple[int, ...]] | None = None,
    *,
    features: Sequence[dict[str, Any]] = ({},),
    **params: Any,
) -> list[Request]:
    """Each prompt greedy and seeded; prompts of very different lengths."""
    rng = random.Random(3)
    found = []
    for number in range(NUM_PROMPTS):
        prompt = tuple(rng.randrange(300, 1000) for _ in range(rng.choice([5, 40, 110])))
        for temperature in (0.0, 1.0):
            name = f"{number} at {temperature}"
            chosen = {"max_tokens": MAX_TOKENS, "seed": number, "ignore_eos": True} | params
            chosen |= features[number % len(features)]
            found.append(
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(temperature=temperature, **chosen),
                    prediction_token_ids=(predictions or {}).get(name, ()),
                )
            )
    return found


def run(core: EngineCore, asked: Sequence[Request], *, at_once: bool = True) -> Outputs:
    """The tokens, log-probabilities and ends of each request's samples."""
    found: Outputs = {}
    counters, num_drafts, num_right = core.scheduler.drafting.counters, 0, 0
    before = (counters.num_draft_tokens, counters.num_accepted_tokens)
    groups = [asked] if at_once else [[request] for request in asked]
    for group in groups:
        for request in group:
            core.add(request)
        while core.wait():
            for output in core.step():
                if output.notice is not None:
                    continue
                num_drafts += output.num_draft_tokens
                num_right += output.num_accepted_tokens
                key = output.request_id, output.index
                tokens, logprobs, ends = found.setdefault(key, ([], [], []))
                tokens += output.token_ids
                logprobs += output.logprobs
                ends += [output.finish_reason] if output.finish_reason else []
            core.scheduler.blocks.check_integrity()
    if all(map(core.scheduler.drafting.are_told, asked)):
        assert before[0] + num_drafts == counters.num_draft_tokens
        assert before[1] + num_right == counters.num_accepted_tokens
    else:
        assert num_drafts == num_right == 0
    return found


def changed(outputs: Outputs) -> dict[str, tuple[int, ...]]:
    """The outputs with some tokens changed, left out or put in."""
    rng = random.Random(4)
    found = {}
    for (name, _), (tokens, *_) in sorted(outputs.items(), reverse=True):
        prediction = list(tokens)
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(prediction) + 1)
            prediction[place : place + rng.randrange(2)] = [5] * rng.randrange(2)
        found[name] = tuple(prediction)  # at last the first sample's
    return found


@pytest.mark.parametrize(
    ("dtype", "features"),
    [("bfloat16", FEATURES), pytest.param("float32", [{}], marks=pytest.mark.exhaustive)],
    ids=["changed", "plain"],
)
def test_tokens_are_the_same(dtype: str, features: list[dict[str, Any]]):
    """Alone, together, in chunks, preempted by swap and by recomputation, with little memory."""
    plain = core_with(dtype, max_num_seqs=32)
    expected = run(plain, requests(features=features, logprobs=2))
    predictions = changed(expected)
    plain.close()
    scarce = {"num_blocks": 80, "block_size": 4}
    for kind, settings in {
        "alone": {},
        "together": {"max_num_seqs": 32},
        "drafts for all": {"max_num_seqs": 32},
        "chunked": {"max_num_batched_tokens": 64},
        "swapped": {**scarce, "preemption": "swap"},
        "recomputed": {**scarce, "preemption": "recompute"},
        "in flight": {"max_steps_in_flight": 2},
        "by themselves": {"max_num_seqs": 32, "speculative_config": AUTO},
    }.items():
        core = core_with(dtype, **{"speculative_config": NGRAM, **settings})
        if kind not in ("alone", "together"):  # a draft has a row whatever the others do
            core.scheduler.drafting.num_verify_rows = 100
        asked = requests(predictions, features=features, logprobs=2)
        found = run(core, asked, at_once=kind != "alone")
        wrong = [key for key, value in expected.items() if found[key] != value]
        assert not wrong, (kind, wrong)
        assert found.keys() == expected.keys()
        counters = core.scheduler.drafting.counters
        if kind in ("alone", "drafts for all"):
            num_tokens = sum(len(tokens) for tokens, *_ in found.values())
            assert counters.num_accepted_tokens > 0.2 * num_tokens, kind
            assert counters.num_accepted_tokens < counters.num_draft_tokens  # some were wrong
        assert sum(counters.accepted_by_position) == counters.num_accepted_tokens
        if kind in ("swapped", "recomputed"):
            assert core.scheduler.counters.num_preemptions > 0
        core.close()


# Rows that take about the time of one: of dense weights, and by int8 ones of bytes and exact.
VERIFY_ROWS = {"amx": (8, 8, 8), "avx512": (8, 8, 8), "avx2": (6, 8, 4), "portable": (2, 2, 2)}


@pytest.mark.parametrize("isa", usable_isas())
def test_drafts_fit_the_rows_that_a_kernel_computes_at_once(isa: str, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, isa)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"quantization": "int8"},
        {"quantization": "int8", "quantize_activations": False},
    )
    for kind, most in zip(kinds, VERIFY_ROWS[isa], strict=True):
        core = core_with("float32", model=ModelConfig(**kind), speculative_config=NGRAM)
        assert core.scheduler.drafting.num_verify_rows == most, kind
        prompt = (*range(300, 320),) * 3
        for number in range(2):
            params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={320: 100.0})
            core.add(
                Request(request_id=f"{number}", prompt_token_ids=prompt, sampling_params=params)
            )
        sizes = []
        while core.has_work():
            sizes.append(sum(1 + output.num_draft_tokens for output in core.step()))
        assert max(sizes) == most, kind
        core.close()


def test_ends_and_limits_are_the_same():
    """EOS and stop tokens among right drafts, and `max_tokens` inside them."""
    plain, drafted = core_with(), core_with(speculative_config=NGRAM)
    everything = run(plain, requests())
    predictions = {name: tuple(tokens) for (name, _), (tokens, *_) in everything.items()}
    stops = tuple({tokens[7] for tokens, *_ in everything.values()})
    for params in (
        {"stop_token_ids": stops, "ignore_eos": False},
        {"stop_token_ids": stops, "min_tokens": 10},
        {"max_tokens": 9},
    ):
        expected = run(plain, requests(**params))
        assert run(drafted, requests(predictions, **params), at_once=False) == expected, params
    assert drafted.scheduler.drafting.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("most", [1, 2])
def test_a_step_has_at_most_so_many_drafts(most: int):
    """From the first on."""
    core = core_with(speculative_config={"num_speculative_tokens": most})
    (expected, *_) = run(core, requests()[:1]).values()
    (request, *_) = requests()
    core.add(msgspec.structs.replace(request, prediction_token_ids=tuple(expected[0])))
    sizes, got = [], []
    while core.wait():
        for output in core.step():
            sizes.append(len(output.token_ids))
            got += output.token_ids
    assert got == expected[0]
    assert sizes[:2] == [1, most + 1]
    assert max(sizes) == most + 1
    assert len(core.scheduler.drafting.counters.accepted_by_position) == most


@pytest.mark.parametrize("most", [2, 7])
def test_what_a_grammar_forces_is_drafted(most: int):
    """Without a prediction, and where no text repeats itself: the names of properties."""
    names = ["the quick brown fox", "jumps over"]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [1, 2, 3]} for name in names},
        "required": names,
    }
    grammar = structured_outputs(json_schema=schema)
    asked = requests(structured_outputs=grammar, max_tokens=60)[::8]
    plain = core_with()
    drafted = core_with(speculative_config={"num_speculative_tokens": most})
    expected = run(plain, asked, at_once=False)
    assert run(drafted, asked, at_once=False) == expected
    counters = drafted.scheduler.drafting.counters
    assert counters.num_accepted_tokens > 0.5 * sum(len(tokens) for tokens, *_ in expected.values())
    # The grammar allows no other spelling of them.
    assert counters.num_accepted_tokens > 0.9 * counters.num_draft_tokens
    assert len(counters.accepted_by_position) == most
    num_saved = plain.scheduler.counters.num_steps - drafted.scheduler.counters.num_steps
    assert num_saved == counters.num_accepted_tokens


def test_what_a_grammar_forces_is_asked_for_where_there_is_room(monkeypatch):
    """Not in a step that has as many sequences as rows."""
    asked = requests(structured_outputs=structured_outputs(regex="[ab]{14}"))[:3]
    core, expected = core_with(speculative_config=AUTO), run(core_with(), asked)
    sizes, forced = [], StepMasks.forced
    monkeypatch.setattr(StepMasks, "forced", lambda self: sizes.append(len(self)) or forced(self))
    core.scheduler.drafting.num_verify_rows = 3
    assert run(core, asked) == expected
    assert not sizes
    assert run(core, asked[:2]).items() <= expected.items()
    assert 8 <= len(sizes) <= MAX_TOKENS - 3  # less often where nothing is forced


def test_an_answer_is_drafted_from_its_siblings():
    """Regenerated, to an edited question, for another tenant or salt, and once it is dropped."""
    core, plain = core_with(speculative_config=NGRAM), core_with()
    (request, *_) = [each for each in requests() if len(each.prompt_token_ids) == 40]
    prompt = request.prompt_token_ids
    edited = (*prompt[:30], *prompt[-5:])

    def num_right(name: str, **settings: Any) -> int:
        """Of the drafts of a request's answer, which is that of an engine without drafts."""
        counters = core.scheduler.drafting.counters
        before = counters.num_accepted_tokens
        asked = msgspec.structs.replace(request, request_id=name, **settings)
        assert run(core, [asked]) == run(plain, [asked])
        return counters.num_accepted_tokens - before

    alone = num_right("first")
    assert num_right("again") > MAX_TOKENS / 2 > alone
    for name, settings in {
        "another tenant": {"tenant": "b"},
        "another salt": {"cache_salt": "b"},
    }.items():
        assert num_right(name, **settings) == alone
        assert num_right(f"{name} again", **settings) > MAX_TOKENS / 2
    core.drop_prefix(prompt)
    assert num_right("dropped") == alone
    num_right("edited", prompt_token_ids=edited)
    assert num_right("edited again", prompt_token_ids=edited) > MAX_TOKENS / 2


def test_drafts_by_themselves_start_on_evidence():
    """A copied answer is drafted once its first tokens were those of the answer before; where
    nothing repeats, nothing is."""
    core, plain = core_with(speculative_config=None), core_with()
    core.scheduler.drafting.num_verify_rows = 8
    asked = requests(max_tokens=40)[1:4:2]
    expected = run(plain, asked, at_once=False)
    num_steps, counters = plain.scheduler.counters.num_steps, core.scheduler.drafting.counters
    assert run(core, asked, at_once=False) == expected
    assert core.scheduler.counters.num_steps > 0.95 * num_steps  # random tokens
    before = core.scheduler.counters.num_steps
    num_right, num_drafts = counters.num_accepted_tokens, counters.num_draft_tokens
    assert run(core, asked, at_once=False) == expected
    # Nine tokens one by one, four in a step, then eight; and as it is alone, up to sixteen in each.
    assert core.scheduler.counters.num_steps - before <= len(asked) * (9 + 1 + 1 + 19 // 16 + 1)
    assert len(counters.accepted_by_position) == 15
    before = counters.accepted_by_position[7]
    assert run(core, asked) == expected
    assert counters.accepted_by_position[7] == before  # beside another, eight rows for both
    num_right = counters.num_accepted_tokens - num_right
    assert num_right > 0.9 * (counters.num_draft_tokens - num_drafts)


def test_drafts_by_themselves_change_nothing_but_the_time():
    """Neither tokens nor ends, in all ways that a token can be drawn; nor does anybody hear of
    them, and each log-probability comes alone."""
    asked = requests(features=FEATURES, max_tokens=24)[1::2]
    expected = run(core_with(max_num_seqs=32), asked)
    core = core_with(speculative_config=None, max_num_seqs=32)
    drafting = core.scheduler.drafting
    drafting.num_verify_rows = 200
    for num_least in (0, sum(len(tokens) for tokens, *_ in expected.values()) // 4):
        before = drafting.counters.num_accepted_tokens
        assert run(core, asked) == expected
        num_right = drafting.counters.num_accepted_tokens - before
        assert num_right >= num_least  # the second time each answer is a copy
    before = drafting.counters.num_drafts
    run(core, requests(max_tokens=30, logprobs=0)[:2])
    assert drafting.counters.num_drafts == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [None, AUTO], ids=["as it is", "auto"])
def test_drafts_by_themselves_only_where_they_cannot_lose(config: dict[str, str] | None):
    """Not where a result may depend on the batch: here, in torch."""
    torch_model = ModelConfig(model_impl="transformers")
    for model, are_there in ((None, True), (torch_model, False)):
        core = core_with(model=model, speculative_config=config)
        run(core, requests(allowed_token_ids=(300,), max_tokens=30)[:1])
        assert (core.scheduler.drafting.counters.num_drafts > 0) is are_there
        core.close()


def test_a_prediction_needs_no_setting():
    plain = core_with()
    (request, *_) = requests()
    ((key, expected),) = run(plain, [request]).items()
    request = msgspec.structs.replace(request, prediction_token_ids=tuple(expected[0]))
    num_steps = plain.scheduler.counters.num_steps
    assert run(plain, [request]) == {key: expected}
    assert plain.scheduler.counters.num_steps - num_steps < MAX_TOKENS / 3


def test_an_offline_prediction():
    """By a text for each prompt; the parameters can turn drafts off."""
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    messages = [{"role": "user", "content": "Tell me a story."}]
    with LLM(max_model_len=1024, speculative_config=NONE) as llm:

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
            assert (num_steps() - before < 40) is is_on  # of 48 or more
            assert [each.outputs for each in told] == [each.outputs for each in plain]
            before = num_steps()
            [again] = llm.chat(messages, params, prediction=spoken.outputs[0].text, use_tqdm=False)
            assert (num_steps() - before < 40) is is_on  # of 48 or more
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
    asked = requests()[:2]
    expected = run(core, asked)
    told = [
        msgspec.structs.replace(
            request,
            prediction_token_ids=tuple(expected[request.request_id, 0][0]),
            sampling_params=msgspec.structs.replace(request.sampling_params, speculation=is_on),
        )
        for request, is_on in zip(asked, (True, False), strict=True)
    ]
    before = core.scheduler.drafting.counters.num_accepted_tokens
    assert run(core, told[1:]).items() <= expected.items()
    assert core.scheduler.drafting.counters.num_accepted_tokens == before
    assert run(core, told) == expected
    assert core.scheduler.drafting.counters.num_accepted_tokens > before + MAX_TOKENS / 2


def test_text_that_repeats_itself():
    """From a text through `LLM`: fewer steps, the same answer."""
    answers, num_steps = [], []
    for config in (NONE, NGRAM):
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
        ("{", "--speculative-config must be a JSON object, not '{'"),
        ("[1]", "must be a JSON object"),
        (
            {"method": "magic"},
            "method must be one of auto, ngram, draft_model, eagle3, none, not 'magic'",
        ),
        (
            {"num_speculative_tokens": 0},
            "num_speculative_tokens must be a whole number from 1 to 31",
        ),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number"),
        ({"draft": 1}, "has no key 'draft'"),
        ({"method": "auto", "prompt_lookup_min": 2}, "the method auto has no prompt_lookup_min"),
        ({"method": "none", "model": "demo"}, "the method none has no model"),
        ({"prompt_lookup_max": 17}, "prompt_lookup_max must be a whole number from 1 to 16"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min must be at most prompt_lookup_max \(3\), not 4",
        ),
    ],
)
def test_wrong_settings_are_refused(value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(speculative_config=value)


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ({}, (3, 3)),
        ({"prompt_lookup_max": 5}, (5, 5)),  # as in vLLM
        ({"prompt_lookup_min": 2, "prompt_lookup_max": None}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_the_tokens_that_are_looked_up(value: dict[str, Any], sizes: tuple[int, int]):
    config = SchedulerConfig(speculative_config=value).speculation
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == sizes


def test_a_continuation_goes_on_alike():
    """As after the death of an engine: the output so far comes with the request, and the rest is
    what it would have been, with or without drafts; log-probabilities too."""
    single = [each for each in FEATURES if each.get("n", 1) == 1]
    asked = requests(features=single, logprobs=2)
    expected = run(core_with(), asked)
    begun = []
    for number, request in enumerate(asked):
        tokens = tuple(expected[request.request_id, 0][0])
        before = tokens[: min(1 + number % 12, len(tokens) - 1)]
        begun.append(
            msgspec.structs.replace(request, output_token_ids=before, prediction_token_ids=tokens)
        )
    plain = [msgspec.structs.replace(each, prediction_token_ids=()) for each in begun]
    drafted = core_with(max_num_seqs=4, speculative_config=NGRAM)
    for core, given in ((core_with(), plain), (drafted, begun)):
        found = run(core, given)
        for request in given:
            key, num_before = (request.request_id, 0), len(request.output_token_ids)
            tokens, logprobs, ends = expected[key]
            assert found[key] == (tokens[num_before:], logprobs[num_before:], ends), key
    assert drafted.scheduler.drafting.counters.num_accepted_tokens > 0
