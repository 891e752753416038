"""Which JSON Schemas are supported: those that llguidance enforces exactly.

llguidance refuses most others, but names a keyword at best; here its path is named. Annotations and
keywords that JSON Schema does not know have no effect there, nor here.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.look_around import look_around_in
from penstock.engine.structured_outputs.patterns import repetition_fault

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
_NOT_STRICT = "; without 'strict' it is dropped"  # by `enforceable`
# Where a keyword's value has schemas.
_ONE = ("additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LENGTHS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum")
_OTHER_BOUNDS = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
_MAX_SCHEMAS = 10_000  # in one
MAX_INTEGER = 2**53  # llguidance rounds larger ones, as JSON's numbers of 64 bits
_MAX_DIGITS = 15  # of a fraction, for the same reason
# A class within a class, or a difference or an intersection of classes: in Rust, and nowhere else.
_NESTED_CLASS = re.compile(r"(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*?(?:\[|&&|--|~~)")
_INDEX = re.compile(r"[0-9]{1,9}")  # in a list; more digits would take quadratic time
_KNOWN_DRAFT = re.compile(r"https?://json-schema\.org/")
_MAX_PROPERTIES = 5_000  # of a schema, all together
_MAX_VALUES = 20_000  # of `enum`, all together


def check_schema(schema: Any) -> None:
    """
    Raises:
        InvalidRequestError: the schema is invalid, or not supported. `param` is the path of the
            keyword at fault, such as `.properties.a.not`.
    """
    num_properties = num_values = 0
    for path, each in subschemas(schema):
        if isinstance(each, bool):
            continue
        if not isinstance(each, Mapping):
            raise _refusal(path, "must be an object or a boolean")
        for keyword, value in each.items():
            where = f"{path}.{keyword}"
            if keyword in _UNSUPPORTED:
                hint = _NOT_STRICT if keyword == "propertyNames" else ""
                raise _refusal(where, f"uses {keyword!r}, which is not supported{hint}")
            check = _CHECKS.get(keyword)
            if check is not None and (fault := check(value)):
                raise _refusal(where, fault)
        _check_together(path, each)
        num_properties += len(each.get("properties", ()))
        num_values += len(each.get("enum", ()))
        if num_properties > _MAX_PROPERTIES:
            raise _refusal(path, f"has more than {_MAX_PROPERTIES} properties in all")
        if num_values > _MAX_VALUES:
            raise _refusal(path, f"has more than {_MAX_VALUES} values of 'enum' in all")


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every schema in a schema, or referred to in it, with its path, outer ones first. They may be
    no schemas at all.

    Raises:
        InvalidRequestError: there are too many.
    """
    waiting: list[tuple[str, Any]] = [("", schema)]
    seen: set[int] = set()
    num_schemas = 0
    while waiting:
        path, each = waiting.pop()
        num_schemas += 1
        if num_schemas > _MAX_SCHEMAS:
            raise _refusal("", f"has more than {_MAX_SCHEMAS:,} schemas in all")
        if isinstance(each, Mapping):
            if id(each) in seen:
                continue
            seen.add(id(each))
            waiting += reversed([*_inner(path, each), *_referred(schema, each)])
        yield path, each


def _referred(root: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a schema refers to, wherever it is in the document."""
    found = target_of(root, schema.get("$ref"))
    if found is not None:
        yield found


def target_of(root: Any, pointer: Any) -> tuple[str, Any] | None:
    """The path of what a `$ref` names within the document, and that itself; None: there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    path, target = "", root
    for part in urllib.parse.unquote(pointer[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            path, target = f"{path}.{name}", target[name]
        elif isinstance(target, list) and _INDEX.fullmatch(name) and int(name) < len(target):
            path, target = f"{path}[{name}]", target[int(name)]
        else:
            return None  # llguidance refuses it
    return path, target


def _inner(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        where = f"{path}.{keyword}"
        if keyword in _ONE or (keyword == "items" and not isinstance(value, list)):
            yield where, value
        elif keyword in _LISTS or keyword == "items":
            if isinstance(value, list):
                yield from ((f"{where}[{index}]", item) for index, item in enumerate(value))
        elif keyword in _NAMED and isinstance(value, Mapping):
            yield from ((f"{where}.{name}", item) for name, item in value.items())


def _check_together(path: str, schema: Mapping[str, Any]) -> None:
    """Check what llguidance does not do as it should where keywords are combined."""
    required = schema.get("required", ())
    num_required = len(set(required)) if isinstance(required, list) else 0
    # Two additional properties may get the same name.
    if schema.get("minProperties", 0) > max(1, num_required):
        raise _refusal(
            f"{path}.minProperties",
            "is more than the number of required properties, which is not supported",
        )
    if "prefixItems" in schema and (
        "additionalItems" in schema or isinstance(schema.get("items"), list)
    ):
        raise _refusal(f"{path}.prefixItems", "cannot be combined with an older draft's keywords")
    for bound, others in _OTHER_BOUNDS.items():
        value, ends = schema.get(bound), [schema.get(each) for each in others]
        # The bound itself would be allowed.
        if _is_number(value) and any(_is_number(end) and 0 < abs(end - value) < 1 for end in ends):
            raise _refusal(
                f"{path}.{bound}", "is less than 1 from the other bound, which is not supported"
            )


def _type_fault(value: Any) -> str | None:
    kinds = value if isinstance(value, list) and value else [value]
    if all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        return None
    return f"must be one or more of {', '.join(sorted(TYPES))}"


def _format_fault(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a text"


def _length_fault(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return None
    if isinstance(value, float) and value >= 0 and value == math.floor(value):
        return "must be written without a decimal point"
    return "must be a whole number that is not negative"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_fault(value: Any) -> str | None:
    if not _is_number(value) or not math.isfinite(value):
        return "must be a number"
    return _inexact_fault(value)


def _inexact_fault(value: float) -> str | None:
    if abs(value) > MAX_INTEGER and value == math.floor(value):
        return "has a number beyond 2^53, which is not supported"
    digits = repr(abs(value)).partition("e")[0].replace(".", "").strip("0")
    if isinstance(value, float) and len(digits) > _MAX_DIGITS:
        return f"has a number of more than {_MAX_DIGITS} digits, which is not supported"
    return None


def _multiple_fault(value: Any) -> str | None:
    if (fault := _number_fault(value)) or value <= 0:
        return fault or "must be more than 0"
    return (
        None if is_exact_step(value) else f"is no whole number, which is not supported{_NOT_STRICT}"
    )


def is_exact_step(value: float) -> bool:
    """Whether its multiples are the same in floating point, in which validators divide: 549.8 is
    no multiple of 0.01 there. Those of 0.5, 0.25 and so on are."""
    return isinstance(value, int) or (value * 1024).is_integer()


def _bound_fault(value: Any) -> str | None:
    return None if isinstance(value, bool) else _number_fault(value)  # draft 4 has booleans


def _names_fault(value: Any) -> str | None:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if is_list or isinstance(value, bool) else "must be a list of names"  # draft 3's


def _schemas_fault(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of schemas"


def _named_fault(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "must be an object"


def _values_fault(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of values"
    return _literal_fault(value)


def _literal_fault(value: Any) -> str | None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif _is_number(each) and (fault := _inexact_fault(each)):
            return fault
    return None


def _unique_fault(value: Any) -> str | None:
    if value is False:
        return None
    return f"uses 'uniqueItems', which is not supported for more than a few values{_NOT_STRICT}"


def _reference_fault(value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be a text"
    if "://" in value:
        return f"is {value!r:.100}: a schema cannot refer to another one elsewhere"
    return None


def _pattern_fault(value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be a text"
    mark = look_around_in(value)
    if mark is not None:
        return f"uses '{mark}', which is not supported{_NOT_STRICT}"
    if _NESTED_CLASS.search(value):
        return "has a '[', '&&', '--' or '~~' within a class; write it with a backslash"
    return repetition_fault(value)


def _patterns_fault(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return "must be an object"
    return next((fault for each in value if (fault := _pattern_fault(each))), None)


def _draft_fault(value: Any) -> str | None:
    is_known = isinstance(value, str) and _KNOWN_DRAFT.match(value)
    return None if is_known else "must be the address of a draft at json-schema.org"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "type": _type_fault,
    "format": _format_fault,
    "required": _names_fault,
    "enum": _values_fault,
    "const": _literal_fault,
    "$schema": _draft_fault,
    "uniqueItems": _unique_fault,
    "$ref": _reference_fault,
    "pattern": _pattern_fault,
    "multipleOf": _multiple_fault,
    "exclusiveMinimum": _bound_fault,
    "exclusiveMaximum": _bound_fault,
    **dict.fromkeys(_LENGTHS, _length_fault),
    **dict.fromkeys(_NUMBERS, _number_fault),
    **dict.fromkeys(_LISTS, _schemas_fault),
    **dict.fromkeys(_NAMED, _named_fault),
    "patternProperties": _patterns_fault,
}


def _refusal(path: str, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path or 'the schema'} {fault}", param=path)
