"""A set of JSON Schemas of the kinds that JSONSchemaBench collects, invented from a seed.

Geng et al., "JSONSchemaBench: A Rigorous Benchmark of Structured Outputs for Language Models", 2025
(arXiv:2501.10868): arguments of functions, settings, events, resources of a cluster, unions. About
one schema in eight uses what no grammar enforces exactly, as there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_NOUNS = (
    "account", "address", "amount", "article", "author", "branch", "channel", "city", "colour",
    "comment", "container", "country", "currency", "customer", "date", "device", "email", "event",
    "filter", "format", "height", "image", "interval", "label", "language", "latitude", "level",
    "limit", "location", "longitude", "message", "method", "name", "option", "order", "owner",
    "path", "payment", "phone", "policy", "port", "price", "product", "quantity", "query", "region",
    "replica", "result", "role", "schedule", "score", "secret", "selector", "service", "session",
    "size", "source", "status", "tag", "target", "team", "template", "timeout", "title", "token",
    "type", "unit", "user", "value", "version", "volume", "weight", "width", "zone",
)  # fmt: skip
_FORMATS = ("date-time", "date", "email", "uri", "uuid", "ipv4", "hostname", "time")
_PATTERNS = (
    "^[A-Z]{2,3}$",
    "^[a-z][a-z0-9-]{0,20}$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]+\\.[0-9]+$",
    "^\\d{4}$",
)


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """`kind` is one of `KINDS`."""

    kind: str
    schema: Schema


def json_schemas(count: int, *, seed: int = 0) -> list[NamedSchema]:
    """So many schemas, of all kinds in turn."""
    rng = random.Random(seed)
    kinds = list(KINDS.items())
    chosen = (kinds[index % len(kinds)] for index in range(count))
    return [NamedSchema(kind, make(rng)) for kind, make in chosen]


def _name(rng: random.Random) -> str:
    first, second = rng.choice(_NOUNS), rng.choice(_NOUNS)
    return rng.choice((first, first, f"{first}_{second}", f"{first}{second.capitalize()}"))


def _text(rng: random.Random) -> Schema:
    kind = rng.random()
    if kind < 0.15:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    if kind < 0.25:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "minLength": 1, "maxLength": rng.choice((16, 64, 255))}
    if kind < 0.55:
        return {"type": "string", "enum": rng.sample(_NOUNS, rng.randint(2, 6))}
    return {"type": "string", "description": f"The {_name(rng)}."}


def _number(rng: random.Random) -> Schema:
    kind = rng.choice(("integer", "integer", "number"))
    bounds = rng.choice(({}, {"minimum": 0}, {"minimum": 1, "maximum": 65535}))
    return {"type": kind, **bounds}


def _value(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.5 or (depth == 0 and kind > 0.8):
        return _text(rng)
    if kind < 0.7:
        return _number(rng)
    if kind < 0.8:
        return {"type": "boolean"}
    if kind < 0.9:
        items = _value(rng, depth - 1)
        return {"type": "array", "items": items, "maxItems": rng.choice((3, 10))}
    return _object(rng, depth - 1, num_properties=rng.randint(1, 4))


def _object(
    rng: random.Random, depth: int, *, num_properties: int, is_closed: bool | None = None
) -> Schema:
    properties = {_name(rng): _value(rng, depth) for _ in range(num_properties)}
    required = [name for name in properties if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if rng.random() < 0.6 if is_closed is None else is_closed:
        schema["additionalProperties"] = False
    return schema


def _function(rng: random.Random) -> Schema:
    """Arguments of a tool."""
    return _object(rng, 1, num_properties=rng.randint(1, 4))


def _settings(rng: random.Random) -> Schema:
    """A file of settings: wide, nested, with definitions that are referred to."""
    schema = _object(rng, 2, num_properties=rng.randint(4, 10))
    name = _name(rng)
    shared = _object(rng, 1, num_properties=3, is_closed=True)
    schema["properties"][name] = {"$ref": f"#/definitions/{name}"}
    schema["properties"][f"{name}s"] = {
        "type": "array", "items": {"$ref": f"#/definitions/{name}"}, "maxItems": 3,
    }  # fmt: skip
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "definitions": {name: shared},
    }


def _event(rng: random.Random) -> Schema:
    """A record of an event: flat, nullable, closed."""
    properties = {
        _name(rng): {"type": [_number(rng)["type"], "null"]}
        if rng.random() < 0.4
        else {"type": ["string", "null"], "maxLength": rng.choice((32, 255))}
        for _ in range(rng.randint(3, 12))
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": list(properties)[:2],
    }


def _resource(rng: random.Random) -> Schema:
    """A resource of a cluster: deep, with fixed words and free labels."""
    spec = _object(rng, 2, num_properties=rng.randint(2, 6), is_closed=True)
    labels = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": [_name(rng).capitalize() for _ in range(2)]},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 63}, "labels": labels},
                "required": ["name"],
                "additionalProperties": False,
            },
            "spec": spec,
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }


def _union(rng: random.Random) -> Schema:
    """One of several shapes, told apart by a fixed word, and a tree of itself."""
    arms = []
    for name in rng.sample(_NOUNS, rng.randint(2, 4)):
        arm = _object(rng, 1, num_properties=2, is_closed=True)
        properties = {"type": {"const": name}, **arm["properties"]}
        arms.append({**arm, "properties": properties, "required": ["type"]})
    tree: Schema = {
        "type": "object",
        "properties": {
            "shape": {rng.choice(("anyOf", "oneOf")): arms},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["shape"],
        "additionalProperties": False,
    }
    return tree


def _scalar(rng: random.Random) -> Schema:
    """No object at all."""
    return rng.choice((_text, _number, lambda _: {"type": "array", "items": _number(rng)}))(rng)


def _unsupported(rng: random.Random) -> Schema:
    """Uses a keyword that cannot be enforced exactly."""
    schema = _object(rng, 1, num_properties=3)
    name = next(iter(schema["properties"]))
    schema["properties"][name] = rng.choice((
        {"not": {"type": "null"}},
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
    ))  # fmt: skip
    return schema


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "function": _function,
    "settings": _settings,
    "event": _event,
    "resource": _resource,
    "union": _union,
    "function, nested": lambda rng: _object(rng, 3, num_properties=3),
    "scalar": _scalar,
    "unsupported": _unsupported,
}
