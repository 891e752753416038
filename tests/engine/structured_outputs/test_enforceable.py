"""Schemas as zod and pydantic write them: accepted, and what is generated is valid.

`zod_schemas.json` is what `z.toJSONSchema` of zod 4 and `zod-to-json-schema` of zod 3 made.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import math
import random
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.enforceable import enforceable
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.structured_outputs.json_schema import check_schema
from penstock.engine.text import Tokenizer

from .conftest import check_texts

_END = 4
_ZOD: dict[str, Any] = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"  # which makes it optional, so that `oneOf` is not exclusive
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Link(pydantic.BaseModel):
    value: int
    next: Link | None


_Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
_PYDANTIC: dict[str, Any] = {
    "set of integers": set[int],
    "frozenset": frozenset[int],
    "set of an enum": set[Colour],
    "set of booleans": set[bool],
    "set of literals": Annotated[set[Literal["a", "b", "c"]], pydantic.Field(min_length=2)],
    "dict by enum": dict[Colour, int],
    "dict by UUID": dict[uuid.UUID, int],
    "dict by pattern": dict[pydantic.constr(pattern="^a+$"), int],  # type: ignore[misc]
    "dict by length": dict[pydantic.constr(min_length=1, max_length=3), int],  # type: ignore[misc]
    "conint": pydantic.conint(ge=1, le=5),
    "Decimal": decimal.Decimal,
    "Decimal of few digits": pydantic.condecimal(max_digits=5, decimal_places=2),
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "literal": Literal["a", 1, True, None],
    "discriminated union": _Pet,
    "tree": Tree,
    "list": Link,
    "constr": pydantic.constr(pattern="^[a-z]{2,5}$"),
    "bytes": bytes,
    "path": Path,
    "secret": pydantic.SecretStr,
    "URL": pydantic.AnyUrl,
    "network": ipaddress.IPv4Network,
    "datetime": datetime.datetime,
    "int64": Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)],
    "half": Annotated[float, pydantic.Field(multiple_of=0.5, le=1e6, ge=-1e6)],
    "cent": Annotated[float, pydantic.Field(multiple_of=0.01)],
}
# Accepted, but only enforced where there are a few values, or not at all.
_NOT_ENFORCED = {"set of integers", "frozenset", "cent", "zod 3 set"}


_SCHEMAS = _ZOD | {
    name: pydantic.TypeAdapter(kind).json_schema() for name, kind in _PYDANTIC.items()
}


def _walk(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: StructuredOutputs, seed: int
) -> str | None:
    """A random output; None if it did not end."""
    rng, matcher, token_ids = random.Random(seed), compiler.matcher(grammar), list[int]()
    while len(token_ids) < 200:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        (allowed,) = np.unpackbits(mask, bitorder="little").nonzero()
        assert len(allowed)
        if _END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(token_ids)
        others = allowed[allowed != _END]
        # What ends strings and numbers comes early in the vocabulary.
        token_id = int(rng.choice(others[:5] if rng.random() < 0.6 else others))
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None


@pytest.mark.parametrize("name", _SCHEMAS)
def test_schemas_of_the_field(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    schema = _SCHEMAS[name]
    grammar = structured_outputs(json_schema=schema)
    assert grammar is not None
    texts = [_walk(compiler, tokenizer, grammar, seed) for seed in range(6)]
    if name not in _NOT_ENFORCED:
        for text in filter(None, texts):
            jsonschema.validate(json.loads(text), schema)
    strict = enforceable(schema, is_strict=True)
    if name in _NOT_ENFORCED:
        with pytest.raises(InvalidRequestError, match=r"is not supported|is no whole number"):
            check_schema(strict)
    else:
        check_schema(strict)


_NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}
_FEW = {"type": "array", "items": {"enum": ["a", "b", 1, 1.0, True]}, "uniqueItems": True}
_TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"enum": [each, f"{each}2"]}, each: {}}}
        for each in "ab"
    ]
}


@pytest.mark.parametrize(
    ("schema", "matching", "others"),
    [
        ({**_NAMES, "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1, "b":2}', "{}"], ['{"c":1}']),
        ({**_NAMES, "propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"a":"x"}', '{"c":1}']),
        ({**_NAMES, "propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"a":1}', '{"xy":""}']),
        ({**_NAMES, "propertyNames": {"minLength": 2}}, ['{"xy":1}'], ['{"a":1}']),
        (
            {**_NAMES, "propertyNames": {"pattern": "b$", "maxLength": 2}},
            ['{"ab":1}', '{"b":1}'],
            ['{"aab":1}', '{"ba":1}'],
        ),
        ({**_NAMES, "propertyNames": False}, ["{}"], ['{"a":1}']),
        (
            {
                "type": "object",
                "properties": {"a": {}, "z": {}},
                "propertyNames": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/b"}]},
                "additionalProperties": {"type": "null"},
                "$defs": {"b": {"enum": ["b", 3]}},
            },
            ['{"a":1, "b":null}', '{"b":null}'],
            ['{"z":1}', '{"b":1}', '{"3":null}'],
        ),
        (_FEW, ["[]", '["b","a",1,true]', "[true,1]"], ["[1,1.0]", '["a","a"]']),
        ({**_FEW, "minItems": 2, "maxItems": 2}, ['["b","a"]'], ['["a"]', '["a","b",1]']),
        ({**_FEW, "type": ["array", "null"]}, ["[]", "null"], ['""', '["a","a"]']),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[]", "[3]"], ["[3,3]"]),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, ["[true,false]"],
         ["[true,true]"]),
        (_TAGGED, ['{"k":"a", "a":1}', '{"k":"b"}'], ["{}", '{"k":"b", "a":1}']),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}"], ['{"a":1}']),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["9007199254740991"],
         ["-1", "9007199254740992"]),
        ({"type": "string", "format": "colour"}, ['"x"'], ["3"]),
        ({"type": "string", "pattern": "^(?!a)(?=.*b$)[a-c]+$"}, ['"cab"', '"b"'], ['"ab"', '"c"']),
        ({"type": "string", "pattern": r"\bab\b"}, ['"ab"', '"x ab."'], ['"xab"', '"abc"']),
    ],
)  # fmt: skip
def test_what_is_enforced(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    schema: Any,
    matching: list[str],
    others: list[str],
) -> None:
    grammar = structured_outputs(json_schema=schema, strict=True)
    check_texts(compiler, tokenizer, grammar, matching=matching, others=others)


def test_a_backreference_is_left_out_unless_it_is_strict(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "pattern": r"^(a|b)\1$"}
    loose = structured_outputs(json_schema=schema)
    assert loose is not None
    compiler.matcher(loose)
    strict = structured_outputs(json_schema=schema, strict=True)
    assert strict is not None
    with pytest.raises(InvalidRequestError, match=r"uses '\\1', .* without 'strict' it is dropped"):
        compiler.matcher(strict)


_ORDERED = {"uniqueItems": True, "type": "array", "items": {"enum": [*range(5)]}}
_KEYED = {"propertyNames": {"enum": [*map(str, range(500))]}}
_SAME: dict[str, Any] = {
    f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 9} for number in range(40)
} | {"d40": {"enum": ["a", "b"]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": {"a": 1}, "uniqueItems": True, "items": {"type": {}}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [{}, [1], None, 1.5]}},
        {"propertyNames": {"pattern": 3}, "patternProperties": []},
        {"propertyNames": {"minLength": "x", "maxLength": True}},
        {"propertyNames": 3, "oneOf": [3, {"properties": {"a": {"$ref": 3}}}]},
        {"oneOf": [{"properties": {"a": {"type": [[]]}}, "required": 3}] * 2, "not": 1},
        {"multipleOf": math.inf, "minimum": -math.inf, "maximum": math.nan},
        {"maximum": 10**400, "minimum": None, "multipleOf": "x", "format": []},
        {"patternProperties": {r"(a)(?!\\1)": {}}, "allOf": 3, "pattern": "(?=("},
        {"$ref": "#", "$defs": {"a": {"$ref": "#/$defs/a"}}, "required": [[]], "properties": 3},
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/d0"}, "$defs": _SAME},
        {"properties": dict.fromkeys(map(str, range(2_000)), _ORDERED)},
        {"properties": dict.fromkeys(map(str, range(400)), _KEYED)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_strict", [False, True])
def test_any_schema_is_rewritten_or_left(schema: Any, is_strict: bool) -> None:
    """What is wrong with it is for others to say; what stands for it is not much longer."""
    num_chars = len(json.dumps(enforceable(schema, is_strict=is_strict)))
    assert num_chars < len(json.dumps(schema)) + 300_000


def test_annotations_have_no_effect(compiler: GrammarCompiler) -> None:
    words = (
        "title", "description", "examples", "deprecated", "x-order", "$comment", "readOnly",
        "writeOnly", "contentEncoding", "contentMediaType", "discriminator", "nullable", "$id",
        "$anchor", "$dynamicAnchor", "externalDocs", "xml", "default", "enumNames",
    )  # fmt: skip
    grammar = structured_outputs(json_schema={"type": "string", **dict.fromkeys(words, "not")})
    assert grammar is not None
    assert compiler.matcher(grammar).is_error() is False
