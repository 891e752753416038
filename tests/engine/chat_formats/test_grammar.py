"""Grammars of calls: random walks through them are calls that match their schemas."""

from __future__ import annotations

import json
import random
import re
from itertools import chain
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.engine.chat_formats import (
    TOOL_FORMATS,
    ModelFormats,
    OfferedTools,
    OutputItem,
    OutputParser,
    OutputSyntax,
    Tool,
    items_of,
    tool_format_of,
)
from penstock.engine.chat_formats.grammar import is_marked
from penstock.engine.chat_formats.tool_format import NUMBER
from penstock.engine.errors import InvalidRequestError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.request import StructuredOutputs
from penstock.engine.sampling.grammars import LazyMatcher, SequenceGrammar
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.text.tokenizer import Tokenizer

DIRECTORY = DEMO_MODEL_PATH
END = 4
MAX_TOKENS = 500
NUM_WALKS = 12
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string", "maxLength": 5},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool("weather", parameters=WEATHER, strict=True),
    Tool("now", parameters=NOTHING, strict=True),
)
OFFERED = (Tool("weather", parameters={"properties": {"city": {"type": "string"}}}), Tool("now"))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
ANSWER = structured_outputs(
    json_schema={
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
    }
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DIRECTORY, vocab_size=1024, eos_token_ids=(END,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DIRECTORY)


def walk(compiler: GrammarCompiler, grammar: StructuredOutputs, seed: int) -> list[int] | None:
    """Random tokens that the grammar allows, up to its end; None if it takes too many."""
    rng, matcher, token_ids = random.Random(seed), compiler.matcher(grammar), list[int]()
    while len(token_ids) < MAX_TOKENS:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:1024])
        assert len(allowed), "nothing can follow"
        if END in allowed and rng.random() < 0.5:
            return token_ids
        token_id = int(rng.choice(list(allowed)))
        if token_id == END:
            return token_ids
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None


def items(name: str, text: str) -> list[OutputItem]:
    parser = OutputParser(OutputSyntax(name), TOOLS)
    return items_of([*parser.push(text), *parser.end()])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("kind", ["required", "one", "named", "strict", "beside"])
def test_walks_are_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, kind: str
) -> None:
    formats = ModelFormats(tools=name)
    offered = OfferedTools(
        tools=TOOLS,
        choice="auto" if kind in ("strict", "beside") else "required",
        named="weather" if kind == "named" else "",
        is_parallel=kind != "one",
    )
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    grammar = offered.grammar(output_format, formats, ANSWER if kind == "beside" else None)
    assert grammar is not None
    num_ended = num_calls = 0
    for seed in range(NUM_WALKS):
        token_ids = walk(compiler, grammar, seed)
        if token_ids is None:
            continue
        num_ended += 1
        text = tokenizer.decode(token_ids)
        found = items(name, text)
        calls = [item for item in found if item.kind == "function_call"]
        num_calls += len(calls)
        for call in calls:
            jsonschema.validate(json.loads(call.text), SCHEMAS[call.name])
        if kind in ("required", "one", "named"):
            assert calls == found, text
        if kind in ("one", "named"):
            assert len(calls) == 1
        if kind == "named":
            assert {call.name for call in calls} == {"weather"}
        if kind == "beside" and not calls:
            assert [set(json.loads(item.text)) for item in found] == [{"a"}]
    assert num_ended > NUM_WALKS // 4
    assert num_calls or kind == "strict"


def test_a_call_may_come_after_a_thought(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The grammar begins where the thought ends, wherever that began."""
    offered = OfferedTools(tools=TOOLS, choice="required")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for prompt, text in (
        ("", f"<think>\nfree {{ text\n</think>\n\n{call}"),
        ("", call),
        ("<think>\n", f"free text</think>\n\n{call}"),
    ):
        formats = ModelFormats(tools="hermes", reasoning="qwen3")
        output_format = offered.output_format(formats, prompt)
        assert output_format is not None
        grammar = offered.grammar(output_format, formats, None)
        assert grammar is not None
        matcher = compiler.matcher(grammar)
        token_ids = tokenizer.encode(text)
        assert matcher.validate_tokens(token_ids) == len(token_ids), text
        wrong = tokenizer.encode(text.replace("now", "never"))
        assert matcher.validate_tokens(wrong) < len(wrong)


def test_markers_that_are_tokens_are_written_as_those() -> None:
    formats = ModelFormats(tools="hermes", added_tokens={"<tool_call>": 7, "</tool_call>": 8})
    offered = OfferedTools(tools=TOOLS, choice="required")
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    grammar = offered.grammar(output_format, formats, None)
    assert grammar is not None
    assert "<[7]>" in grammar.text
    assert "<[8]>" in grammar.text
    assert '"<tool_call>"' not in grammar.text


def test_what_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    """Of a strict tool it is refused, of another one ignored."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"not": {"type": "null"}}},
    }
    formats = ModelFormats(tools="hermes")
    for is_strict in (False, True):
        offered = OfferedTools(
            tools=(Tool("f", parameters=schema, strict=is_strict),), choice="required"
        )
        output_format = offered.output_format(formats, "")
        assert output_format is not None
        if is_strict:
            with pytest.raises(InvalidRequestError, match="uniqueItems"):
                offered.grammar(output_format, formats, None)
        else:
            grammar = offered.grammar(output_format, formats, None)
            assert grammar is not None
            compiler.compile(grammar)


_REWRITTEN = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^(?!a)[ab]+$"},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        "by": {
            "type": "object",
            "propertyNames": {"enum": ["x"]},
            "additionalProperties": {"type": "integer", "format": "int32"},
        },
    },
    "required": ["id", "sizes", "by"],
}
_FREE = {
    "type": "object",
    "properties": {"id": {"type": "string", "pattern": r"^(a)(?!\1)"}},
    "required": ["id"],
}


@pytest.mark.parametrize("is_strict", [False, True])
def test_schemas_of_the_field(
    compiler: GrammarCompiler, tokenizer: Tokenizer, is_strict: bool
) -> None:
    """What can be enforced in other words is, in strict tools and in others."""
    tools = (Tool("f", parameters=_REWRITTEN, strict=is_strict),)
    offered = OfferedTools(tools=tools, choice="required")
    for arguments, is_valid in (
        ('{"id": "ba", "sizes": [2, 1], "by": {"x": 1}}', True),
        ('{"id": "ab", "sizes": [2, 1], "by": {"x": 1}}', False),
        ('{"id": "ba", "sizes": [2, 2], "by": {"x": 1}}', False),
        ('{"id": "ba", "sizes": [], "by": {"y": 1}}', False),
    ):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(compiler, tokenizer, offered, "hermes", text) == is_valid, text
    begin = "<tool_call>\n<function=f>\n<parameter=id>\n"
    rest = '\n</parameter>\n<parameter=sizes>\n[1]\n</parameter>\n<parameter=by>\n{"x": 1}'
    for value in ("ba", "ab"):
        text = f"{begin}{value}{rest}\n</parameter>\n</function>\n</tool_call>"
        is_valid = value == "ba"
        assert accepts(compiler, tokenizer, offered, "qwen3_coder", text) == is_valid, text


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama4_pythonic"])
def test_a_pattern_that_cannot_be_rewritten(compiler: GrammarCompiler, name: str) -> None:
    formats = ModelFormats(tools=name)
    for is_strict in (False, True):
        tools = (Tool("f", parameters=_FREE, strict=is_strict),)
        offered = OfferedTools(tools=tools, choice="required")
        output_format = offered.output_format(formats, "")
        assert output_format is not None
        if is_strict:
            with pytest.raises(InvalidRequestError, match=r"id\.pattern uses '\(\?!'"):
                offered.grammar(output_format, formats, None)
        else:
            grammar = offered.grammar(output_format, formats, None)
            assert grammar is not None
            compiler.compile(grammar)


@pytest.mark.parametrize("kind", ["password", "date"])
def test_the_format_of_a_text_without_quotes(compiler: GrammarCompiler, kind: str) -> None:
    """One that is an annotation hinders nobody."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": kind}}}
    formats = ModelFormats(tools="qwen3_coder")
    offered = OfferedTools(tools=(Tool("f", parameters=schema, strict=True),), choice="required")
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    if kind == "date":
        with pytest.raises(InvalidRequestError, match="'format' of the text 'a'"):
            offered.grammar(output_format, formats, None)
    else:
        grammar = offered.grammar(output_format, formats, None)
        assert grammar is not None
        compiler.compile(grammar)


def test_arguments_that_never_end_are_refused() -> None:
    schema = {"type": "object", "properties": {"f": {"$ref": "#"}}, "required": ["f"]}
    offered = OfferedTools(tools=(Tool("f", parameters=schema),), choice="required")
    formats = ModelFormats(tools="hermes")
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    with pytest.raises(InvalidRequestError, match=r"of the tool 'f' .* no output can match it"):
        offered.grammar(output_format, formats, None)


def accepts(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    offered: OfferedTools,
    name: str,
    text: str,
    *,
    prompt: str = "",
    reasoning: str = "",
    asked: StructuredOutputs | None = None,
) -> bool:
    """Whether an output may be this text, and end."""
    formats = ModelFormats(tools=name, reasoning=reasoning)
    output_format = offered.output_format(formats, prompt)
    grammar = asked
    if output_format is not None:
        grammar = offered.grammar(output_format, formats, asked)
    assert grammar is not None
    matcher = compiler.matcher(grammar)
    spelled = [tokenizer.encode(part) for part in re.split(r"(?<=\|)", text)]  # no special token
    token_ids = [*chain.from_iterable(spelled), END]
    return matcher.validate_tokens(token_ids) == len(token_ids)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
        ("llama4_pythonic", '[weather(city="Oslo")]'),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        ("granite", '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
        (
            "deepseek_v31",
            '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>',
        ),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
    ],
)
def test_a_strict_tool_has_no_other_way_in(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, text: str
) -> None:
    offered = OfferedTools(tools=TOOLS)
    assert items(name, text)[0].kind == "function_call"
    assert not accepts(compiler, tokenizer, offered, name, text)
    assert accepts(compiler, tokenizer, offered, name, text.replace("Oslo", "Rome")) == (
        name in ("hermes", "llama3_json")
    )
    assert accepts(compiler, tokenizer, offered, name, "plain < text")


@pytest.mark.parametrize("required", [[], ["b"]])
@pytest.mark.parametrize("given", ["", "a", "b", "ab", "bc", "ac", "abc"])
def test_optional_arguments_of_python_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, required: list[str], given: str
) -> None:
    properties = {key: {"type": "integer"} for key in "abc"}
    tool = Tool(
        "get-it", parameters={"type": "object", "properties": properties, "required": required}
    )
    offered = OfferedTools(tools=(tool,), choice="required")
    order = [*required, *(key for key in given if key not in required)]
    text = f"[get-it({', '.join(f'{key}=1' for key in order if key in given)})]"
    assert accepts(compiler, tokenizer, offered, "pythonic", text) == (set(required) <= set(given))
    parser = OutputParser(OutputSyntax("pythonic"), (tool,))
    [call] = items_of([*parser.push(text), *parser.end()])
    assert (call.name, json.loads(call.text)) == ("get-it", dict.fromkeys(given, 1))


REFERENCE = {
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Place"}, "b": True},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "hermes"])
def test_schemas_with_references(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    """What a parameter is, is said elsewhere in the schema."""
    tool = Tool("go", parameters=REFERENCE)
    formats, offered = ModelFormats(tools=name), OfferedTools(tools=(tool,), choice="required")
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    grammar = offered.grammar(output_format, formats, None)
    assert grammar is not None
    found = 0
    for seed in range(NUM_WALKS):
        token_ids = walk(compiler, grammar, seed)
        if token_ids is None:
            continue
        parser = OutputParser(OutputSyntax(name), (tool,))
        pieces = [*parser.push(tokenizer.decode(token_ids)), *parser.end()]
        for call in items_of(pieces):
            assert isinstance(json.loads(call.text)["a"], dict)
            found += 1
    assert found


@pytest.mark.parametrize(
    "asked",
    [
        'start: "x" start | "y"',
        'start: startle\nstartle: "xy"',
        '  start: TEXT\nTEXT: "xy"',
        'start: thought SPACE call\nthought: "x"\nSPACE: "y"\ncall: ""',
        'start: answer "y" // start\nanswer: /x/',
    ],
)
def test_a_grammar_within_another_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer, asked: str
) -> None:
    """Its names are its own, and after the thought it is what it was."""
    grammar = StructuredOutputs("lark", asked)
    for name, thinks in (("", True), ("hermes", True), ("hermes", False)):
        offered = OfferedTools(tools=TOOLS if name else ())
        for text in ("xy", "xx", "xyy", "free"):
            thought = "<think>\nfree</think>\n\n" if thinks else ""
            case: dict[str, Any] = {"reasoning": "qwen3" if thinks else "", "asked": grammar}
            assert accepts(compiler, tokenizer, offered, name, thought + text, **case) == (
                text == "xy"
            )


def test_a_slash_in_a_regex(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for pattern in ("a/b", "a\\/b"):
        grammar = StructuredOutputs("regex", pattern)
        text = "<think>\nfree</think>\n\na/b"
        assert accepts(
            compiler, tokenizer, OfferedTools(), "", text, reasoning="qwen3", asked=grammar
        )


THOUGHT = "<|channel|>analysis<|message|>Free <tool> text.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


def test_thoughts_and_answers_of_gpt_oss(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    final = "<|channel|>final<|message|>"
    for offered, asked, good, bad in (
        (OfferedTools(tools=TOOLS, choice="required"), None, HARMONY_CALL, f"{final}Hi"),
        (OfferedTools(tools=TOOLS), None, f"{final}Hi", HARMONY_CALL.replace("now", "never")),
        (OfferedTools(tools=TOOLS), ANSWER, f'{final}{{"a": 1}}', f"{final}Hi"),
        (OfferedTools(), ANSWER, f'{final}{{"a": 1}}', f"{final}Hi"),
    ):
        for thought in ("", THOUGHT):
            case: dict[str, Any] = {"reasoning": "openai_gptoss", "asked": asked}
            assert accepts(compiler, tokenizer, offered, "openai", thought + good, **case)
            assert not accepts(compiler, tokenizer, offered, "openai", thought + bad, **case)


@pytest.mark.parametrize(
    "name",
    [name for name in sorted(TOOL_FORMATS) if is_marked(OutputSyntax(name))],
)
def test_a_call_is_one_that_was_offered(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    """From its mark on; the text before it is free and has no masks. Drafts are no way around."""
    formats, offered = ModelFormats(tools=name), OfferedTools(tools=OFFERED)
    output_format = offered.output_format(formats, "")
    assert output_format is not None
    grammar = offered.grammar(output_format, formats, None)
    assert grammar is not None
    compiler.compile(grammar)
    frame = tool_format_of(name).frame
    arguments = '{"city": "Rome"}' if frame.written is None else frame.written({"city": "Rome"})
    for called, is_offered in (("weather", True), ("weathers", False), ("other", False)):
        begun = [*frame.first, *frame.begin(called)]
        call = "".join([*begun, arguments, *frame.end, *frame.last]).replace(NUMBER, "0")
        before, token_ids = "Free < text, and {more}. ", list[int]()
        kept = SequenceGrammar(
            compiler,
            grammar,
            token_ids,
            0,
            min_tokens=0,
            end_token_ids=(END,),
            never_token_ids=(),
            is_beam=False,
        )
        num_free = len(tokenizer.encode(before)) - 1
        masks = np.zeros((2, 32), np.uint32)
        refused = False
        for token_id in tokenizer.encode(f"{before}{call} Done."):
            assert not (kept.needs_mask(len(token_ids), ()) and len(token_ids) < num_free)
            token_ids.append(token_id)  # as a draft
            if kept.needs_mask(len(token_ids) - 1, token_ids[-1:]):
                kept.write_masks(masks.ctypes.data, masks)
                if not masks[0][token_id // 32] >> (token_id % 32) & 1:
                    refused = True
                    break
        assert refused != is_offered, call


def test_a_thought_may_show_calls(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    formats = ModelFormats(tools="hermes", reasoning="qwen3")
    offered = OfferedTools(tools=OFFERED)
    for prompt, text in (("", "<think>"), ("<think>\n", "")):
        output_format = offered.output_format(formats, prompt)
        assert output_format is not None
        grammar = offered.grammar(output_format, formats, None)
        assert grammar is not None
        compiler.compile(grammar)
        begin = compiler.compiled(grammar).matcher.deep_copy
        matcher = LazyMatcher(grammar, begin, compiler.tokenizer, compiler.vocab_size)
        matcher.consume_tokens(tokenizer.encode(f"{text}a <tool_call>x"))
        assert not matcher.is_active
        matcher.consume_tokens(tokenizer.encode("</think>b <tool_call>"))
        assert matcher.is_active
        assert matcher.rollback(1)
        assert not matcher.is_active, "the mark was a draft"
