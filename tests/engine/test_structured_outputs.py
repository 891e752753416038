"""Outputs with grammars through the whole engine: whatever happens to a sequence on its way.

Greedy outputs and beams are those of `transformers` with the same tokens allowed at every step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from penstock.engine import LLM, BeamSearch, InvalidRequestError, SamplingParams
from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import FinishReason, Request, RequestOutput, StructuredOutputs
from penstock.engine.startup import build_core
from penstock.engine.structured_outputs import compiler
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.forms import structured_outputs

from .lettered import EOS, lettered, text_of

WORDS = StructuredOutputs("regex", r"[a-z]{1,6}(-[a-z0-9]{1,6}){2,4}")
PATTERN = re.compile(WORDS.text)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lettered(tiny_checkpoint(), tmp_path_factory.mktemp("lettered") / "model")


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(max_model_len=512, num_blocks=160) as llm:
        yield llm


def build(path: Path, **scheduler: Any) -> EngineCore:
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32"),
            cache=CacheConfig(num_blocks=scheduler.pop("num_blocks", 400), block_size=8),
            scheduler=SchedulerConfig(**scheduler),
        )
    )
    return core


def params_of(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "structured_outputs": WORDS} | params)


def run(core: EngineCore, *requests: Request) -> dict[tuple[str, int], RequestOutput]:
    """Each branch's tokens, and the end of its last output."""
    found: dict[tuple[str, int], RequestOutput] = {}
    for request in requests:
        core.add(request)
    while core.wait():
        for output in core.step():
            known = found.setdefault((output.request_id, output.index), output)
            if known is not output:
                known.token_ids += output.token_ids
                known.finish_reason = output.finish_reason
                known.is_last = output.is_last
        core.scheduler.blocks.check_integrity()
    return found


def ask(name: str = "r", prompt: list[int] | None = None, **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt or PROMPT),
        sampling_params=params_of(**params),
    )


@pytest.mark.parametrize("search", [None, BeamSearch(width=1), BeamSearch(width=4)])
def test_tokens_equal_transformers(path: Path, reference: Any, search: BeamSearch | None) -> None:
    core = build(path)
    model = reference(path)
    grammars = GrammarCompiler(path, vocab_size=160, eos_token_ids=(EOS,))
    bits = torch.empty(5, dtype=torch.int32)

    def allowed(_: int, token_ids: torch.Tensor) -> list[int]:
        matcher: LLMatcher = grammars.matcher(WORDS)
        assert matcher.consume_tokens(token_ids[len(PROMPT) :].tolist())
        matcher.unsafe_compute_mask_ptr(bits.data_ptr(), 20)
        flags = bits[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        return [int(each) for each in flags.flatten().nonzero()]

    width = 1 if search is None else search.width
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=40,
        eos_token_id=EOS,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )[:, len(PROMPT) :].tolist()
    found = run(core, ask(temperature=0.0, beam_search=search, n=width, max_tokens=40))
    for index in range(width):
        token_ids = list(found["r", index].token_ids)
        assert token_ids == expected[index][: len(token_ids)]
        assert set(expected[index][len(token_ids) :]) <= {EOS}  # up to the longest of all
        assert PATTERN.fullmatch(text_of(token_ids))


@pytest.mark.parametrize(
    "params", [{}, {"min_tokens": 30}, {"ignore_eos": True}, {"max_tokens": 2}]
)
def test_beams_end_where_their_grammar_does(path: Path, params: dict[str, Any]) -> None:
    """Also where there are fewer outputs than beams, and where they must not end yet."""
    core = build(path)
    choice = structured_outputs(choice=["ab", "cd", "efgh"])
    search = BeamSearch(width=5)
    found = run(
        core,
        ask(
            temperature=0.0,
            beam_search=search,
            n=5,
            structured_outputs=choice,
            prompt_logprobs=1,
            **params,
        ),
    )
    texts = [text_of([each for each in found["r", n].token_ids if each != EOS]) for n in range(5)]
    reasons = [found["r", n].finish_reason for n in range(5)]
    assert all(output.is_last == (index == 4) for (_, index), output in found.items())
    if params.get("max_tokens") == 2:
        assert set(texts[:3]) == {"ab", "cd", "ef"}
        assert set(reasons[:3]) == {FinishReason.LENGTH}
    else:
        assert set(texts[:3]) == {"ab", "cd", "efgh"}
        assert reasons[:3] == [FinishReason.STOP] * 3
    assert reasons[3:] == [FinishReason.GRAMMAR] * 2


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.3, "seed": 5, "top_p": 0.9, "n": 3},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.2, "logit_bias": {60: 5.0}},
    {"temperature": 1.0, "seed": 7, "min_tokens": 12, "top_n_sigma": 1.0},
    {"temperature": 0.0, "beam_search": BeamSearch(width=3), "n": 2},
    {"temperature": 1.0, "seed": 8, "structured_outputs": None, "ignore_eos": True},
)


def requests() -> list[Request]:
    return [
        ask(f"r{number}", [30 + number, *PROMPT[number:]], **KINDS[number % len(KINDS)])
        for number in range(2 * len(KINDS))
    ]


def test_outputs_depend_on_nothing_but_their_request(path: Path) -> None:
    """Alone, in a batch, swapped out, computed again, and with steps of few tokens."""
    core = build(path)
    expected = {key: output for each in requests() for key, output in run(core, each).items()}
    for (name, _), output in expected.items():
        if KINDS[int(name[1:]) % len(KINDS)].get("structured_outputs", WORDS):
            text = text_of(list(output.token_ids))
            assert output.finish_reason is FinishReason.STOP
            assert PATTERN.fullmatch(text), text
    for settings in (
        {},
        {"max_num_batched_tokens": 24},
        {"num_blocks": 40, "preemption": "swap"},
        {"num_blocks": 40, "preemption": "recompute", "max_steps_in_flight": 2},
    ):
        core = build(path, **settings)
        found = run(core, *requests())
        assert found.keys() == expected.keys()
        for key, output in found.items():
            assert output.token_ids == expected[key].token_ids, (settings, key)
        assert (core.scheduler.counters.num_preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("kind", KINDS[:2], ids=["greedy", "sampled"])
def test_an_output_goes_on_from_any_of_its_tokens(path: Path, kind: dict[str, Any]) -> None:
    check_it_goes_on(build(path), ask(**kind))


def check_it_goes_on(core: EngineCore, request: Request) -> None:
    """From each token of its output the rest is what it was."""
    whole = run(core, request)[request.request_id, 0].token_ids
    for num_known in range(1, len(whole)):
        rest = Request(
            request_id="rest",
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            output_token_ids=whole[:num_known],
        )
        assert run(core, rest)["rest", 0].token_ids == whole[num_known:]


def test_a_grammar_of_everything_changes_no_token(demo: LLM) -> None:
    prompts = [f"Tell me a story about {number}." for number in range(16)]
    for temperature in (0.0, 1.0):
        plain = SamplingParams(temperature=temperature, max_tokens=48, seed=3)
        free = SamplingParams(
            temperature=temperature,
            max_tokens=48,
            seed=3,
            structured_outputs=StructuredOutputs("lark", "start: <[*]>*"),
        )
        texts = [
            [result.outputs[0].text for result in demo.generate(prompts, each, use_tqdm=False)]
            for each in (plain, free)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"structured_outputs": StructuredOutputs("regex", "[a-z]{5}")}, "stop"),
        (
            {"structured_outputs": StructuredOutputs("regex", "[a-z]{5}"), "ignore_eos": True},
            "stop",
        ),
        ({"structured_outputs": StructuredOutputs("regex", "[a-z]{5}"), "min_tokens": 9}, "stop"),
        (
            {"structured_outputs": StructuredOutputs("regex", ""), "ignore_eos": True, "n": 3},
            "stop",
        ),
        ({"structured_outputs": StructuredOutputs("regex", "[a-z]{99}")}, "length"),
        (  # nothing may follow but a stop token, which may not come yet
            {
                "structured_outputs": StructuredOutputs("regex", "[a-z]0{9}"),
                "stop_token_ids": tuple(range(160)),
                "min_tokens": 5,
            },
            "grammar",
        ),
        # No token has these letters.
        ({"structured_outputs": StructuredOutputs("regex", "[a-z]{5}ü")}, "grammar"),
        ({"structured_outputs": StructuredOutputs("regex", "ü"), "n": 2}, "grammar"),
    ],
)
def test_why_outputs_end(path: Path, params: dict[str, Any], reason: str) -> None:
    core = build(path)
    found = run(core, ask(temperature=0.7, seed=1, **params), ask("neighbour", seed=2))
    ends = {output.finish_reason for (name, _), output in found.items() if name == "r"}
    assert ends == {FinishReason(reason)}
    assert sum(output.is_last for (name, _), output in found.items() if name == "r") == 1
    assert len(found) == params.get("n", 1) + 1
    assert found["neighbour", 0].token_ids == run(core, ask(seed=2))["r", 0].token_ids


def test_what_others_had_of_a_grammar_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matchers share a lexer, whose states are limited: here, to few more than one needs."""
    limits = {**compiler._STEP_LIMITS, "max_lexer_states": 120}
    monkeypatch.setattr(compiler, "_STEP_LIMITS", limits)
    grammar = StructuredOutputs("regex", "[ab]*a[ab]{18}")
    fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 25, "structured_outputs": grammar}
    alone = [run(build(path), ask(seed=seed, **fields))["r", 0] for seed in range(12)]
    together = build(path)
    for seed in range(12):
        found = run(together, ask(seed=seed, **fields))["r", 0]
        assert found.token_ids == alone[seed].token_ids
        assert found.finish_reason is not FinishReason.GRAMMAR


def test_json_of_the_demo_model(demo: LLM) -> None:
    for kind in (*KINDS[:3], KINDS[5]):
        params = SamplingParams(
            **{
                **kind,
                "max_tokens": 200,
                "structured_outputs": structured_outputs(json_schema=PERSON),
                "logprobs": None if "beam_search" in kind else 2,
            }
        )
        for result in demo.generate(["Who are you?", "JSON: "], params, use_tqdm=False):
            for output in result.outputs:
                assert output.finish_reason == "stop"
                person = json.loads(output.text)
                assert isinstance(person["age"], int)
                assert len(person["name"]) <= 12
                for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=False):
                    assert entry[token_id].logprob <= max(each.logprob for each in entry.values())


def test_an_invalid_grammar_is_refused_before_anything_runs(demo: LLM) -> None:
    num_steps = demo._core.scheduler.counters.num_steps
    for wrong, path in (
        (StructuredOutputs("regex", "("), ""),
        (StructuredOutputs("lark", "start: nothing"), ""),
        (StructuredOutputs("json_schema", '{"type": "nothing"}'), ".type"),
    ):
        params = [SamplingParams(), SamplingParams(structured_outputs=wrong)]
        with pytest.raises(InvalidRequestError) as refusal:
            demo.generate(["a", "b"], params, use_tqdm=False)
        assert refusal.value.param == f"structured_outputs{path}"
        assert demo._core.scheduler.counters.num_steps == num_steps
