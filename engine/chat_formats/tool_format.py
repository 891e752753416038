"""What a format of tool calls is, and what several formats share: JSON objects that name a
function, values in XML, and the grammar of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How one call of a function is written, for grammars: `begin`, its arguments, `end`. Markers
    are parts of their own, as they may be single tokens.

    Attributes:
        first, between, last: around all calls of an output.
        arguments: makes the rule of a tool's arguments, and may add rules; None: a JSON object.
    """

    begin: Callable[[str], Sequence[str]]
    end: Sequence[str]
    first: Sequence[str] = ()
    between: Sequence[str] = ()
    last: Sequence[str] = ()
    arguments: Callable[[Tool, list[str]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        steps: reads an output after its first thought.
        markers: texts that may be special tokens.
        first_characters: no call begins without one of them.
        frame: for grammars.
    """

    steps: Callable[[Scanner], Steps[None]]
    markers: tuple[str, ...]
    first_characters: str
    frame: Frame


def skip_all(scanner: Scanner) -> Steps[None]:
    """Drop the rest of the output."""
    while not scanner.is_over:
        scanner.text = ""
        yield
    scanner.text = ""


def read_object(scanner: Scanner, *, begun: str = "") -> Steps[bool]:
    """Read `{"name": …, "arguments": {…}}`, whichever comes first, and the call that it is.

    Args:
        begun: what was read before, which is text if this is no call.

    Returns: whether it is one.
    """
    read: list[str] = [begun]
    name: str | None = None
    held: list[str] | None = None  # arguments that came before the name

    def failed() -> bool:
        if name is None:
            scanner.say("".join(read))
        return name is not None

    def fetch(marker: str) -> Steps[bool]:
        yield from _space(scanner, read)
        is_there = yield from scanner.starts_with(marker)
        read.append(marker if is_there else "")
        return is_there

    if not (yield from fetch("{")):
        return failed()
    while True:
        yield from _space(scanner, read)
        key = yield from scanner.take_text()
        if key is None:
            break
        read.append(json.dumps(key))
        if not (yield from fetch(":")):
            break
        yield from _space(scanner, read)
        if key in NAME_KEYS and name is None:
            name = yield from scanner.take_text()
            if name is None:
                break
            scanner.call(name)
            if held is not None:
                scanner.arguments("".join(held))
        elif key in ARGUMENT_KEYS and held is None:
            held = []
            yield from scanner.read_json(held.append if name is None else scanner.arguments)
            read += held
        else:
            yield from scanner.read_json(read.append)
        if not (yield from fetch(",")):
            break
    if name is None:
        return failed()
    yield from fetch("}")
    scanner.end_call()
    return True


def _space(scanner: Scanner, read: list[str]) -> Steps[None]:
    """Read white space, and keep it."""
    while True:
        rest = scanner.text.lstrip()
        read.append(scanner.text[: len(scanner.text) - len(rest)])
        scanner.text = rest
        if rest or scanner.is_over:
            return
        yield


def json_frame(
    begin: str = "",
    end: str = "",
    *,
    key: str = "arguments",
    first: Sequence[str] = (),
    between: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Frame:
    """The frame of JSON objects between markers."""
    return Frame(
        begin=lambda name: [*_split(begin), f'{{"name": {json.dumps(name)}, "{key}": '],
        end=["}", *_split(end)],
        first=first,
        between=between,
        last=last,
    )


def _split(marker: str) -> list[str]:
    """A marker without the white space around it."""
    bare = marker.strip()
    before, _, after = marker.partition(bare) if bare else (marker, "", "")
    return [part for part in (before, bare, after) if part]


def typed(schema: Mapping[str, Any], text: str) -> str:
    """JSON text of a parameter's value that is written without quotes.

    Args:
        schema: of the parameter; a text if it says nothing.
    """
    kinds = types_of(schema)
    if not kinds or kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    if bare.lower() in ("null", "none") and ("null" in kinds or "string" not in kinds):
        return "null"
    if bare.lower() in ("true", "false") and "boolean" in kinds:
        return bare.lower()
    try:
        value = json.loads(bare)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or (isinstance(value, int | float) and "string" in kinds):
        return json.dumps(text, ensure_ascii=False)
    return bare


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema admits, as far as it says so plainly."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            found |= types_of(each) if isinstance(each, Mapping) else set()
    if not found and isinstance(schema.get("enum"), list):
        names = {str: "string", bool: "boolean", int: "integer", float: "number"}
        found = {names.get(type(value), "null") for value in schema["enum"]}
    return found


def escaped(text: str) -> str:
    """Text as it stands inside a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def xml_value(scanner: Scanner, schema: Mapping[str, Any], *, ends: Sequence[str]) -> Steps[None]:
    """Read a value up to one of its ends, and write it as JSON. A text is written as it comes."""
    kinds = types_of(schema)
    if not kinds or kinds == {"string"}:
        scanner.arguments('"')
        yield from scanner.read_until(ends, lambda text: scanner.arguments(escaped(text)))
        scanner.arguments('"')
        return
    read: list[str] = []
    yield from scanner.read_until(ends, read.append)
    scanner.arguments(typed(schema, "".join(read)))


def xml_arguments(tool: Tool, rules: list[str], *, begin: Callable[[str], str], end: str) -> str:
    """The grammar of arguments with a tag each, in the schema's order: those that are required, and
    any of the others. Texts are free, other values JSON.

    Args:
        rules: gets the rules that the result refers to.
    """
    parameters = tool.parameters or {}
    required = parameters.get("required") or ()
    parts: list[str] = []
    for key, schema in (parameters.get("properties") or {}).items():
        number = len(rules)
        texts = types_of(schema) <= {"string"} and not {"enum", "const", "pattern"} & set(schema)
        if texts:
            rules.append(f"value_{number}[suffix={json.dumps(end)}]: /(?s:.*)/")
            part = f"{json.dumps(begin(key), ensure_ascii=False)} value_{number}"
        else:
            whole = {**schema, **_definitions(parameters)}
            value = f"%json {json_options(whole, is_strict=tool.strict)}"
            if types_of(schema) <= {"string"}:  # written without quotes
                value = _choices(schema)
            part = f"{json.dumps(begin(key), ensure_ascii=False)} {value} {json.dumps(end)}"
        parts.append(f"({part})" if key in required else f"({part})?")
    return " ".join(parts)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _choices(schema: Mapping[str, Any]) -> str:
    """The grammar of a text that its schema limits."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        pattern = str(schema["pattern"]).removeprefix("^").removesuffix("$").replace("/", "\\/")
        return f"/{pattern}/"
    return "(" + " | ".join(json.dumps(str(each), ensure_ascii=False) for each in values) + ")"


def python_arguments(tool: Tool, rules: list[str]) -> str:
    """The grammar of named arguments. Their values are JSON's, of which `true`, `false` and `null`
    are read too."""
    parameters = tool.parameters or {}
    required = parameters.get("required") or ()
    properties = parameters.get("properties") or {}
    ordered = [key for key in properties if key in required]
    optional = [key for key in properties if key not in required]
    parts = []
    for index, key in enumerate([*ordered, *optional]):
        value = {**properties[key], **_definitions(parameters)}
        rule = json_options(value, is_strict=tool.strict)
        text = f"{json.dumps(f'{key}=')} %json {rule}"
        comma = '", " ' if index else ""
        if key in required:
            parts.append(comma + text)
        elif ordered:
            parts.append(f"({comma}{text})?")
    del rules
    return " ".join(parts)


def json_options(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A schema as JSON without white space that models would not end.

    Args:
        is_strict: what cannot be enforced of it is refused; otherwise it is ignored.
    """
    options = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
    return json.dumps({**schema, "x-guidance": options | {"lenient": not is_strict}})
