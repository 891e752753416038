"""How a model writes calls, as a value: the texts around a call's name and arguments.

`template_facts` reads it off a chat template. From it come a parser and a grammar: `read_as`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from penstock.engine.chat_formats.literals import (
    any_literal,
    literal_arguments,
    literal_grammar,
    literals_written,
)
from penstock.engine.chat_formats.parser import Scanner, Steps, Tool, Write
from penstock.engine.chat_formats.tool_format import (
    ARGUMENT_KEYS,
    ARGUMENTS,
    ID,
    KEY,
    NAME,
    NAME_KEYS,
    NUMBER,
    TYPE,
    VALUE,
    Frame,
    ToolFormat,
    kinds_of,
    read_object,
    skip_all,
    xml_arguments,
    xml_value,
    xml_written,
)

_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\S+")
_MAX_SHOWN_CHARS = 60
_ARGUMENTS = {"json": "JSON", "tags": "a tag per argument", "literals": "literals"}
_BROKEN = "\ufffd"  # a character that is not whole, where an output was cut off
_HOLE = re.compile(f"([{NAME}-{VALUE}])")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The texts of a call.

    Attributes:
        call: one call, with `NAME`, `ARGUMENTS` and perhaps `ID` and `NUMBER`, which counts calls.
        first, between, last: around all calls of an output.
        arguments: a JSON object, a tag for each, or literals as in Python or JavaScript.
        argument: one argument, unless they are JSON: with `KEY`, `VALUE` and perhaps `TYPE`.
        separator: between arguments; of JSON, a line end where it is written in lines.
        quote: around texts, among literals; of tags, within lists and objects that are not JSON.
        types: JSON type → what stands for `TYPE`.
    """

    call: str
    first: str = ""
    between: str = ""
    last: str = ""
    arguments: Literal["json", "tags", "literals"] = "json"
    argument: str = ""
    separator: str = ""
    quote: str = ""
    types: tuple[tuple[str, str], ...] = ()

    @property
    def described(self) -> str:
        """In a phrase: how the first call begins, and how arguments are written."""
        begun = " ".join(_HOLE.split(f"{self.first}{self.call}")[0].split())[:_MAX_SHOWN_CHARS]
        return f"{begun or NAME}… with {_ARGUMENTS[self.arguments]}".replace(NAME, "name")

    @property
    def texts(self) -> tuple[str, ...]:
        """All that may contain special tokens."""
        parts = (self.first, self.call, self.between, self.last, self.argument, self.quote)
        return tuple(text for part in parts for text in _HOLE.split(part) if text)


def call_format_of(fields: Mapping[str, Any]) -> CallFormat:
    """The inverse of `dataclasses.asdict`."""
    types = tuple((kind, text) for kind, text in fields["types"])
    return CallFormat(**{**fields, "types": types})


class _Envelope(NamedTuple):
    """A call that is a JSON object.

    Attributes:
        begin, end: before and after it.
        name_keys, argument_keys: of its name and arguments.
        within: keys of objects that have these.
    """

    begin: str
    end: str
    name_keys: tuple[str, ...]
    argument_keys: tuple[str, ...]
    within: tuple[str, ...]


def _envelope(call: str) -> _Envelope | None:
    """None: the call is no JSON object."""
    sample = call.replace(NAME, "\0name").replace(ARGUMENTS, "{}").replace(NUMBER, "0")
    shown = json.dumps("\0name")[1:-1]
    sample = sample.replace("\0name", shown)
    at = sample.find("{")
    while 0 <= at <= sample.find(shown):
        try:
            value, end = json.JSONDecoder().raw_decode(sample, at)
        except ValueError:
            at = sample.find("{", at + 1)
            continue
        path = _path_of(value, "\0name")
        if path is None:
            return None
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        keys = tuple(key for key, each in holder.items() if each == {})
        if len(keys) != 1:
            return None
        names = tuple(dict.fromkeys((path[-1], *NAME_KEYS)))
        arguments = tuple(dict.fromkeys((*keys, *ARGUMENT_KEYS)))
        return _Envelope(sample[:at], sample[end:], names, arguments, tuple(path[:-1]))
    return None


def _path_of(value: Any, wanted: str) -> list[str] | None:
    if not isinstance(value, dict):
        return None
    for key, each in value.items():
        if each == wanted:
            return [key]
        below = _path_of(each, wanted)
        if below is not None:
            return [key, *below]
    return None


@lru_cache(maxsize=64)
def read_as(found: CallFormat) -> ToolFormat:
    """The parser of calls in a format, and what a grammar needs."""
    before = found.call.split(NAME)[0]
    envelope = _envelope(found.call)
    if envelope is not None:
        before = envelope.begin
    opening, own = _opening(found.first + before), _opening(before)
    words = _HOLE.split(before)[-1].split()
    # Models leave out `<tool_call>` before `<function=`.
    inner = words[-1] if len(words) > 1 and words[-1].startswith("<") else ""
    openings = tuple(dict.fromkeys(each for each in (opening, own, inner) if each))
    reader = _Reader(found, envelope, openings, own, inner)
    starts = "" if opening else (found.first + found.call).lstrip()[:1].replace(NAME, "")
    return ToolFormat(
        steps=reader.steps,
        markers=found.texts,
        openings=openings,
        starts=starts,
        frame=_frame(found, opening),
    )


def _opening(text: str) -> str:
    """The text at the beginning of calls that nothing else begins with; empty if there is none."""
    bare = _HOLE.split(text)[0].lstrip()
    marker = _MARKER.match(bare)
    if marker is None or not any(each.isalpha() for each in marker[0]):
        return bare.rstrip() if "<" in bare and len(bare.strip()) > 1 else ""
    return marker[0]


class _Reader:
    """Reads the calls of an output."""

    def __init__(
        self,
        found: CallFormat,
        envelope: _Envelope | None,
        openings: Sequence[str],
        own: str,
        inner: str,
    ) -> None:
        self._found, self._envelope = found, envelope
        self._openings, self._own, self._inner = openings, own, inner
        before, _, after = found.call.partition(NAME)
        self._middle, _, self._end = after.partition(ARGUMENTS)
        self._before = before if envelope is None else envelope.begin
        self._closing = self._end if envelope is None else envelope.end
        if found.arguments == "tags":
            self._key, self._value = found.argument.split(VALUE)[0].split(KEY)
            self._value_end = found.argument.split(VALUE)[1]

    def steps(self, scanner: Scanner) -> Steps[None]:
        found = self._found
        write: Write = scanner.say
        if not self._openings:
            yield from self._at_beginning(scanner)
            return
        ends = [scanner.answer_end] if scanner.answer_end else []
        while marker := (yield from scanner.read_until([*self._openings, *ends], write)):
            if marker in ends:
                write = len
                continue
            whole = found.first + self._before
            rest = whole if marker == self._openings[0] else self._before
            rest = "" if marker == self._inner else rest.lstrip().removeprefix(marker)
            if not (yield from self._calls(scanner, marker, rest)):
                continue
            write = len  # what comes after calls is dropped

    def _at_beginning(self, scanner: Scanner) -> Steps[None]:
        """Calls without a marker are all of an output."""
        yield from scanner.skip_space()
        whole = self._found.first + self._before
        is_call = yield from self._calls(scanner, "", whole)
        if is_call:
            yield from skip_all(scanner)
            return
        between = self._found.between.strip()
        ends = [scanner.answer_end] if scanner.answer_end else []
        ends += [between] if len(between) > 1 else []  # the prompt has it before the first
        if (found := (yield from scanner.read_until(ends, scanner.say))) == between and found:
            yield from self._calls(scanner, between, "")
        if found:
            yield from skip_all(scanner)

    def _calls(self, scanner: Scanner, begun: str, rest: str) -> Steps[bool]:
        """Read calls in a row; whether there was one.

        Args:
            begun: what was read of the first.
            rest: what comes before the name, or the object that has it.
        """
        has_called = False
        between, own = self._found.between + self._before, self._own
        while True:
            is_there = yield from read_literal(scanner, rest)
            if is_there or self._envelope is not None:
                is_there = yield from self._call(scanner, begun + (rest if is_there else ""))
            elif not has_called:
                scanner.say_unless_cut(begun)
            if not is_there:
                return has_called
            has_called = True
            yield from read_literal(scanner, self._closing)
            if own:
                last = _opening(self._found.last)
                ends = [each for each in (own, self._inner, last) if each]
                marker = yield from scanner.read_until(ends, len)
                if marker not in (own, self._inner) or not marker:
                    return True
                rest = "" if marker == self._inner else self._before.lstrip().removeprefix(own)
            else:
                if not between.strip():
                    yield from scanner.skip_space()
                    if self._envelope is None or (yield from scanner.peek()) != "{":
                        return True
                elif not (yield from read_literal(scanner, between)):
                    return True
                rest = ""
            begun = ""

    def _call(self, scanner: Scanner, begun: str) -> Steps[bool]:
        envelope = self._envelope
        if envelope is not None:
            return (
                yield from read_object(
                    scanner,
                    begun=begun,
                    name_keys=envelope.name_keys,
                    argument_keys=envelope.argument_keys,
                    within=envelope.within,
                )
            )
        name = yield from self._name(scanner)
        if name is not None and not (self._openings or name in scanner.tools):
            scanner.text, name = name + scanner.text, None
        if name is None:
            scanner.say_unless_cut(begun)
            return False
        scanner.call(name)
        is_there = yield from read_literal(scanner, self._middle)
        if scanner.is_cut and not is_there:
            scanner.text = ""  # it was cut off there
        tool = scanner.tools.get(name, Tool(name))
        if self._found.arguments == "json":
            yield from scanner.read_json(scanner.arguments)
            scanner.end_call()
        elif self._found.arguments == "tags":
            yield from self._tags(scanner, tool)
        else:
            assign = self._found.argument.removeprefix(KEY).removesuffix(VALUE).strip()
            close = self._end.lstrip()[:1]
            yield from literal_arguments(
                scanner, tool, assign=assign, close=close, quote=self._found.quote
            )
        return True

    def _name(self, scanner: Scanner) -> Steps[str | None]:
        """Read a name up to what follows it; None, and nothing read, if there is none."""
        ends = ["\n", _head(self._middle)]
        if not ends[1]:
            is_tags = self._found.arguments == "tags"
            ends[1] = _head(self._key) if is_tags else "{"
            ends.append(_head(self._end) or "\n")
        elif self._found.arguments == "json":
            ends.append("{")
        odd, most = "{}\"'" if _head(self._middle) else "<>{}\"'", 256
        while True:
            text = scanner.text[:most]
            found = [at for each in ends if (at := text.find(each, 1)) > 0]
            if found:
                at = min(found)
                name = text[:at].strip()
                if not name or any(each in name for each in odd):
                    return None
                scanner.text = scanner.text[at:]
                return name
            if scanner.is_over or len(scanner.text) >= most:
                return None
            yield

    def _tags(self, scanner: Scanner, tool: Tool) -> Steps[None]:
        separator = "{"
        key_ends = _head(_HOLE.split(self._value)[0]) or "\n"
        close = _head(self._end)
        is_alike = bool(self._key.strip()) and close.startswith(self._key.strip())
        while True:
            if is_alike and (yield from _comes(scanner, close)):
                break
            if not (yield from read_literal(scanner, self._key)):
                break
            key = yield from scanner.take_until(key_ends)
            if key is None:
                break
            scanner.text = key_ends + scanner.text
            key = key.strip()
            kinds = kinds_of(tool, key)
            if self._found.types and TYPE in self._value:
                before, after = self._value.split(TYPE)
                yield from read_literal(scanner, before)
                kind = yield from scanner.take_until(_head(after))
                scanner.text = _head(after) + scanner.text
                yield from read_literal(scanner, after)
                told = {each for each, text in self._found.types if text == (kind or "").strip()}
                kinds = kinds if kinds and kinds & told else told
            elif not (yield from read_literal(scanner, self._value)):
                break
            end = self._value_end.replace(KEY, key)
            ends = list(dict.fromkeys([end.rstrip(), end.strip()]))
            trailing = self._value[len(self._value.rstrip()) :]
            if trailing:
                yield from scanner.starts_with(trailing)
            scanner.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from xml_value(scanner, kinds, ends=[*ends, f"\n{close}"] if close else ends)
            if self._found.separator.strip():
                yield from read_literal(scanner, self._found.separator)
        scanner.end_call("}" if separator == ", " else "{}")


def _head(text: str) -> str:
    """The first word of a text."""
    words = _HOLE.split(text)[0].split()
    return words[0] if words else ""


def read_literal(scanner: Scanner, literal: str) -> Steps[bool]:
    """Read a text, however the white space in it is; nothing is read if it does not come."""
    if not literal.strip():
        return True
    while True:
        end = _end_of(scanner.text, literal)
        if end is None and not scanner.is_over:
            yield
            continue
        if not end:
            return False
        scanner.text = scanner.text[end:]
        return True


def _comes(scanner: Scanner, literal: str) -> Steps[bool]:
    """Whether a text comes next."""
    while (end := _end_of(scanner.text, literal)) is None and not scanner.is_over:
        yield
    return bool(end)


def _end_of(text: str, literal: str) -> int | None:
    """Where a text ends that begins with the literal; 0 if it does not; None: it may."""
    at = 0
    for character in literal:
        if character.isspace():
            continue
        if character in (ID, NUMBER, NAME):
            while at < len(text) and (text[at].isalnum() or text[at] in "_-.:"):
                at += 1
            if at == len(text):
                return None
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text) or text[at:] == _BROKEN:
            return None
        if text[at] != character:
            return 0
        at += 1
    return at


def _frame(found: CallFormat, opening: str) -> Frame:
    before, _, after = found.call.partition(NAME)
    middle, _, end = after.partition(ARGUMENTS)
    is_first = bool(found.first.strip())

    def parts(text: str, *, opens: bool = False) -> list[str]:
        bare = text.lstrip()
        if opens and opening and bare.startswith(opening):
            text, pre = bare.removeprefix(opening), [opening]
        else:
            pre = []
        return pre + [each for each in _HOLE.split(text) if each]

    def begin(name: str) -> list[str]:
        begun = f"{before}{NAME}{middle}".replace(NAME, name)
        return parts(begun, opens=not is_first)

    arguments: Any = None
    written: Any = None
    if found.arguments == "tags":
        key, value_end = found.argument.split(VALUE)

        def begin_of(name: str, kind: str = "string") -> str:
            return key.replace(KEY, name).replace(TYPE, dict(found.types).get(kind, ""))

        arguments = partial(
            xml_arguments,
            begin=begin_of,
            end=value_end,
            separator=found.separator,
            has_types=bool(found.types),
            also=partial(any_literal, quote=found.quote) if found.quote else None,
        )
        written = partial(xml_written, begin=begin_of, end=value_end, separator=found.separator)
    elif found.arguments == "literals":
        assign = found.argument.removeprefix(KEY).removesuffix(VALUE)
        options: dict[str, Any] = {
            "assign": assign,
            "separator": found.separator,
            "quote": found.quote,
        }
        arguments = partial(literal_grammar, **options)
        written = partial(literals_written, **options)
    return Frame(
        begin=begin,
        end=parts(end),
        first=parts(found.first, opens=True),
        between=parts(found.between),
        last=parts(found.last),
        arguments=arguments,
        written=written,
        is_spaced=found.arguments == "json" and "\n" in found.separator,
    )
