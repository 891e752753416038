"""`thinking_token_budget` through the whole engine: a thought ends at its budget, to the token, and
the answer follows, whatever happens to the sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine import LLM, BeamSearch, SamplingParams
from penstock.engine.chat_formats import (
    REASONING_FORMATS,
    ModelFormats,
    OfferedTools,
    OutputFormat,
    OutputReader,
    OutputSyntax,
    ReasoningFormat,
    Tool,
    items_of,
    sentence_of,
)
from penstock.engine.request import Request, StructuredOutputs, ThoughtLimit
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.text import Tokenizer

from ..support.tiers import tiered
from .lettered import EOS, lettered, text_of
from .test_structured_outputs import PROMPT, ask, build, check_it_goes_on, run

END = (70, 71, 72)  # of a thought; the first is its mark
BEGIN = 69
LIMIT = ThoughtLimit(
    begins=("<b>",), ends=("<e>",), marks=((BEGIN, "<b>"), (70, "<e>")), end_token_ids=(71, 70, 72)
)
OPEN = ThoughtLimit(
    begins=("<b>",), ends=("<e>",), marks=LIMIT.marks, end_token_ids=(71, 70, 72), is_thinking=True
)
NAME = 60  # of a channel, with the token after it
CHANNELS = ThoughtLimit(
    begins=(f"<b>{text_of([NAME, 61])}<m>",),
    ends=("<e>",),
    marks=((BEGIN, "<b>"), (70, "<e>"), (73, "<m>")),
    end_token_ids=(70, 74),
    recurs=True,
    never=((BEGIN, NAME),),
)
# A thought of any tokens, its end, and then what must match.
GRAMMAR = StructuredOutputs("lark", "start: /[!-~]*/ <[70]> /[!-~]?/ ANSWER\nANSWER: /[0-9]{4}/")


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lettered(tiny_checkpoint(), tmp_path_factory.mktemp("lettered") / "model")


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(max_model_len=512, num_blocks=160) as llm:
        yield llm


def limited(name: str = "r", budget: int = 9, limit: ThoughtLimit = OPEN, **params: Any) -> Request:
    free = {"logit_bias": {70: -100.0, EOS: -100.0}}  # no thought ends by itself
    fields = {"structured_outputs": None, "max_tokens": 24, **free, **params}
    return ask(name, thinking_token_budget=budget, thought_limit=limit, **fields)


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "budget": 5},
    {"temperature": 1.0, "seed": 1, "budget": 0, "n": 3},
    {"temperature": 1.2, "seed": 2, "budget": 9, "n": 3, "repetition_penalty": 1.3},
    {"temperature": 0.0, "budget": 3, "beam_search": BeamSearch(width=3), "logit_bias": {}},
    {"temperature": 1.0, "seed": 3, "budget": 12, "allowed_token_ids": tuple(range(80, 90))},
    {"temperature": 1.0, "seed": 4, "budget": 8, "top_n_sigma": 1.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "budget": -1, "logit_bias": {}},
)


def requests() -> list[Request]:
    return [
        limited(f"r{number}", prompt=[30 + number, *PROMPT[number:]], **KINDS[number % len(KINDS)])
        for number in range(2 * len(KINDS))
    ]


@pytest.mark.exhaustive
def test_a_thought_ends_at_its_budget_whatever_happens(path: Path) -> None:
    """Alone, in a batch, swapped out, computed again, with steps of few tokens, with drafts."""
    core = build(path)
    expected = {key: output for each in requests() for key, output in run(core, each).items()}
    for (name, index), output in expected.items():
        kind = KINDS[int(name[1:]) % len(KINDS)]
        budget = kind["budget"]
        if budget < 0:
            continue
        if "beam_search" not in kind:  # which may end a thought before
            assert output.token_ids[budget : budget + 3] == OPEN.end_token_ids, (name, index)
            assert 70 not in output.token_ids[:budget]
        assert len(output.token_ids) > budget + 3
    for make in (
        build,
        partial(build, max_num_batched_tokens=24),
        partial(build, num_blocks=40, preemption="swap"),
        partial(build, num_blocks=40, preemption="recompute"),
        partial(build, speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    ):
        found = run(make(path), *requests())
        assert {key: output.token_ids for key, output in found.items()} == {
            key: output.token_ids for key, output in expected.items()
        }, make


@pytest.mark.exhaustive
def test_an_output_goes_on_from_any_of_its_tokens(path: Path) -> None:
    """As after the end of an engine or a gateway."""
    check_it_goes_on(build(path), limited(temperature=1.0, seed=1, budget=6, max_tokens=14))


def test_only_thoughts_count(path: Path) -> None:
    """Without a mark at the beginning there is no thought; with one, it is counted from there on;
    one that ended is over."""
    core = build(path)
    plain = limited(temperature=0.0, limit=LIMIT, budget=2)
    unlimited = limited(temperature=0.0, budget=-1)
    assert run(core, plain)["r", 0].token_ids == run(core, unlimited)["r", 0].token_ids
    for known, at in (((BEGIN,), 2), ((BEGIN, 80), 1), ((BEGIN, 80, 81), 0)):
        asked = limited(temperature=0.0, limit=LIMIT, budget=2)
        begun = Request(
            request_id="r",
            prompt_token_ids=asked.prompt_token_ids,
            sampling_params=asked.sampling_params,
            output_token_ids=known,
        )
        token_ids = run(core, begun)["r", 0].token_ids
        assert token_ids[at : at + 3] == LIMIT.end_token_ids
        assert not {*token_ids[at + 3 :]} & {71, 70, 72} or token_ids[at + 3 : at + 6] != (71, 70)
    over = Request(
        request_id="r",
        prompt_token_ids=plain.prompt_token_ids,
        sampling_params=plain.sampling_params,
        output_token_ids=(BEGIN, 70, BEGIN, 80, 81),
    )
    assert run(core, over)["r", 0].token_ids[:3] != LIMIT.end_token_ids


def test_a_channel_for_thoughts_is_not_opened_again(path: Path) -> None:
    """Budgets are of all thoughts of an output (vLLM's #43708: the second one was not limited)."""
    core = build(path)
    likely = {NAME: 60.0, 70: -100.0, EOS: -100.0}
    asked = limited(temperature=0.0, limit=CHANNELS, budget=4, logit_bias=likely)
    opened = (BEGIN, NAME, 61, 73)
    for known, expected in (
        (opened, (*(NAME,) * 4, *CHANNELS.end_token_ids, NAME)),
        ((*opened, NAME, NAME, 70, *opened, NAME), (NAME, *CHANNELS.end_token_ids, NAME)),
        ((*opened, *(NAME,) * 4, *CHANNELS.end_token_ids, *opened), CHANNELS.end_token_ids),
    ):
        begun = Request(
            request_id="r",
            prompt_token_ids=asked.prompt_token_ids,
            sampling_params=asked.sampling_params,
            output_token_ids=known,
        )
        assert run(core, begun)["r", 0].token_ids[: len(expected)] == expected
    begun = msgspec.structs.replace(begun, output_token_ids=(*known[:-4], BEGIN))
    token_ids = run(core, begun)["r", 0].token_ids
    assert token_ids[0] != NAME, "of the channel, after its mark"
    assert token_ids[1] == NAME


@pytest.mark.parametrize("drafts", [None, {"method": "ngram"}])
def test_what_follows_a_forced_end_matches_its_grammar(path: Path, drafts: Any) -> None:
    """vLLM's threads on budgets with schemas: the grammar begins right after the forced end, also
    where drafts cross it (#39573, #44993), and the end is whole (#54467)."""
    core = build(path, speculative_config=drafts)
    for budget, seed in product((0, 1, 6), (1, 2, 3)):
        asked = limited(
            temperature=1.0, seed=seed, budget=budget, structured_outputs=GRAMMAR, logit_bias={}
        )
        token_ids = run(core, asked)["r", 0].token_ids
        end = token_ids.index(70)
        assert end <= budget + 1
        if end == budget + 1:
            assert token_ids[budget : budget + 3] == OPEN.end_token_ids
        answer = text_of(list(token_ids[end + 1 :]))
        assert answer[-4:].isdigit(), answer
        assert len(answer) <= 5


def test_a_grammar_begins_at_its_mark_while_the_same_sequences_go_on(path: Path) -> None:
    """Nothing else ends the run of steps in which only their tokens change."""
    core = build(path)
    free: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}
    plain = run(core, ask(structured_outputs=None, **free))["r", 0].token_ids
    letters = (each for each in plain[6:] if 2 < each < 97)
    mark = next(each for each in letters if each not in plain[:6])
    at = plain.index(mark)
    after = StructuredOutputs(
        "lark", f'start: "{text_of([mark])}" /[0-9]{{5}}/', triggers=(text_of([mark]),)
    )
    token_ids = run(core, ask(structured_outputs=after, **free))["r", 0].token_ids
    assert token_ids[: at + 1] == plain[: at + 1]
    assert text_of(list(token_ids[at + 1 : at + 6])).isdigit()


ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", parameters=ANSWER, strict=True)
PHI = ReasoningFormat(begins=("Here are my reasoning steps:",), end="[BEGIN FINAL RESPONSE]")
FORMATS: dict[str, OutputSyntax] = {
    **{name: OutputSyntax(reasoning=name) for name, each in REASONING_FORMATS.items() if each},
    "openai_gptoss": OutputSyntax("openai"),
    "of a template": OutputSyntax(reasoning=PHI),
    "with calls": OutputSyntax("hermes", "qwen3"),
}
SENTENCE = ("\n\nConsidering the limited time, I have to answer now.\n", "\n\n")
END_OF_TEXT = 4  # of the packaged model
MARK = "<|channel|>analysis<|message|>"


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, none of which is special: this model's are other ones."""
    return [
        token_id
        for part in re.split(r"(?<=<\|)", text)
        for token_id in tokenizer.encode(part, add_special_tokens=False)
    ]


@pytest.mark.parametrize("name", tiered(FORMATS, ["qwen3", "granite", "openai_gptoss"]))
@pytest.mark.parametrize("kind", ["free", "schema"])
def test_every_format_of_thoughts(demo: LLM, name: str, kind: str) -> None:
    """The reader of the format finds a thought of as many tokens as the budget, and what the end
    says; then the answer, which matches its schema."""
    syntax = FORMATS[name]
    formats = ModelFormats(sentence=SENTENCE)
    tools = (WEATHER,) if name == "with calls" else ()
    output_format = OutputFormat(syntax=syntax, tools=tools)
    encode = partial(spelled, demo.tokenizer)
    asked = structured_outputs(json_schema=ANSWER) if kind == "schema" else None
    grammar = OfferedTools(tools=tools, is_parallel=False).grammar(output_format, formats, asked)
    begin = MARK if syntax.tools == "openai" else syntax.thoughts.begins[0]  # type: ignore[union-attr]
    for budget, seed in ((0, 1), (9, 3)):
        params = SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=90 if asked is None else 300,
            logit_bias={END_OF_TEXT: -100.0},
            thinking_token_budget=budget,
            structured_outputs=grammar,
        )
        params = formats.limited(params, syntax, encode)
        limit = params.thought_limit
        assert limit is not None
        prompt = tuple(encode("Who are you? Say it all."))
        known = tuple(encode(begin))
        request = Request(
            request_id="r", prompt_token_ids=prompt, sampling_params=params, output_token_ids=known
        )
        token_ids = run(demo._core, request)["r", 0].token_ids
        end = token_ids[budget : budget + len(limit.end_token_ids)]
        assert end == limit.end_token_ids
        reader = OutputReader(output_format)
        pieces = reader.push(demo.tokenizer.decode(known))
        pieces += reader.push(demo.tokenizer.decode(token_ids[:budget]))
        assert reader.is_reasoning
        pieces += reader.push(demo.tokenizer.decode(token_ids[budget:]))
        assert not reader.is_reasoning
        items = items_of([*pieces, *reader.end(is_cut=False)])
        thought = [item.text for item in items if item.kind == "reasoning"]
        if budget and syntax.tools != "openai":
            assert thought[0].endswith(SENTENCE[0].strip())
        elif not budget:
            assert not thought
        if kind == "schema":
            answers = [json.loads(item.text) for item in items if item.kind != "reasoning"]
            assert answers  # one, or calls of the tool
            assert all(0 <= answer["a"] <= 99 for answer in answers)


def test_the_sentence_that_a_family_has_learnt(demo: LLM, tmp_path: Path) -> None:
    encode = partial(demo.tokenizer.encode, add_special_tokens=False)
    ends: dict[str, list[str]] = {}
    for kind in ("qwen3_moe", "seed_oss", "llama", "[]"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        formats = ModelFormats(
            sentence=sentence_of(tmp_path), added_tokens={"<seed:cot_budget_reflect>": 5}
        )
        asked = [
            SamplingParams(thinking_token_budget=9),
            SamplingParams(thinking_token_budget=9, structured_outputs=GRAMMAR),
            SamplingParams(thinking_token_budget=0),
        ]
        limits = [formats.limited(each, OutputSyntax("", "qwen3"), encode) for each in asked]
        ends[kind] = [
            demo.tokenizer.decode(each.thought_limit.end_token_ids)
            for each in limits
            if each.thought_limit is not None
        ]
    assert ends["llama"] == ends["[]"] == ["</think>"] * 3
    qwen = "directly now.\n</think>\n\n"
    assert [each.endswith(qwen) for each in ends["qwen3_moe"]] == [True, True, False]
    assert ends["qwen3_moe"][2] == "\n</think>\n\n", "as of a thought that its template leaves out"
    assert "exhausted my token budget" in ends["seed_oss"][0]
    assert ends["seed_oss"][1:] == ["</think>"] * 2, "its special tokens are in no grammar"
    assert sentence_of(tmp_path / "nowhere") == ("", "")
