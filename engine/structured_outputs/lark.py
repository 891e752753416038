"""Grammars as llguidance takes them, in its dialect of Lark; and from GBNF to it.

GBNF is llama.cpp's (`grammars/README.md`); what vLLM and SGLang call EBNF is the same. Its rules
are about characters, Lark's about lexemes, and llguidance's lexer takes a lexeme as long as it can
be. So what is not recursive becomes one lexeme, up to what is; in a recursive grammar without its
repeated white space, of which each character is a lexeme: `ws "\\n"` would never get to its end.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError

FORMS = "a grammar is in Lark (llguidance's, from the rule `start`) or in GBNF (from `root ::= …`)"
_MAX_GBNF_CHARS = 32 << 10  # some 50 ms
_MAX_NESTED = 64
_IS_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]*start\b[^:\n]*:(?!:))")
_DELETE = "\x7f"  # in a text the only character that the lexer of Lark does not take as it is
_TOKEN = re.compile(
    r"""(?P<space>[\s]+|\#[^\n]*)|(?P<rule>[A-Za-z0-9_-]+)\s*::=|(?P<name>[A-Za-z0-9_-]+)
    |(?P<text>"(?:\\.|[^"\\\n])*")|(?P<class>\[(?:\\.|[^\]\\])*\])
    |(?P<times>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|[*+?])|(?P<other>[().|])""",
    re.VERBOSE | re.DOTALL,
)
# A text, a comment, a regular expression or a name; and what names tokens by their ids.
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<\s*\[[^\]>]*\]?\s*>?)')
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}

# A part is a tuple of its kind and what it is of: "text", "rule" and a text; "class", a regular
# expression and whether it is white space; "either" and "then", parts; "times", a part and the
# operator.
_Part = tuple[Any, ...]


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False).replace(_DELETE, "\\u007f")


def as_lark(grammar: str) -> str:
    """
    Args:
        grammar: Lark or GBNF.

    Raises:
        InvalidRequestError: it is GBNF, and invalid; or it names tokens (`<[5]>`): a grammar is of
            texts, and no special token is one.
    """
    if "::=" not in grammar or _IS_LARK.search(grammar):
        _check_no_tokens(grammar)
        return grammar
    if len(grammar) > _MAX_GBNF_CHARS:
        raise InvalidRequestError(f"it has more than {_MAX_GBNF_CHARS:,} characters of GBNF")
    rules = _Parser(grammar).rules()
    return _Writer(rules).lark()


def _check_no_tokens(grammar: str) -> None:
    """Raises: InvalidRequestError."""
    for found in _LARK_TOKEN.finditer(grammar):
        if found[1] is not None:
            raise InvalidRequestError(
                f"{found[1][:40]!r} names tokens, which is not supported: write their text"
            )


def _fault(line: int, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"line {line}: {fault}; {FORMS}")


class _Parser:
    """Reads GBNF. A rule ends where the next one begins, so lines may break anywhere."""

    def __init__(self, text: str) -> None:
        self._tokens = list(self._read(text))
        self._at = 0

    @staticmethod
    def _read(text: str) -> Iterator[tuple[str, str, int]]:
        at, line = 0, 1
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise _fault(line, f"{text[at : at + 20].split()[0]!r} is not expected in GBNF")
            kind = str(found.lastgroup)
            if kind != "space":
                yield kind, found[kind], line
            line += found[0].count("\n")
            at = found.end()
        yield "end", "the end", line

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def rules(self) -> dict[str, _Part]:
        """Raises: InvalidRequestError."""
        made: dict[str, _Part] = {}
        lines: dict[str, int] = {}
        while True:
            kind, name, line = self._take()
            if kind == "end":
                break
            if kind != "rule":
                raise _fault(line, f"expected a rule's name and '::=', not {name!r:.40}")
            made[name] = self._alternatives(0)
            lines[name] = line
        for name, part in made.items():
            for used in _rules_in(part):
                if used not in made:
                    raise _fault(lines[name], f"there is no rule {used!r:.40}")
        if "root" not in made:
            raise InvalidRequestError(f"there is no rule 'root'; {FORMS}")
        return made

    def _alternatives(self, depth: int) -> _Part:
        parts = [self._sequence(depth)]
        while self._tokens[self._at][1] == "|" and self._tokens[self._at][0] == "other":
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else ("either", parts)

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while True:
            kind, text, line = self._tokens[self._at]
            if kind in ("rule", "end") or (kind == "other" and text in "|)"):
                return parts[0] if len(parts) == 1 else ("then", parts)
            self._at += 1
            if kind == "times":
                if not parts:
                    raise _fault(line, f"{text!r} has nothing to repeat")
                parts[-1] = ("times", parts[-1], "".join(text.split()))
            elif kind == "name":
                parts.append(("rule", text))
            elif kind == "text":
                parts.append(("text", "".join(_chars(text[1:-1], line))))
            elif kind == "class":
                parts.append(_class(text[1:-1], line))
            elif text == ".":
                parts.append(("class", "(?s:.)", False))
            else:
                if depth > _MAX_NESTED:
                    raise _fault(line, f"it is nested more than {_MAX_NESTED} deep")
                parts.append(self._alternatives(depth + 1))
                if self._take()[1] != ")":
                    raise _fault(line, "'(' has no ')'")


def _chars(text: str, line: int) -> Iterator[str]:
    for found in _ESCAPE.finditer(text):
        number = found[1] or found[2] or found[3]
        if number is not None:
            code = int(number, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise _fault(line, f"{found[0]!r} is no character")
            yield chr(code)
        elif found[4] is None:
            yield found[5]
        elif found[4] in _CONTROLS:
            yield _CONTROLS[found[4]]
        elif found[4].isalnum():
            raise _fault(line, f"{found[0]!r} is no escape of GBNF")
        else:
            yield found[4]


def _class(text: str, line: int) -> _Part:
    """A class of characters."""
    is_negative = text.startswith("^")
    body = text[is_negative:]
    # A '-' that is escaped is a character; one between two characters makes a range.
    marked = [
        (char, len(found[0]) > 1)
        for found, char in zip(_ESCAPE.finditer(body), _chars(body, line), strict=True)
    ]
    parts: list[str] = []
    at = 0
    while at < len(marked):
        char = marked[at][0]
        if at + 2 < len(marked) and marked[at + 1] == ("-", False):
            if char > marked[at + 2][0]:
                raise _fault(line, f"[{text:.40}] has a range that ends before it begins")
            parts.append(f"{_code(char)}-{_code(marked[at + 2][0])}")
            at += 3
        else:
            parts.append(_code(char))
            at += 1
    if not parts:
        raise _fault(line, f"[{text}] is an empty class")
    is_space = not is_negative and all(char.isspace() for char, _ in marked)
    return "class", f"[{'^' if is_negative else ''}{''.join(parts)}]", is_space


def _code(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _rules_in(part: _Part) -> Iterator[str]:
    if part[0] == "rule":
        yield part[1]
    elif part[0] in ("either", "then"):
        for each in part[1]:
            yield from _rules_in(each)
    elif part[0] == "times":
        yield from _rules_in(part[1])


class _Writer:
    """Writes Lark: terminals of what is not recursive, and rules of the rest."""

    def __init__(self, rules: Mapping[str, _Part]) -> None:
        self._rules = rules
        self._spaces: dict[str, bool] = {}  # rules that were looked at
        self._recursive = _reaching(rules, ())
        if "root" in self._recursive:
            loose = {name for name, part in rules.items() if self._is_loose(part)}
            self._recursive = _reaching(rules, loose)
        self._names: dict[str, str] = {}
        for name in rules:
            word = re.sub(r"\W", "_", name.lower(), flags=re.ASCII).strip("_") or "rule"
            word = f"gbnf_{len(self._names)}_{word}"
            self._names[name] = word if name in self._recursive else word.upper()
        self._terminals: list[str] = []

    def lark(self) -> str:
        """The grammar. Rules that nothing uses are left out."""
        used, waiting = {"root": None}, ["root"]
        for name in waiting:
            for each in _rules_in(self._rules[name]):
                if each not in used:
                    used[each] = None
                    waiting.append(each)
        lines = [f"start: {self._names['root']}"]
        lines += [f"{self._names[name]}: {self._written(self._rules[name])}" for name in used]
        return "\n".join([*lines, *self._terminals])

    def _is_terminal(self, part: _Part) -> bool:
        is_recursive = not self._recursive.isdisjoint(_rules_in(part))
        return not is_recursive and ("root" not in self._recursive or not self._is_loose(part))

    def _is_loose(self, part: _Part) -> bool:
        """Whether it has repeated white space, not counting the rules that it names."""
        if part[0] == "times":
            return self._is_space(part[1]) or self._is_loose(part[1])
        return part[0] in ("either", "then") and any(map(self._is_loose, part[1]))

    def _is_space(self, part: _Part, depth: int = 0) -> bool:
        match part:
            case ("text", text):
                return not text.strip()
            case ("class", _, is_space):
                return bool(is_space)
            case ("rule", name):
                if name not in self._spaces:
                    self._spaces[name] = False  # if it needs itself to be
                    is_deep = depth > _MAX_NESTED
                    is_space = not is_deep and self._is_space(self._rules[name], depth + 1)
                    self._spaces[name] = is_space
                return self._spaces[name]
            case ("times", inner, _):
                return self._is_space(inner, depth)
        return all(self._is_space(each, depth) for each in part[1])

    def _written(self, part: _Part) -> str:
        """A part of a rule or, if nothing in it is recursive, of a terminal."""
        match part:
            case ("text", text):
                return quoted(text)
            case ("class", pattern, _):
                return f"/{pattern}/"
            case ("rule", name):
                return self._names[name]
            case ("times", inner, operator):
                return f"({self._grouped([inner])}){operator}"
            case ("either", parts):
                return f"({' | '.join(self._grouped([each]) for each in parts)})"
            case (_, parts):
                return self._grouped(parts) if parts else '""'
        raise AssertionError(part)

    def _grouped(self, parts: Sequence[_Part]) -> str:
        """A sequence; within a rule, runs of it that are terminals become one each."""
        if all(map(self._is_terminal, parts)):
            return " ".join(f"({self._written(each)})" for each in parts) or '""'
        made: list[str] = []
        run: list[_Part] = []
        for each in [*parts, None]:
            if each is not None and self._is_terminal(each):
                run.append(each)
                continue
            if run:
                made.append(self._terminal(run))
                run = []
            if each is not None:
                made.append(self._written(each))
        return " ".join(made)

    def _terminal(self, run: Sequence[_Part]) -> str:
        if len(run) == 1 and run[0][0] in ("text", "rule"):
            return self._written(run[0])
        name = f"GBNF_RUN_{len(self._terminals)}"
        self._terminals.append(f"{name}: {self._grouped(run)}")
        return name


def _reaching(rules: Mapping[str, _Part], some: Collection[str]) -> set[str]:
    """Rules that reach themselves, one that does, or one of some."""
    left = {name: set(_rules_in(part)) for name, part in rules.items()}
    users = defaultdict[str, list[str]](list)
    for name, used in left.items():
        for each in used:
            users[each].append(name)
    plain = [name for name, used in left.items() if not used and name not in some]
    for name in plain:
        for user in users[name]:
            left[user].discard(name)
            if not left[user] and user not in some:
                plain.append(user)
    return set(rules) - set(plain)
