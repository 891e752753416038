"""Which schemas are supported: refusals name keyword and path, and what is accepted is enforced."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.structured_outputs.json_schema import check_schema
from penstock.engine.text import Tokenizer

from ...support.json_schemas import json_schemas

_END = 4
_DEEP: dict[str, Any] = {"type": "string", "not": {}}
for _ in range(20):
    _DEEP = {"type": "array", "items": _DEEP}


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ({"not": {}}, ".not", ".not uses 'not', which is not supported"),
        ({"properties": {"a": {"if": {}}}}, ".properties.a.if", ".properties.a.if uses 'if'"),
        ({"items": [{}, {"contains": 1}]}, ".items[1].contains", ".items[1].contains uses"),
        ({"anyOf": [True, {"propertyNames": {}}]}, ".anyOf[1].propertyNames", ".anyOf[1].prop"),
        ({"$defs": {"a": {"dependencies": {}}}}, ".$defs.a.dependencies", ".$defs.a.depend"),
        ({"uniqueItems": True}, ".uniqueItems", ".uniqueItems uses 'uniqueItems'"),
        ({"format": 3}, ".format", ".format must be a text"),
        ({"type": "strin"}, ".type", ".type must be one or more of array, boolean"),
        ({"type": []}, ".type", ".type must be one"),
        ({"type": ["string", 3]}, ".type", ".type must be one"),
        ({"properties": []}, ".properties", ".properties must be an object"),
        ({"properties": {"a": 3}}, ".properties.a", ".properties.a must be an object or a boolean"),
        ({"required": "a"}, ".required", ".required must be a list of names"),
        ({"properties": {}, "required": [["a"]]}, ".required", ".required must be a list of names"),
        ({"type": [{}, "null"], "$ref": "#/type"}, ".type", ".type must be one or more"),
        ({"not": [], "$ref": f"#/not/{'9' * 5000}"}, ".not", ".not uses 'not'"),
        ({"enum": []}, ".enum", ".enum must be a list of values"),
        ({"anyOf": {}}, ".anyOf", ".anyOf must be a list of schemas"),
        ({"minLength": -1}, ".minLength", ".minLength must be a whole number that is not negative"),
        ({"minItems": 2.0}, ".minItems", ".minItems must be written without a decimal point"),
        ({"minimum": -(2**63)}, ".minimum", ".minimum has a number beyond 2^53"),
        ({"enum": [[{"a": 2**53 + 2}]]}, ".enum", ".enum has a number beyond 2^53"),
        ({"const": 123456789.12345679}, ".const", ".const has a number of more than 15 digits"),
        (
            {"exclusiveMinimum": 3, "maximum": 3.5},
            ".exclusiveMinimum",
            ".exclusiveMinimum is less than 1 from the other bound",
        ),
        ({"pattern": "^[[:alpha:]]$"}, ".pattern", ".pattern has a '[', '&&', '--' or '~~' within"),
        ({"patternProperties": {"[a&&b]": {}}}, ".patternProperties", ".patternProperties has a"),
        ({"$schema": "zzz"}, ".$schema", ".$schema must be the address of a draft"),
        ({"prefixItems": [{}], "items": [{}]}, ".prefixItems", ".prefixItems cannot be combined"),
        ({"anyOf": [{}] * 10_001}, "", "the schema has more than 10,000 schemas in all"),
        (
            {"$ref": "#/a~1b/c%20d/0", "a/b": {"c d": [{"not": {}}]}},
            ".a/b.c d[0].not",
            ".a/b.c d[0].not uses 'not'",
        ),
        ({"maxItems": 1.5}, ".maxItems", ".maxItems must be a whole number"),
        ({"minimum": "1"}, ".minimum", ".minimum must be a number"),
        ({"multipleOf": 0}, ".multipleOf", ".multipleOf must be more than 0"),
        ({"multipleOf": 0.01}, ".multipleOf", ".multipleOf is no whole number"),
        ({"minProperties": 3}, ".minProperties", ".minProperties is more than the number of"),
        ({"$ref": "https://a.b/c"}, ".$ref", ".$ref is 'https://a.b/c': a schema cannot refer"),
        ({"$ref": 3}, ".$ref", ".$ref must be a text"),
        ({"pattern": "(?=a)b"}, ".pattern", ".pattern uses '(?=', which is not supported"),
        ({"enum": list(range(20_001))}, "", "the schema has more than 20000 values of 'enum'"),
        (_DEEP, ".items" * 20 + ".not", ".items" * 20 + ".not uses"),
        ([], "", "the schema must be an object or a boolean"),
    ],
)
def test_what_is_refused_is_named(schema: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_schema(schema)
    with contextlib.suppress(InvalidRequestError):
        structured_outputs(json_schema=schema)  # whatever it is
    assert refusal.value.param == param
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value)) < 400


def test_annotations_and_unknown_keywords_have_no_effect() -> None:
    words = ("title", "description", "examples", "deprecated", "x-order", "$comment")
    check_schema({**dict.fromkeys(words, "not"), "default": {"not": {}}, "uniqueItems": False})


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        (
            {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}},
            ".properties.a.oneOf",
            ".properties.a.oneOf uses 'oneOf' with alternatives that may hold at the same time",
        ),
        ({"$ref": "#/$defs/none"}, "", ""),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "", "Unsatisfiable"),
        (
            {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
            "",
            "no output can match it: what it says of a text excludes itself",
        ),
        ({"pattern": "("}, "", "not a regular expression: unclosed group"),
        (
            {"properties": {"a": {"items": {"pattern": "("}}, "b": {"pattern": "x"}}},
            ".properties.a.items",
            ".properties.a.items: not a regular expression: unclosed group",
        ),
    ],
)
def test_what_only_the_library_finds(
    compiler: GrammarCompiler, schema: Any, param: str, message: str
) -> None:
    grammar = structured_outputs(json_schema=schema)
    assert grammar is not None
    with pytest.raises(InvalidRequestError) as refusal:
        compiler.matcher(grammar)
    assert refusal.value.param == param
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_random_outputs_of_accepted_schemas_match(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Walks over the masks, as a model without any sense would make them."""
    rng, num_accepted, num_whole = random.Random(1), 0, 0
    for named in json_schemas(400, seed=1):
        grammar = structured_outputs(json_schema=named.schema)
        assert grammar is not None
        if named.kind == "unsupported":
            with pytest.raises(InvalidRequestError):
                compiler.matcher(grammar)
            continue
        matcher = compiler.matcher(grammar)
        num_accepted += 1
        token_ids: list[int] = []
        while len(token_ids) < 200:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            (allowed,) = np.unpackbits(mask, bitorder="little").nonzero()
            if _END in allowed:
                num_whole += 1
                jsonschema.validate(json.loads(tokenizer.decode(token_ids)), named.schema)
                break
            # What ends strings and numbers comes early in the vocabulary.
            token_id = int(rng.choice(allowed[:5] if rng.random() < 0.5 else allowed))
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
    assert num_accepted == 350
    assert num_whole > 200
