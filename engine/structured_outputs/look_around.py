"""Regular expressions with look-around, written without it: llguidance's have none.

`^(?=A)(?!B)C$` is three expressions that hold together. What stands elsewhere is
computed: a deterministic automaton from derivatives (Brzozowski, "Derivatives of Regular
Expressions", 1964; look-ahead is a conjunction, look-behind an automaton beside it), and an
expression from its states. Both are exact. Characters are read as in ECMA-262 with `u`: `\\d`,
`\\w` and `\\b` are ASCII's.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

_MARK = re.compile(r"(?P<mark>\(\?<?[=!]|\\[bBk1-9])|\\.", re.DOTALL)  # or what looks like one
_MAX_STATES = 300
_MAX_STEPS = 8_000  # nodes read for the derivatives of one expression; zod's take 3,000, in 10 ms
_MAX_CHARS = 8_000  # of the result
_MAX_PATTERN_CHARS = 1_000
_NAMED_GROUP = re.compile(r"\(\?<(?![=!])")

_LAST = 0x10FFFF
_Ranges = tuple[tuple[int, int], ...]
_ALL: _Ranges = ((0, 0xD7FF), (0xE000, _LAST))
_DIGITS: _Ranges = ((48, 57),)
_WORDS: _Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: _Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip

# A node is a tuple of its kind and its parts, a sequence a tuple of nodes.
_Node = tuple[Any, ...]
_Nodes = tuple[_Node, ...]
_ANY: _Node = ("repeat", 0, None, (("chars", _ALL),))
_BEGIN: _Node = ("begin",)
_END: _Node = ("end",)
# True, False, a sequence of nodes (`("then", nodes)`), or "and", "or" and "not" of such.
_Formula = Any


class IrreducibleError(ValueError):
    """The expression cannot be written without look-around, or takes too much to be."""


def look_around_in(pattern: str) -> str | None:
    """The first look-around, boundary of a word or backreference in a pattern."""
    return next((found["mark"] for found in _MARK.finditer(pattern) if found["mark"]), None)


def has_look_around(pattern: str) -> bool:
    return look_around_in(pattern) is not None


class Rewritten(NamedTuple):
    """
    Attributes:
        patterns: without look-around; they are searched for in a text, and all found in the same
            texts as the one that was given. None: there are none, or they take too long to find.
        num_steps: what it took, up to some 8,000.
    """

    patterns: tuple[str, ...] | None
    num_steps: int


@lru_cache(maxsize=256)
def rewritten(pattern: str, *, is_whole: bool = False) -> Rewritten:
    """
    Args:
        is_whole: as one pattern.
    """
    budget = _Budget()
    try:
        if is_whole:
            return Rewritten((_written(_parsed(pattern), budget),), budget.num_steps)
        return Rewritten(_split(pattern, budget), budget.num_steps)
    except IrreducibleError:
        return Rewritten(None, budget.num_steps)


class _Budget:
    num_steps = 0

    def take(self) -> None:
        self.num_steps += 1
        if self.num_steps > _MAX_STEPS:
            raise IrreducibleError


def _split(pattern: str, budget: _Budget) -> tuple[str, ...]:
    """Patterns that hold together. Raises: IrreducibleError."""
    nodes = list(_parsed(pattern))
    found: list[str] = []
    if nodes[:1] == [_BEGIN]:
        while len(nodes) > 1 and nodes[1][0] == "ahead":
            _, body, is_negative = nodes.pop(1)
            found.append(_written((_BEGIN, *body), budget, is_negative=is_negative))
    if nodes[-1:] == [_END]:
        while len(nodes) > 1 and nodes[-2][0] == "behind":
            _, body, is_negative = nodes.pop(-2)
            found.append(_written((*body, _END), budget, is_negative=is_negative))
    return (*found, _written(tuple(nodes), budget))


def _written(nodes: _Nodes, budget: _Budget, *, is_negative: bool = False) -> str:
    """An expression that is found where these nodes are, or are not, without look-around."""
    if not is_negative and not any(each[0] in ("ahead", "behind") for each in _all(nodes)):
        return _shown(nodes)
    return _Automaton(nodes, budget, is_negative=is_negative).expression()


# -- from text to nodes --------------------------------------------------------------------------


def _parsed(pattern: str) -> _Nodes:
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise IrreducibleError
    try:
        # CPython's own parser. What it does not know of ECMA-262 (`\p`, `\c`) is an error.
        parsed = importlib.import_module("re._parser").parse(_NAMED_GROUP.sub("(?P<", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise IrreducibleError from error
    if parsed.state.flags & ~re.UNICODE:
        raise IrreducibleError
    return _nodes_of(parsed)


def _nodes_of(parsed: Iterable[tuple[Any, Any]]) -> _Nodes:
    return tuple(_node_of(str(kind), value) for kind, value in parsed)


def _node_of(kind: str, value: Any) -> _Node:
    match kind:
        case "LITERAL":
            return "chars", ((value, value),)
        case "NOT_LITERAL":
            return "chars", _complement(((value, value),))
        case "ANY":
            return "chars", _complement(((10, 10),))
        case "IN":
            return "chars", _class_of(value)
        case "BRANCH":
            return "either", tuple(_nodes_of(each) for each in value[1])
        case "SUBPATTERN" if not (value[1] or value[2]):
            return "group", _nodes_of(value[3])
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, body = value
            return "repeat", least, most if most < (1 << 31) else None, _nodes_of(body)
        case "ASSERT" | "ASSERT_NOT":
            direction, body = value
            is_negative = kind == "ASSERT_NOT"
            return "ahead" if direction > 0 else "behind", _nodes_of(body), is_negative
        case "FAILURE":  # `(?!)`
            return "chars", ()
        case "AT":
            return _edge_of(str(value))
    raise IrreducibleError


def _edge_of(name: str) -> _Node:
    if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return _BEGIN
    if name in ("AT_END", "AT_END_STRING"):
        return _END
    is_boundary = name == "AT_BOUNDARY"
    word = (("chars", _WORDS),)
    after_word = (("behind", word, False), ("ahead", word, is_boundary))
    after_other = (("behind", word, True), ("ahead", word, not is_boundary))
    return "either", (after_word, after_other)


def _class_of(items: Sequence[tuple[Any, Any]]) -> _Ranges:
    ranges: list[tuple[int, int]] = []
    is_negative = False
    for kind, value in items:
        if str(kind) == "NEGATE":
            is_negative = True
        elif str(kind) == "LITERAL":
            ranges.append((value, value))
        elif str(kind) == "RANGE":
            ranges.append(value)
        else:
            _, is_not, name = str(value).rpartition("NOT_")
            named = {"DIGIT": _DIGITS, "WORD": _WORDS, "SPACE": _SPACES}
            known = named.get(name.removeprefix("CATEGORY_"))
            if known is None:
                raise IrreducibleError
            ranges += _complement(known) if is_not else known
    return _complement(ranges) if is_negative else tuple(sorted(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    left, start = [], 0
    for low, high in [*sorted([*ranges, (0xD800, 0xDFFF)]), (_LAST + 1, _LAST + 1)]:
        if start < low:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return tuple(left)


def _all(nodes: _Nodes) -> Iterator[_Node]:
    for each in nodes:
        yield each
        if each[0] == "either":
            for body in each[1]:
                yield from _all(body)
        elif each[0] in ("group", "ahead", "behind"):
            yield from _all(each[1])
        elif each[0] == "repeat":
            yield from _all(each[3])


# -- from nodes to text --------------------------------------------------------------------------


def _shown(nodes: _Nodes) -> str:
    """Nodes without look-around."""
    return "".join(map(_shown_node, nodes))


def _shown_node(node: _Node) -> str:
    match node[0]:
        case "chars":
            return _shown_class(node[1])
        case "either":
            return f"(?:{'|'.join(map(_shown, node[1]))})"
        case "group":
            return f"(?:{_shown(node[1])})"
        case "repeat":
            _, least, most, body = node
            return f"(?:{_shown(body)}){{{least},{'' if most is None else most}}}"
        case "begin":
            return "^"
        case _:
            return "$"


def _shown_class(ranges: _Ranges) -> str:
    if not ranges:
        raise IrreducibleError  # nothing matches it
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _shown_char(ranges[0][0])
    parts = (
        _shown_char(low) + ("" if low == high else f"-{_shown_char(high)}") for low, high in ranges
    )
    return f"[{''.join(parts)}]"


def _shown_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


# -- the automaton -------------------------------------------------------------------------------


class _State(NamedTuple):
    formula: _Formula
    behind: tuple[_Formula, ...]  # of each look-behind, what of it was read so far
    is_start: bool


class _Automaton:
    """An automaton of the texts in which an expression is found, or is not."""

    def __init__(self, nodes: _Nodes, budget: _Budget, *, is_negative: bool) -> None:
        self._budget = budget
        self._bodies: list[_Nodes] = []  # of the look-behinds
        for each in _all(nodes):
            if each[0] == "behind" and each[1] not in self._bodies:
                self._bodies.append(each[1])
        if any(
            inner[0] in ("ahead", "behind", "end") for each in self._bodies for inner in _all(each)
        ):
            raise IrreducibleError
        self._classes = _classes_of(each[1] for each in _all(nodes) if each[0] == "chars")
        self._state = _State(True, (), is_start=True)
        formula: _Formula = ("then", (_ANY, *nodes, _ANY))
        if is_negative:
            formula = _not(formula)
        behind = tuple(("then", (_ANY, *each)) for each in self._bodies)
        self._build(_State(formula, behind, is_start=True))

    def _build(self, start: _State) -> None:
        numbers = {start: 0}
        self.next: list[list[int]] = []
        self.is_final: list[bool] = []
        waiting = [start]
        for state in waiting:
            self._state = state
            self.is_final.append(self._is_end(state.formula))
            row = []
            for ranges in self._classes:
                char = ranges[0][0]
                after = _State(
                    self._after(state.formula, char),
                    tuple(self._after(each, char) for each in state.behind),
                    is_start=False,
                )
                if after not in numbers:
                    numbers[after] = len(numbers)
                    waiting.append(after)
                row.append(numbers[after])
            self.next.append(row)
            if len(numbers) > _MAX_STATES:
                raise IrreducibleError

    def _is_end(self, formula: _Formula) -> bool:
        """Whether a text may end here."""
        match formula:
            case bool():
                return formula
            case ("and", parts):
                return all(map(self._is_end, parts))
            case ("or", parts):
                return any(map(self._is_end, parts))
            case ("not", part):
                return not self._is_end(part)
            case (_, nodes):
                return all(map(self._may_be_empty, nodes))
        raise AssertionError(formula)

    def _may_be_empty(self, node: _Node) -> bool:
        match node[0]:
            case "chars":
                return False
            case "either":
                return any(all(map(self._may_be_empty, body)) for body in node[1])
            case "group":
                return all(map(self._may_be_empty, node[1]))
            case "repeat":
                return node[1] == 0 or all(map(self._may_be_empty, node[3]))
            case "ahead":
                return all(map(self._may_be_empty, node[1])) != bool(node[2])
            case _:
                return self._is_edge(node)

    def _is_edge(self, node: _Node) -> bool:
        """Whether a begin, an end or a look-behind holds here, if the text ends here."""
        if node[0] == "behind":
            read = self._state.behind[self._bodies.index(node[1])]
            return self._is_end(read) != bool(node[2])
        return node[0] == "end" or self._state.is_start

    def _after(self, formula: _Formula, char: int) -> _Formula:
        """What has to follow after a character."""
        match formula:
            case bool():
                return formula
            case ("and", parts):
                return _and(self._after(each, char) for each in parts)
            case ("or", parts):
                return _or(self._after(each, char) for each in parts)
            case ("not", part):
                return _not(self._after(part, char))
            case (_, nodes):
                return self._after_nodes(nodes, char, frozenset())
        raise AssertionError(formula)

    def _after_nodes(self, nodes: _Nodes, char: int, begun: frozenset[_Nodes]) -> _Formula:
        """
        Args:
            begun: sequences that began with a repetition, of which nothing was read since.
        """
        self._budget.take()
        if not nodes:
            return False
        node, rest = nodes[0], nodes[1:]
        match node[0]:
            case "chars":
                return any(low <= char <= high for low, high in node[1]) and _then(rest)
            case "either":
                return _or(self._after_nodes((*body, *rest), char, begun) for body in node[1])
            case "group":
                return self._after_nodes((*node[1], *rest), char, begun)
            case "repeat":
                _, least, most, body = node
                if nodes in begun or most == 0:
                    return self._after_nodes(rest, char, begun) if least == 0 else False
                if nodes == (_ANY,):
                    return True
                left = ("repeat", max(least - 1, 0), None if most is None else most - 1, body)
                again = self._after_nodes((*body, left, *rest), char, begun | {nodes})
                return again if least else _or((again, self._after_nodes(rest, char, begun)))
            case "ahead":
                found = self._after_nodes((*node[1], _ANY), char, frozenset())
                found = _not(found) if node[2] else found
                return _and((found, self._after_nodes(rest, char, begun)))
            case "end":
                return False
            case _:
                return self._is_edge(node) and self._after_nodes(rest, char, begun)

    # -- from states to an expression --

    def expression(self) -> str:
        """An expression of whole texts, by removing one state after the other."""
        group, num_groups = self._merged()
        classes = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        graph, first, last = _Graph(), num_groups, num_groups + 1
        graph.join(first, group[0], "")
        for state, row in enumerate(self.next):
            if state == group.index(group[state]):
                if self.is_final[state]:
                    graph.join(group[state], last, "")
                for ranges, after in zip(self._classes, row, strict=True):
                    classes[group[state], group[after]] += ranges
        for (one, other), several in classes.items():
            graph.join(one, other, _shown_class(_joined(several)))
        waiting = set(range(num_groups))
        while waiting:
            state = min(waiting, key=graph.weight)
            waiting.remove(state)
            graph.remove(state)
        if last not in graph.edges[first]:
            raise IrreducibleError  # no text matches it
        return f"^(?:{graph.edges[first][last]})$"

    def _merged(self) -> tuple[list[int], int]:
        """The number of each state's class of equal ones (Moore, 1956), and how many there are."""
        group, num_groups = [int(each) for each in self.is_final], len(set(self.is_final))
        while True:
            keys = [
                (group[state], *(group[after] for after in row))
                for state, row in enumerate(self.next)
            ]
            numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            group = [numbers[key] for key in keys]
            if len(numbers) == num_groups:
                return group, num_groups
            num_groups = len(numbers)


class _Graph:
    """States, and expressions of the texts that lead from one to another."""

    def __init__(self) -> None:
        self.edges = defaultdict[int, dict[int, str]](dict)
        self._sources = defaultdict[int, set[int]](set)

    def join(self, one: int, other: int, text: str) -> None:
        known = self.edges[one].get(other)
        made = text if known is None else _either(known, text)
        if len(made) > _MAX_CHARS:
            raise IrreducibleError
        self.edges[one][other] = made
        self._sources[other].add(one)

    def weight(self, state: int) -> int:
        """How much more is written if it is removed next (Delgado and Morais, "Approximation to
        the Smallest Regular Expression for a Given Regular Language", 2004)."""
        own = self.edges[state]
        sources = self._sources[state] - {state}
        num_in, num_out = len(sources), len(own) - (state in own)
        before = sum(len(self.edges[source][state]) for source in sources)
        after = sum(len(text) for other, text in own.items() if other != state)
        loop = len(own.get(state, ""))
        return before * (num_out - 1) + after * (num_in - 1) + loop * (num_in * num_out - 1)

    def remove(self, state: int) -> None:
        """Write what leads through it as edges beside it."""
        own = self.edges.pop(state)
        loop = own.pop(state, None)
        again = f"{_unit(loop)}*" if loop else ""
        for after in own:
            self._sources[after].discard(state)
        for source in self._sources.pop(state, set()) - {state}:
            before = self.edges[source].pop(state)
            for after, text in own.items():
                self.join(source, after, f"{before}{again}{text}")


def _unit(text: str) -> str:
    """A text that an operator may follow."""
    is_class = text.startswith("[") and text.index("]") == len(text) - 1
    return text if is_class or len(text) == 1 else f"(?:{text})"


def _either(one: str, other: str) -> str:
    if not one or not other:
        return f"{_unit(one or other)}?" if one or other else ""
    return f"(?:{one}|{other})"


def _joined(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def _classes_of(sets: Iterable[_Ranges]) -> list[_Ranges]:
    """Characters that no set tells apart, together."""
    distinct = list(dict.fromkeys((*sets, _ALL)))
    bounds = sorted({end for each in distinct for low, high in each for end in (low, high + 1)})
    classes = defaultdict[tuple[bool, ...], list[tuple[int, int]]](list)
    for low, above in pairwise(bounds):
        if not 0xD800 <= low <= 0xDFFF:
            key = tuple(any(a <= low <= b for a, b in each) for each in distinct)
            classes[key].append((low, above - 1))
    return [_joined(each) for each in classes.values()]


def _then(nodes: _Nodes) -> _Formula:
    return True if nodes == (_ANY,) else ("then", nodes)


def _and(parts: Iterable[_Formula]) -> _Formula:
    return _combined("and", parts, neutral=True)


def _or(parts: Iterable[_Formula]) -> _Formula:
    return _combined("or", parts, neutral=False)


def _combined(kind: str, parts: Iterable[_Formula], *, neutral: bool) -> _Formula:
    made = set[_Formula]()
    for each in parts:
        if each is neutral:
            continue
        if isinstance(each, bool):
            return each
        made |= each[1] if each[0] == kind else {each}
    if len(made) < 2:
        return made.pop() if made else neutral
    return kind, frozenset(made)


def _not(part: _Formula) -> _Formula:
    if isinstance(part, bool):
        return not part
    return part[1] if part[0] == "not" else ("not", part)
