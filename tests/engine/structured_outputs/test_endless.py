"""Schemas whose values never end."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.enforceable import enforceable
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.text import Tokenizer

_NEXT = {"type": "object", "properties": {"b": {"$ref": "#/$defs/A"}}, "required": ["b"]}


_TO_A, _TO_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}


def _needs(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (_needs(b={"$ref": "#"}), ".properties.b"),
        ({"$defs": {"A": _NEXT}, "$ref": "#/$defs/A"}, ".$defs.A.properties.b"),
        (
            {"$defs": {"A": _needs(b=_TO_B), "B": _needs(a=_TO_A)}, "allOf": [_TO_A]},
            ".$defs.B.properties.a",
        ),
        ({"$defs": {"A": _NEXT}, "anyOf": [_TO_A, _needs(c=_TO_A)]}, ".$defs.A.properties.b"),
        (
            {"$defs": {"A": {"allOf": [_NEXT, {}]}}, "allOf": [_TO_A]},
            ".$defs.A.allOf[0].properties.b",
        ),
        (
            {"type": "object", "properties": {"b": {"$ref": "#"}}, "allOf": [{"required": ["b"]}]},
            ".properties.b",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ".items"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, ".prefixItems[1]"),
        ({**_needs(b={}), "properties": {}, "additionalProperties": {"$ref": "#"}},
         ".additionalProperties"),
        ({**_needs(b={}), "properties": {}, "patternProperties": {"^b": {"$ref": "#"}}},
         ".patternProperties.^b"),
    ],
)  # fmt: skip
def test_what_never_ends_is_refused(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_outputs(json_schema=schema, param="p")
    assert refusal.value.param == f"p{path}"
    assert str(refusal.value) == (f"p: {path} requires itself without end: no output can match it")


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        (_needs(b={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), '{"b":{"b":null}}', "{}"),
        ({**_needs(b={"$ref": "#"}), "type": ["object", "null"]}, '{"b":null}', "{}"),
        ({**_needs(b={"$ref": "#"}), "required": []}, '{"b":{}}', "[]"),
        (_needs(b={"type": "array", "items": {"$ref": "#"}}), '{"b":[{"b":[]}]}', "{}"),
        # What can never end cannot be begun where it need not be.
        ({"$defs": {"A": _NEXT}, "type": "object", "properties": {"x": _TO_A, "y": {}}},
         '{"y":1}', '{"x":'),
        ({"$defs": {"A": _NEXT}, "anyOf": [_TO_A, {"type": "null"}]}, "null", '{"b":'),
        ({"$defs": {"A": _NEXT}, "type": "array", "items": _TO_A}, "[]", '[{"b":'),
    ],
)  # fmt: skip
def test_what_may_end_is_accepted(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str, other: str
) -> None:
    grammar = structured_outputs(json_schema=schema)
    assert grammar is not None
    for each in (text, other):
        matcher = compiler.matcher(grammar)
        token_ids = tokenizer.encode(each, add_special_tokens=False)
        is_begun = matcher.try_consume_tokens(token_ids) == len(token_ids)
        if each == text:
            assert is_begun
            assert matcher.is_accepting()
        elif not each.endswith(":"):
            assert not matcher.is_accepting()
        else:
            assert not is_begun


def _values() -> list[Any]:
    """Small ones of null, objects and arrays."""
    found: list[Any] = [None, {}, []]
    for _ in range(2):
        parts = [{}, *({"a": each} for each in found[:24])]
        objects = [
            {**part, **({"b": each} if more else {})}
            for part in parts
            for each in found[:24]
            for more in (False, True)
        ]
        arrays = [
            [*several] for num in (1, 2) for several in itertools.product(found[:6], repeat=num)
        ]
        found = [
            json.loads(text) for text in dict.fromkeys(map(json.dumps, [*found, *objects, *arrays]))
        ]
    return found


def _random_schema(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.35 or depth > 3:
        others: list[Any] = [True, False, {"type": "null"}, {"const": None}]
        name = rng.choice("ABC")
        return {"$ref": f"#/$defs/{name}"} if rng.random() < 0.8 else rng.choice(others)
    if kind < 0.6:
        schema: dict[str, Any] = {
            "type": rng.choice(["object", ["object", "null"]]),
            "properties": {n: _random_schema(rng, depth + 1) for n in "ab" if rng.random() < 0.7},
            "required": [name for name in "ab" if rng.random() < 0.5],
        }
        for keyword in ("additionalProperties", "allOf"):
            if rng.random() < 0.25:
                part = _random_schema(rng, depth + 1)
                schema[keyword] = [part] if keyword == "allOf" else part
        return schema
    if kind < 0.72:
        items = _random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": rng.choice([0, 1, 2])}
    keyword = "anyOf" if kind < 0.88 else "allOf"
    return {keyword: [_random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _matching(schema: Any, values: list[Any]) -> list[Any] | None:
    """None: it refers to itself without reading anything."""
    validator = jsonschema.Draft202012Validator(schema)
    try:
        return [value for value in values if validator.is_valid(value)]
    except RecursionError:
        return None


def test_no_finite_value_is_lost() -> None:
    """Of schemas that refer to each other at random: what is refused matches nothing, and what is
    rewritten matches the same."""
    values, num_refused, num_same = _values(), 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        whole = {
            "allOf": [_random_schema(rng)],
            "$defs": {name: _random_schema(rng) for name in "ABC"},
        }
        matching = _matching(whole, values)
        if matching is None:
            continue
        try:
            made = enforceable(whole, is_strict=False)
        except InvalidRequestError:
            assert matching == [], seed
            num_refused += 1
        else:
            assert _matching(made, values) == matching, seed
            num_same += 1
    assert num_refused > 5
    assert num_same > 15
