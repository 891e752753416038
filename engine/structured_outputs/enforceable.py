"""Schemas as they are written in the field, in the keywords that llguidance enforces.

Each rewriting is exact, or allows less: what is generated matches the schema that was asked for.

    format              an annotation, if `FORMATS` does not have it
    not: {}             no value
    pattern             without look-around (`look_around`)
    propertyNames       named properties, or one of `patternProperties`
    uniqueItems         of a few values: every order of them
    oneOf               a property that tells the alternatives apart is required
    minimum, maximum    beyond 2^53: 2^53 - 1 in their place
    $ref                to what no finite value matches: no value (`endless`)

What is left of `pattern`, `propertyNames` and `uniqueItems`, and a `multipleOf` such as 0.01, is
refused by `check_schema` if the schema is strict, and dropped otherwise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.engine.structured_outputs import look_around
from penstock.engine.structured_outputs.endless import without_endless
from penstock.engine.structured_outputs.json_schema import (
    FORMATS,
    MAX_INTEGER,
    TYPES,
    is_exact_step,
    subschemas,
    target_of,
)

_MAX_ORDERS = 120  # of five values; those of six take llguidance too much
_MAX_STEPS = 16_000  # of rewriting the patterns of one schema, as `look_around` counts
_MAX_KNOWN_CHARS = 16 << 10  # of schemas that are kept
_MAX_VALUES = 20_000  # that are looked at, of `propertyNames`, `uniqueItems` and `oneOf`
_MAX_ADDED_CHARS = 256 << 10  # by what stands for `propertyNames` and `uniqueItems`
_MAX_REFERENCES = 16  # in a row
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "additionalItems")
_OF_NAMES = frozenset({"type", "pattern", "minLength", "maxLength"})  # that a pattern can say
# What else may be beside the values of a schema that has only a few of them.
_CONSTRAINTS = frozenset({
    "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "allOf", "not", "if", "properties", "required", "items",
    "prefixItems", "minItems", "maxItems", "uniqueItems", "patternProperties", "propertyNames",
    "additionalProperties", "minProperties", "maxProperties", "contains",
})  # fmt: skip


def enforceable(schema: Any, *, is_strict: bool) -> Any:
    """
    Args:
        is_strict: what cannot be enforced stays for `check_schema` to refuse. Otherwise
            `propertyNames`, `uniqueItems`, patterns with look-around and a fractional `multipleOf`
            that cannot be are dropped.

    Raises:
        InvalidRequestError: no finite output matches it. `param` is the path.
    """
    text = json.dumps(schema)
    make = _known if len(text) <= _MAX_KNOWN_CHARS else _made
    return json.loads(make(text, is_strict))


def _made(schema: str, is_strict: bool) -> str:
    made = json.loads(schema)
    budget = _Budget()
    has_references = False
    for _, each in list(subschemas(made)):
        if isinstance(each, dict):
            has_references = has_references or "$ref" in each
            _rewrite(each, made, budget, is_strict=is_strict)
    return json.dumps(without_endless(made) if has_references else made)


_known = lru_cache(maxsize=256)(_made)  # the same tools come with each turn of a conversation


class _Budget:
    """What may be spent on rewriting one schema."""

    def __init__(self) -> None:
        self._num_steps = _MAX_STEPS
        self._num_chars = _MAX_ADDED_CHARS
        self._num_values = _MAX_VALUES

    def patterns(self, pattern: str, *, is_whole: bool = False) -> tuple[str, ...] | None:
        """What stands for a pattern with look-around (`look_around.rewritten`)."""
        if self._num_steps <= 0:
            return None
        found = look_around.rewritten(pattern, is_whole=is_whole)
        self._num_steps -= found.num_steps
        return found.patterns

    def pattern(self, pattern: str) -> str | None:
        """One pattern without look-around; None: there is none."""
        if not look_around.has_look_around(pattern):
            return pattern
        found = self.patterns(pattern, is_whole=True)
        return found[0] if found else None

    def may_look(self, num_values: int) -> bool:
        """Whether so many values may be looked at; if so, they are spent."""
        self._num_values -= min(num_values, self._num_values + 1)
        return self._num_values >= 0

    def has_room(self, num: int, part: Any) -> bool:
        """Whether a part may be written so many times; if so, it is spent."""
        num_chars = num * len(json.dumps(part))
        self._num_chars -= min(num_chars, self._num_chars + 1)
        return self._num_chars >= 0


def enforceable_pattern(pattern: str) -> str | None:
    """The pattern without look-around; None: there is none."""
    return _Budget().pattern(pattern)


def _rewrite(schema: dict[str, Any], root: Any, budget: _Budget, *, is_strict: bool) -> None:
    schema.pop("$dynamicAnchor", None)  # a name, which only `$dynamicRef` uses
    if schema.get("not") is True or schema.get("not") == {}:
        del schema["not"]
        schema["allOf"] = [*_listed(schema.get("allOf")), False]
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    _clamp(schema)
    _rewrite_patterns(schema, budget, is_strict=is_strict)
    if "propertyNames" in schema and (_name_properties(schema, root, budget) or not is_strict):
        schema.pop("propertyNames", None)
    if schema.get("uniqueItems") is True and (_list_orders(schema, root, budget) or not is_strict):
        schema.pop("uniqueItems", None)
    step = schema.get("multipleOf")
    if isinstance(step, float) and not is_exact_step(step) and not is_strict:
        del schema["multipleOf"]
    if isinstance(schema.get("oneOf"), list):
        _tell_apart(schema["oneOf"], root, budget)


def _clamp(schema: dict[str, Any]) -> None:
    """Bounds of 64 bits, as OpenAPI's int64 has them."""
    for keywords, sign in (
        (("minimum", "exclusiveMinimum"), -1),
        (("maximum", "exclusiveMaximum"), 1),
    ):
        for keyword in keywords:
            bound = schema.get(keyword)
            if isinstance(bound, int | float) and MAX_INTEGER < bound * sign < math.inf:
                schema[keyword] = sign * (MAX_INTEGER - 1)


# -- patterns ------------------------------------------------------------------------------------


def _rewrite_patterns(schema: dict[str, Any], budget: _Budget, *, is_strict: bool) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and look_around.has_look_around(pattern):
        found = budget.patterns(pattern)
        if found is None:
            found = (pattern,) if is_strict else ()
        del schema["pattern"]
        several = [{"pattern": each} for each in found]
        if several:
            schema.update(several.pop())
        if several:
            schema["allOf"] = [*_listed(schema.get("allOf")), *several]
    named = schema.get("patternProperties")
    if isinstance(named, dict) and any(map(look_around.has_look_around, named)):
        schema["patternProperties"] = {
            whole or each: value
            for each, value in named.items()
            if (whole := budget.pattern(each)) or is_strict
        }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# -- propertyNames -------------------------------------------------------------------------------


def _name_properties(schema: dict[str, Any], root: Any, budget: _Budget) -> bool:
    """Say by other keywords which names properties may have. Returns whether they say all of it."""
    names = _resolved(schema["propertyNames"], root)
    if isinstance(names, bool):
        names = {} if names else {"enum": []}
    if not isinstance(names, Mapping):
        return False
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return False
    values = _values_of(names, root, budget)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        has_room = budget.has_room(len(texts), schema.get("additionalProperties", True))
        return has_room and _name_values(schema, properties, texts)
    used = set(names) & (_CONSTRAINTS | {"anyOf", "oneOf", "enum", "const", "type"})
    lengths = [names.get(keyword, 0) for keyword in ("minLength", "maxLength")]
    if (
        not used <= _OF_NAMES
        or "string" not in _listed_types(names)
        or not isinstance(names.get("pattern", ""), str)
        or not all(type(each) is int and each >= 0 for each in lengths)
    ):
        return False
    pattern = _pattern_of_names(names)
    if pattern is None:
        return True
    whole = budget.pattern(pattern)
    if whole is None or properties or "patternProperties" in schema:
        return False
    schema["patternProperties"] = {whole: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
    return True


def _name_values(
    schema: dict[str, Any], properties: Mapping[str, Any], names: Sequence[str]
) -> bool:
    if "patternProperties" in schema:
        return False
    others = schema.get("additionalProperties", True)
    required = _listed(schema.get("required"))
    known = {name: each for name, each in properties.items() if name in names}
    schema["properties"] = {
        **known,
        **{name: others for name in names if name not in known},
        **{name: False for name in properties if name not in names and name in required},
    }
    schema["additionalProperties"] = False
    return True


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """None: all match."""
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    length = f"[\\s\\S]{{{least},{most}}}$" if least or most != "" else ""
    pattern = names.get("pattern")
    if pattern is None:
        return f"^{length}" if length else None
    if not length:
        return str(pattern)
    return (
        f"^(?={length})(?=[\\s\\S]*?(?:{pattern}))"
        if pattern[:1] != "^"
        else (f"^(?={length})(?:{pattern[1:]})")
    )


# -- uniqueItems ---------------------------------------------------------------------------------


def _list_orders(schema: dict[str, Any], root: Any, budget: _Budget) -> bool:
    """List the arrays that may be had of few values. Returns whether those are all."""
    types = _listed_types(schema)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if "array" not in types or (type(most) is int and most <= 1):
        return True
    items = schema.get("items")
    if isinstance(items, list | bool | None) or "prefixItems" in schema:
        return False
    values = _values_of(items, root, budget)
    is_limit = type(least) is int and (most is None or type(most) is int)
    if values is None or not is_limit:
        return False
    num_most = len(values) if most is None else min(most, len(values))
    num_orders = math.perm(len(values), num_most)
    if num_orders > _MAX_ORDERS or not budget.has_room(num_orders, _array_of(values, least)):
        return False
    arrays: list[Any] = [
        _array_of(order, least)
        for order in itertools.permutations(values, num_most)
        if num_most >= least
    ]
    others = [kind for kind in types if kind != "array"]
    if others:
        arrays.append({"type": others})
    for keyword in _OF_ARRAYS:
        schema.pop(keyword, None)
    schema.pop("type", None)
    if not arrays:
        schema["allOf"] = [*_listed(schema.get("allOf")), False]
    elif "anyOf" in schema:
        schema["allOf"] = [*_listed(schema.get("allOf")), {"anyOf": arrays}]
    else:
        schema["anyOf"] = arrays
    return True


def _array_of(values: Sequence[Any], least: int) -> dict[str, Any]:
    """Arrays of these values in this order, up to any of them from `least` on."""
    consts = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": consts, "items": False, "minItems": least}


def _listed_types(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type", sorted(TYPES))
    return kind if isinstance(kind, list) else [kind]


# -- oneOf ---------------------------------------------------------------------------------------


def _tell_apart(alternatives: list[Any], root: Any, budget: _Budget) -> None:
    """Require the property whose values are others in each alternative: pydantic does not where the
    tag has a default."""
    targets = [_resolved(each, root) for each in alternatives]
    if len(targets) < 2 or not all(
        isinstance(each, Mapping) and isinstance(each.get("properties"), Mapping)
        for each in targets
    ):
        return
    for name in targets[0]["properties"]:
        if not budget.may_look(1):
            return
        found = [_values_of(each["properties"].get(name, True), root, budget) for each in targets]
        keys = [_key(value) for values in found for value in values or ()]
        if all(found) and len(set(keys)) == len(keys):
            for alternative, target in zip(alternatives, targets, strict=True):
                if name not in _listed(target.get("required")):
                    own = _listed(alternative.get("required"))
                    alternative["required"] = [*own, name]
            return


# -- the values of a schema ----------------------------------------------------------------------


def _values_of(schema: Any, root: Any, budget: _Budget) -> list[Any] | None:
    """All values that match it, each once; None if they are not a few."""
    found: dict[str, Any] = {}
    waiting, seen = [schema], set[int]()
    while waiting:
        each = _resolved(waiting.pop(), root)
        if each is False or id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, Mapping) or _CONSTRAINTS & set(each):
            return None
        several = each.get("anyOf", each.get("oneOf"))
        if "const" in each:
            values = [each["const"]]
        elif isinstance(each.get("enum"), list):
            values = each["enum"]
        elif isinstance(several, list) and "type" not in each:
            waiting += reversed(several)
            values = []
        elif all(kind in ("null", "boolean") for kind in _listed_types(each)):
            types = _listed_types(each)
            values = [None] * ("null" in types) + [True, False] * ("boolean" in types)
        else:
            return None
        if not budget.may_look(1 + len(values)):
            return None
        types = _listed_types(each)
        found |= {_key(value): value for value in values if _has_type(value, types)}
    return list(found.values())


def _resolved(schema: Any, root: Any) -> Any:
    """What a schema refers to that says nothing else."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema or _CONSTRAINTS & set(schema):
            break
        found = target_of(root, schema["$ref"])
        if found is None:
            break
        _, schema = found
    return schema


def _key(value: Any) -> str:
    """Equal for equal values of JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


_TYPE_NAMES: Mapping[type, Sequence[str]] = {
    bool: ("boolean",), int: ("integer", "number"), str: ("string",), list: ("array",),
    dict: ("object",), type(None): ("null",),
}  # fmt: skip


def _has_type(value: Any, types: Sequence[Any]) -> bool:
    if isinstance(value, float):
        return "number" in types or ("integer" in types and value.is_integer())
    return any(each in types for each in _TYPE_NAMES[type(value)])
