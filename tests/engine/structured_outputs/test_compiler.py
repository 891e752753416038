"""Grammars are compiled once, kept by content, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.text import Tokenizer

from .conftest import PATH


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs("regex", text)


def test_a_grammar_is_compiled_once_and_its_matchers_are_apart(compiler: GrammarCompiler) -> None:
    first, second = compiler.matcher(regex("ab")), compiler.matcher(regex("ab"))
    assert compiler.num_kept == 1
    assert regex("ab") in compiler.kept
    token_id = next(each for each in range(1024) if first.validate_tokens([each]))
    assert first.consume_token(token_id)
    assert second.validate_tokens([token_id]) == 1
    assert first.validate_tokens([token_id]) == 0


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("("), "not a regular expression: unclosed group"),
        (regex("(?=a)b"), "not a regular expression: look-around, including look-ahead"),
        (regex(r"\1"), "not a regular expression: backreferences are not supported"),
        (StructuredOutputs("lark", "start: x"), ""),
        (StructuredOutputs("lark", "start"), ""),
        (StructuredOutputs("json_schema", '{"items":' * 200 + "{}" + "}" * 200), ""),
    ],
)
def test_what_cannot_be_compiled(
    compiler: GrammarCompiler, grammar: StructuredOutputs, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        compiler.matcher(grammar)
    assert refusal.value.param == ""
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
    assert grammar not in compiler.kept


@pytest.mark.parametrize(
    "grammar",
    [
        regex(r"a<\|end\|>b"),
        StructuredOutputs("lark", 'start: "a<|end|>b"'),
        StructuredOutputs("json_schema", '{"const": "a<|end|>b"}'),
    ],
)
def test_a_text_that_names_a_special_token_is_a_text(
    compiler: GrammarCompiler, grammar: StructuredOutputs
) -> None:
    matcher, text, words = compiler.matcher(grammar), "", Tokenizer.from_directory(PATH)
    while not matcher.is_stopped():
        token_id = next(each for each in range(1024) if matcher.validate_tokens([each]))
        text += words.decode([token_id])
        assert matcher.consume_token(token_id)
    assert text.strip('"') == "a<|end|>b"


def test_a_token_that_only_looks_special_is_no_text_either(tmp_path: Path) -> None:
    """As `<tool_call>` of Qwen's tokenizers, which is an added token but not a special one."""
    made = json.loads((PATH / "tokenizer.json").read_text())
    added = {**made["added_tokens"][0], "id": 1024, "content": "<tool_call>", "special": False}
    made["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    compiler = GrammarCompiler(tmp_path, vocab_size=1025, eos_token_ids=(4,))
    words = Tokenizer.from_directory(tmp_path)
    for grammar in (regex("<tool_call>x"), StructuredOutputs("lark", 'start: "<tool_call>x"')):
        matcher, text = compiler.matcher(grammar), ""
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            token_id = max(each for each in range(1025) if mask[each // 8] >> each % 8 & 1)
            assert matcher.consume_token(token_id)
            text += words.decode([token_id])
        assert text == "<tool_call>x"
    by_id = compiler.matcher(StructuredOutputs("lark", "start: <[1024]>"))
    assert by_id.consume_token(1024)


def test_a_model_without_a_usable_tokenizer(tmp_path: Path) -> None:
    for text in (None, "{}"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        broken = GrammarCompiler(tmp_path, vocab_size=10, eos_token_ids=(2,))
        with pytest.raises(
            ModelLoadError, match="its tokens cannot be used for grammars"
        ) as caught:
            broken.compiled(regex("a"))
        assert str(tmp_path) not in str(caught.value)  # of a GGUF file it is a cache


def test_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """transformers adds `<|endoftext|>` to the tokenizers that it makes of GGUF files."""
    made = json.loads((PATH / "tokenizer.json").read_text())
    added = {**made["added_tokens"][0], "id": 1024, "content": "<|endoftext|>"}
    made["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    compiler = GrammarCompiler(tmp_path, vocab_size=1024, eos_token_ids=(4,))
    [token_id] = Tokenizer.from_directory(tmp_path).encode("a", add_special_tokens=False)
    assert compiler.matcher(regex("a")).consume_token(token_id)
