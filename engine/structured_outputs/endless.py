"""Schemas that only endless values match: a list whose every element has a required `next`.

A grammar of such a schema begins, and never ends. What is computed is the least set of schemas that
have a finite value; a schema is only judged to have none if that is certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.json_schema import TYPES, subschemas, target_of

_MAX_EXPANDED = 3_000  # schemas of one; beyond that nothing is judged
_MAX_ITEMS = 64

# Schemas that hold at the same time, by `id`.
_Together = frozenset[int]


class _TooMuchError(Exception):
    pass


def without_endless(schema: Any) -> Any:
    """The schema, in which what has no finite value is `false`.

    Args:
        schema: changed in place.

    Raises:
        InvalidRequestError: it has none itself. `param` is the path of what it requires.
    """
    endings = _Endings(schema)
    try:
        endless = endings.endless()
    except _TooMuchError:
        return schema
    if schema is False or any(each is schema for each in endless):
        raise endings.refusal()
    for each in endless:
        both = each.get("allOf")
        each["allOf"] = [*both, False] if isinstance(both, list) else [False]
    return schema


class _Endings:
    """Which schemas have a finite value.

    Attributes:
        _ways: of schemas that hold together: each way to match them, as what its parts have to
            match.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._schemas: dict[int, Any] = {}
        self._paths: dict[int, str] = {}
        for path, each in subschemas(root):
            if isinstance(each, dict) and id(each) not in self._schemas:
                self._schemas[id(each)] = each
                self._paths[id(each)] = path
        self._ways: dict[_Together, list[list[_Together]]] = {}
        self._finite = set[_Together]()
        self._num_expanded = 0

    def endless(self) -> list[dict[str, Any]]:
        """The schemas that no finite value matches."""
        waiting = [frozenset({each}) for each in self._schemas]
        while waiting:
            together = waiting.pop()
            if together not in self._ways:
                self._ways[together] = [
                    way
                    for flat in self._flat([self._schemas[each] for each in together], (), ())
                    for way in self._ways_of(flat)
                ]
                waiting += [part for way in self._ways[together] for part in way]
        has_changed = True
        while has_changed:
            found = {
                each
                for each, ways in self._ways.items()
                if each not in self._finite and any(self._finite.issuperset(way) for way in ways)
            }
            self._finite |= found
            has_changed = bool(found)
        return [
            schema
            for number, schema in self._schemas.items()
            if frozenset({number}) not in self._finite
        ]

    def refusal(self) -> InvalidRequestError:
        """The refusal of a schema that no finite value matches: where it goes on without end."""
        together, seen, path = frozenset({id(self._root)}), set[_Together](), ""
        while together not in seen:
            seen.add(together)
            path = min((self._paths[each] for each in together), default=path)
            parts = [part for way in self._ways[together] for part in way]
            after = next((part for part in parts if part not in self._finite), None)
            if after is None:
                message = f"{path or 'the schema'}: no output can match it"
                return InvalidRequestError(message, param=path)
            together = after
        message = f"{path or 'the schema'} requires itself without end: no output can match it"
        return InvalidRequestError(message, param=path)

    def _flat(
        self, waiting: Sequence[Any], choices: tuple[Any, ...], flat: tuple[Any, ...]
    ) -> Iterator[tuple[Mapping[str, Any], ...]]:
        """The schemas that hold where some hold together, for each choice among alternatives."""
        left = list(waiting)
        while left:
            self._num_expanded += 1
            if self._num_expanded > _MAX_EXPANDED:
                raise _TooMuchError
            each = left.pop()
            if each is False:
                return
            if not isinstance(each, dict) or any(each is known for known in flat):
                continue
            flat += (each,)
            referred = target_of(self._root, each.get("$ref"))
            if referred is not None:
                left.append(referred[1])
            if each.get("$ref") == "#":
                left.append(self._root)
            left += each["allOf"] if isinstance(each.get("allOf"), list) else ()
            choices += tuple(
                each[keyword]
                for keyword in ("anyOf", "oneOf")
                if isinstance(each.get(keyword), list)
            )
        if not choices:
            yield flat
            return
        for alternative in choices[0]:
            yield from self._flat([alternative], choices[1:], flat)

    def _ways_of(self, flat: tuple[Mapping[str, Any], ...]) -> Iterator[list[_Together]]:
        types = set(TYPES)
        for each in flat:
            kind = each.get("type")
            listed = _strings(kind if isinstance(kind, list) else [kind]) or TYPES
            types &= {*listed, "integer"} if "number" in listed else set(listed)
        if types - {"object", "array"} or any("enum" in each or "const" in each for each in flat):
            yield []
            return
        if "object" in types:
            names = [name for each in flat for name in _strings(each.get("required"))]
            parts = [self._together(_of_property(each, name) for each in flat) for name in names]
            if None not in parts:
                yield [part for part in parts if part]
        if "array" in types:
            least = [each.get("minItems") for each in flat]
            num = min(max((n for n in least if isinstance(n, int)), default=0), _MAX_ITEMS)
            parts = [self._together(_of_item(each, at) for each in flat) for at in range(num)]
            if None not in parts:
                yield [part for part in dict.fromkeys(parts) if part]

    def _together(self, found: Iterator[Sequence[Any]]) -> _Together | None:
        """None: one of them is `false`."""
        schemas = [each for several in found for each in several]
        if any(each is False for each in schemas):
            return None
        return frozenset(id(each) for each in schemas if id(each) in self._schemas)


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _of_property(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    """What it says of a property."""
    found = []
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        found.append(properties[name])
    for pattern, each in patterns.items() if isinstance(patterns, Mapping) else ():
        try:
            if re.search(pattern, name):
                found.append(each)
        except re.error:
            return found or [True]
    return found or [schema.get("additionalProperties", True)]


def _of_item(schema: Mapping[str, Any], at: int) -> Sequence[Any]:
    items = schema.get("items", True)
    is_older = isinstance(items, list)
    first = items if is_older else schema.get("prefixItems")
    if isinstance(first, list) and at < len(first):
        return [first[at]]
    return [schema.get("additionalItems", True) if is_older else items]
