"""Any text in any split gives the same items; thoughts; what is held back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.chat_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormat,
    OutputItem,
    OutputParser,
    OutputReader,
    OutputSyntax,
    Piece,
    Tool,
    items_of,
    pieces_after,
)
from tests.support.tool_texts import WRITERS

TOOLS = (Tool("f", parameters={"properties": {"n": {"type": "integer"}}}), Tool("g"))
PARTS = st.sampled_from(
    [
        "a", " ", "\n", "{", "}", "[", "]", '"', "\\", ":", ",", "(", ")", "=", "<", ">", "'", "1",
        "true", '{"name": "f", "arguments": {"n": 1}}', '"name"', "f", "n", "<think>", "</think>",
        *{marker for each in TOOL_FORMATS.values() for marker in each.markers},
        "<function=f>", "<parameter=n>", "</parameter>", "</function>", "```json", "```", "é😀",
        "functions.f:0", "to=functions.f", "analysis", "final", "[f(n=1)]", "\ud83d", "\x00",
    ]
)  # fmt: skip
SYNTAXES = st.builds(
    OutputSyntax,
    tools=st.sampled_from(["", *TOOL_FORMATS]),
    reasoning=st.sampled_from(["", *[n for n, each in REASONING_FORMATS.items() if each]]),
    begins_in_reasoning=st.booleans(),
)


def read(syntax: OutputSyntax, parts: list[str]) -> list[OutputItem]:
    parser = OutputParser(syntax, TOOLS)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return items_of([*pieces, *parser.end()])


def test_a_null_character_is_text() -> None:
    for parts in (["a\0b"], ["a", "\0", "b"]):
        assert [item.text for item in read(OutputSyntax(), parts)] == ["a\0b"]


@given(SYNTAXES, st.lists(PARTS, max_size=25), st.data())
def test_any_text_in_any_split(syntax: OutputSyntax, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = read(syntax, [text])
    assert read(syntax, list(text)) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(syntax, pieces) == whole


@pytest.mark.parametrize(
    ("syntax", "text", "items"),
    [
        (
            OutputSyntax("", "qwen3"),
            "<think>\nWell.\n</think>\n\nHi",
            [("reasoning", "Well."), ("message", "Hi")],
        ),
        (OutputSyntax("", "qwen3", True), "A</think>Hi", [("reasoning", "A"), ("message", "Hi")]),
        (OutputSyntax("", "qwen3", True), "cut sho", [("reasoning", "cut sho")]),
        (OutputSyntax("", "qwen3"), "No <think>a</think>", [("message", "No <think>a</think>")]),
        (OutputSyntax("", "qwen3"), "<think>\n\n</think>\n\nHi", [("message", "Hi")]),
        (OutputSyntax("", "mistral"), "[THINK]a[/THINK]b", [("reasoning", "a"), ("message", "b")]),
        (
            OutputSyntax("hermes", "qwen3"),
            '<think>a <tool_call>{"name": "f"}</tool_call></think>b',
            [("reasoning", 'a <tool_call>{"name": "f"}</tool_call>'), ("message", "b")],
        ),
        (
            OutputSyntax("openai"),
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            [("reasoning", "a"), ("message", "b")],
        ),
    ],
)  # fmt: skip
def test_thoughts(syntax: OutputSyntax, text: str, items: list[tuple[str, str]]) -> None:
    assert [(item.kind, item.text) for item in read(syntax, [text])] == items
    assert [(item.kind, item.text) for item in read(syntax, list(text))] == items


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_stream(name: str) -> None:
    """They come character by character, at most a marker's length behind."""
    for write, _ in WRITERS[name]:
        text = "x" * 300
        written = write([("f", {"a": text})])
        begin = written.index(text)
        parser = OutputParser(OutputSyntax(name), TOOLS)
        shown = sum(len(piece.text) for piece in parser.push(written[:begin]))
        longest = max((len(each) for each in TOOL_FORMATS[name].markers), default=0)
        for number, character in enumerate(text, 1):
            shown += sum(len(piece.text) for piece in parser.push(character))
            assert shown >= number - longest


def test_text_is_held_back_for_a_marker_only() -> None:
    parser = OutputParser(OutputSyntax("hermes", "qwen3"), TOOLS)
    assert parser.push("Hi") == [Piece("message", "Hi", True)]
    assert parser.push(" <tool_") == [Piece("message", " ")]
    assert parser.push("box>") == [Piece("message", "<tool_box>")]
    assert parser.push("<") == []
    assert parser.end() == [Piece("message", "<")]


@given(st.text(), st.data())
def test_the_input_of_a_custom_tool(text: str, data: st.DataObject) -> None:
    """It is the text in the JSON that the model writes, as it comes."""
    is_ascii = data.draw(st.booleans())
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    written = f'<tool_call>\n{{"name": "sh", "arguments": {arguments}}}\n</tool_call>'
    output_format = OutputFormat(
        syntax=OutputSyntax("hermes"), tools=(Tool("sh"),), custom=frozenset({"sh"})
    )
    size = data.draw(st.integers(1, 9))
    reader = OutputReader(output_format)
    pieces = [
        piece
        for begin in range(0, len(written), size)
        for piece in reader.push(written[begin : begin + size])
    ]
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert items_of([*pieces, *reader.end(is_cut=False)]) == [
        OutputItem("custom_tool_call", whole, "sh")
    ]


def test_what_is_left_after_a_cut() -> None:
    pieces = [
        Piece("reasoning", "ab", True),
        Piece("message", "cd", True),
        Piece("function_call", "{}", True, "f"),
    ]
    whole = items_of(pieces)
    for shown in ([], pieces[:1], pieces[:2], [pieces[0], Piece("message", "c", True)], pieces):
        assert items_of([*shown, *pieces_after(shown, pieces)]) == whole
    for wrong in (
        [Piece("message", "a", True)],
        [Piece("reasoning", "b", True)],
        [*pieces, pieces[0]],
    ):
        with pytest.raises(ValueError, match=r"differs|missing"):
            pieces_after(wrong, pieces)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"input": 12}',
        '{"input": {"a": 1}}',
        '{"other": "x"}',
        '"bare"',
        "[1]",
        '{"a:b": 1, "input": "x"}',
    ],
)
def test_other_inputs_of_a_custom_tool_are_passed_on(arguments: str) -> None:
    written = f'<tool_call>\n{{"name": "sh", "arguments": {arguments}}}\n</tool_call>'
    output_format = OutputFormat(
        syntax=OutputSyntax("hermes"), tools=(Tool("sh"),), custom=frozenset({"sh"})
    )
    for size in (1, 3, len(written)):
        reader = OutputReader(output_format)
        parts = [written[at : at + size] for at in range(0, len(written), size)]
        pieces = [piece for part in parts for piece in reader.push(part)]
        found = items_of([*pieces, *reader.end(is_cut=False)])
        assert found == [OutputItem("custom_tool_call", arguments, "sh")]


@pytest.mark.parametrize("text", ['{"role": "assistant"}', "functions.f", "assistant", "a <b"])
def test_gpt_oss_may_write_no_channels(text: str) -> None:
    assert read(OutputSyntax("openai"), [text]) == [OutputItem("message", text)]
    if not text.startswith("assistant"):
        parser = OutputParser(OutputSyntax("openai"), TOOLS)
        assert parser.push(text[:3]), "it streams"


def test_gpt_oss_calls_nothing_where_nothing_is_offered() -> None:
    parser = OutputParser(OutputSyntax("openai"), ())
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert items_of([*parser.push(text), *parser.end()]) == [OutputItem("message", "{}")]
