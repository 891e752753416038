"""Every form of asking, and what it matches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.text import Tokenizer

from .conftest import check_texts

_POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=point>", "schema": _POINT, "end": "</f>"}],
    "triggers": ["<f="],
}
_CONTENT = {"type": "json_schema", "json_schema": _POINT}
_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [{"begin": "<f=point>", "content": _CONTENT, "end": "</f>"}],
    },
}
_WRONG_TAG = {**_TAG, "structures": [{"begin": "<f=", "schema": {"not": {"const": 1}}, "end": ""}]}
_WORDS = ["yes", 'a "b"\\ü\n€', "{x}"]


class Point:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return _POINT


_MANY = {**_POINT, "minProperties": 1}
_CLOSED = {"json_schema": _MANY, "disable_additional_properties": True}


@pytest.mark.parametrize(
    ("form", "matching", "others"),
    [
        ({"json_schema": _POINT}, ['{"x": 1}', '{"x":1}'], ["{}", '{ "x":1}', '{"x": "1"}']),
        ({"json_schema": {**_POINT, "additionalProperties": {}}}, ['{"x":1, "y":2}'], ["{}"]),
        ({"json_schema": {"allOf": [_POINT]}}, ['{"x":1, "y":2}'], ["{}"]),
        ({"json_schema": {**_POINT, "minProperties": 1}}, ['{"x":1, "y":2}'], ["{}"]),
        ({"json_schema": json.dumps(_POINT)}, ['{"x": 1}'], ["{}"]),
        ({"json_schema": Point}, ['{"x": 1}'], ["{}"]),
        ({"json_schema": True}, ["3", '"a"', "[null]"], ["a"]),
        (_CLOSED, ['{"x": 1}'], ['{"x":1, "y":2}']),
        ({"json_schema": _POINT, "whitespace_pattern": ""}, ['{"x":1}'], ['{"x": 1}']),
        ({"json_schema": _POINT, "whitespace_pattern": "\\n?"}, ['{\n"x":\n1\n}'], ['{ "x":1}']),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1"]),
        ({"regex": "^a/b+$"}, ["a/b", "a/bbb"], ["a/", "xa/b"]),
        ({"regex": r"(?!no)[a-z]+(?<!x)"}, ["ab", "on"], ["nob", "abx", "a b"]),
        ({"choice": _WORDS}, _WORDS, ["ye", ""]),
        ({"grammar": 'start: "a" b*\nb: "b" | "c"'}, ["a", "abcb"], ["b"]),
        ({"structural_tag": _TAG}, ["", "hi", 'so <f=point>{"x": 1}</f> it'], ["<f=line>"]),
        ({"structural_tag": json.dumps(_TAGS)}, ['<f=point>{"x": 1}</f>'], ["<f=point>{}</f>"]),
    ],
)
def test_what_a_form_matches(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    form: dict[str, Any],
    matching: list[str],
    others: list[str],
) -> None:
    grammar = structured_outputs(**form)
    check_texts(compiler, tokenizer, grammar, matching=matching, others=others)


def test_an_option_of_the_library_in_a_schema_has_no_effect() -> None:
    schema = {**_POINT, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    assert structured_outputs(json_schema=schema) == structured_outputs(json_schema=_POINT)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "p: only one of regex and choice may be given"),
        ({"json_schema": "{"}, "p is not valid JSON: "),
        ({"json_schema": 3}, "p must be a JSON Schema"),
        ({"choice": []}, "p must be a list of texts, none empty"),
        ({"choice": ["a", ""]}, "p must be a list of texts, none empty"),
        ({"structural_tag": "["}, "p is not valid JSON: "),
        ({"structural_tag": {}}, "p must have triggers, and tags with begin, schema and end"),
        (
            {"structural_tag": {"format": {"type": "sequence"}}},
            "p has a format of type 'sequence'; only 'triggered_tags' is supported",
        ),
        ({"structural_tag": {**_TAG, "triggers": ["<g"]}}, "p: no trigger is the beginning of"),
        ({"structural_tag": {**_TAG, "triggers": [""]}}, "p needs a tag, and a list of triggers"),
        ({"structural_tag": {**_TAG, "triggers": 5}}, "p must have triggers, and tags with"),
        ({"structural_tag": {**_TAG, "triggers": "<f"}}, "p needs a tag, and a list of triggers"),
        ({"structural_tag": {**_TAG, "triggers": ["<"] * 257}}, "p has more than 256 triggers"),
        ({"structural_tag": {**_TAG, "at_least_one": True}}, "p: at_least_one is not supported"),
        ({"structural_tag": _WRONG_TAG}, "p: '<f=': .not uses 'not', which is not supported"),
    ],
)
def test_what_is_wrong_is_named(form: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_outputs(**form, param="p")
    assert refusal.value.param == "p"
    assert str(refusal.value).startswith(message)


def test_nothing_given_is_no_grammar() -> None:
    assert structured_outputs() is None
