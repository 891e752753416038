"""How much a regular expression repeats. llguidance keeps no counters: `(a{1000}){1000}` is a
million states, which take seconds for a mask and hundreds of megabytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from penstock.engine.errors import InvalidRequestError

MAX_SIZE = 10_000  # some 10 ms and 5 MB
_ITEM = re.compile(r"\\.|\[(?:\\.|\^?\]?[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL)
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/((?:\\.|[^/\\\n])+)/|(%json)')


def size_of(pattern: str) -> int:
    """How many characters the pattern wants at least, every alternative counted."""
    open_sizes, size, last = list[int](), 0, 0
    for found in _ITEM.finditer(pattern):
        item, count = found[0], found[1]
        if count is not None:
            size += last * (max(int(count), 1) - 1)
            last *= max(int(count), 1)
        elif item == "(":
            open_sizes.append(size)
            size = last = 0
        elif item == ")" and open_sizes:
            last = size
            size += open_sizes.pop()
        elif item not in "*+?|":
            size, last = size + 1, 1
    return size + sum(open_sizes)


def is_balanced(pattern: str) -> bool:
    """Whether each bracket of a group has its other one."""
    depth = 0
    for found in _ITEM.finditer(pattern):
        depth += (found[0] == "(") - (found[0] == ")")
        if depth < 0:
            return False
    return depth == 0


def check_lark(grammar: str) -> None:
    """
    Raises:
        InvalidRequestError: a regular expression in it repeats too much.
    """
    for pattern in _patterns_in(grammar):
        fault = repetition_fault(pattern)
        if fault is not None:
            raise InvalidRequestError(f"the regular expression /{pattern:.40}/ {fault}", param="")


def repetition_fault(pattern: str) -> str | None:
    if size_of(pattern) <= MAX_SIZE:
        return None
    return f"repeats more than {MAX_SIZE:,} characters"


def _patterns_in(grammar: str) -> Iterator[str]:
    for found in _LARK_TOKEN.finditer(grammar):
        if found[1] is not None:
            yield found[1]
        elif found[2] is not None:
            try:
                schema, _ = json.JSONDecoder().raw_decode(grammar[found.end() :].lstrip())
            except ValueError:
                continue  # the compiler says so
            yield from _patterns_of(schema)


def _patterns_of(schema: object) -> Iterator[str]:
    """All texts that may be patterns, wherever they are."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
            if isinstance(each.get("pattern"), str):
                yield each["pattern"]
            if isinstance(each.get("patternProperties"), dict):
                yield from each["patternProperties"]
