"""What a format of tool calls is, and what several formats share: JSON objects that name a
function, values in XML, and the grammar of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool
from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.enforceable import enforceable, enforceable_pattern
from penstock.engine.structured_outputs.json_schema import FORMATS
from penstock.engine.structured_outputs.lark import quoted

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_REFERENCES = 16  # of a schema to another one, in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How one call of a function is written, for grammars: `begin`, its arguments, `end`. Markers
    are parts of their own, as they may be single tokens.

    Attributes:
        first, between, last: around all calls of an output.
        arguments: makes the rule of a tool's arguments, and may add rules; None: a JSON object.
        written: arguments as they stand in a call; None: as JSON.
        thought: what begins a thought, its end, and what follows, where the format has its own.
        answer: before a message that is all of the output.
    """

    begin: Callable[[str], Sequence[str]]
    end: Sequence[str]
    first: Sequence[str] = ()
    between: Sequence[str] = ()
    last: Sequence[str] = ()
    arguments: Callable[[Tool, list[str]], str] | None = None
    written: Callable[[Mapping[str, Any]], str] | None = None
    thought: tuple[Sequence[str], str, Sequence[str]] | None = None
    answer: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        steps: reads an output after its first thought.
        template_marks: texts that are all in the chat template of a model that writes so.
        markers: texts that may be special tokens.
        openings: texts of which one begins a call, wherever it stands.
        starts: characters of which one begins a call at the beginning of an output.
        frame: for grammars.
    """

    steps: Callable[[Scanner], Steps[None]]
    template_marks: tuple[str, ...]
    markers: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    starts: str = ""
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
        begun: what was read before, which is text if this is no call; a marker, if it is not empty.

    Returns: whether it is one.
    """
    read: list[str] = [begun]
    name: str | None = None
    held: list[str] | None = None  # arguments that came before the name

    def failed() -> bool:
        if name is None:
            say = scanner.say_unless_cut if begun else scanner.say
            say("".join(read))
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


def typed(kinds: set[str], text: str) -> str:
    """JSON text of a value that is written without quotes.

    Args:
        kinds: JSON types that it may have; a text if there are none.
    """
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


def kinds_of(tool: Tool, parameter: str) -> set[str]:
    """The JSON types that a parameter may have, as far as its schema says so plainly."""
    return _types_of(tool.schema_of(parameter), tool.parameters or {}, _MAX_REFERENCES)


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(schema.get("$ref"), str):
        return _types_of(_target(schema["$ref"], root), root, depth - 1)

    def parts(key: str) -> Iterator[set[str]]:
        listed = schema.get(key)
        for each in listed if isinstance(listed, list) else ():
            yield _types_of(each, root, depth - 1)

    found = set[str]().union(*parts("anyOf"), *parts("oneOf"))
    for own in parts("allOf"):
        found = found & own if found and own else found | own
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list):
        found = {_type_of(value) for value in values}
    return found


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null" if value is None else "object")


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema names; None if there is nothing."""
    where: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        where = where.get(name) if isinstance(where, Mapping) else None
    return where


def escaped(text: str) -> str:
    """Text as it stands inside a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def xml_value(scanner: Scanner, kinds: set[str], *, ends: Sequence[str]) -> Steps[None]:
    """Read a value up to one of its ends, and write it as JSON. A text is written as it comes.

    Args:
        kinds: see `typed`.
    """
    if not kinds or kinds == {"string"}:
        scanner.arguments('"')
        yield from scanner.read_until(ends, lambda text: scanner.arguments(escaped(text)))
        scanner.arguments("" if scanner.is_cut else '"')
        return
    read: list[str] = []
    yield from scanner.read_until(ends, read.append)
    scanner.arguments("" if scanner.is_cut else typed(kinds, "".join(read)))


def xml_arguments(tool: Tool, rules: list[str], *, begin: Callable[[str], str], end: str) -> str:
    """The grammar of arguments with a tag each, in the schema's order: those that are required, and
    any of the others; where the schema names none, any. Texts are free, other values JSON.

    Args:
        rules: gets the rules that the result refers to.

    Raises:
        InvalidRequestError: the tool is strict, and a text's schema cannot be enforced.
    """
    parameters = tool.parameters or {}
    properties, required = _named(parameters)
    if not properties and not _is_closed(parameters):
        before, _, after = begin("\0").partition("\0")
        value = _suffixed("/(?s:.*)/", end, rules)
        return f"({quoted(before)} /[A-Za-z_][A-Za-z0-9_.-]*/ {quoted(after)} {value})*"
    parts: list[str] = []
    for key, schema in properties.items():
        kinds = kinds_of(tool, key)
        schema = _with_pattern(schema, is_strict=tool.strict)
        if kinds and kinds != {"string"}:
            whole = {**schema, **_definitions(parameters)}
            value = f"%json {json_options(whole, is_strict=tool.strict)} {quoted(end)}"
        elif {"enum", "const", "pattern"} & set(schema):  # written without quotes
            value = f"{_choices(schema)} {quoted(end)}"
        else:
            value = _suffixed(_free_text(tool, key), end, rules)
        part = f"({quoted(begin(key))} {value})"
        parts.append(part if key in required else f"{part}?")
    return " ".join(parts)


def _with_pattern(schema: Mapping[str, Any], *, is_strict: bool) -> Mapping[str, Any]:
    """The schema with its pattern as the library takes it, or without one that need not be."""
    if not isinstance(schema.get("pattern"), str):
        return schema
    pattern = enforceable_pattern(schema["pattern"])
    if pattern is None and not is_strict:
        return {name: value for name, value in schema.items() if name != "pattern"}
    return {**schema, "pattern": pattern or schema["pattern"]}


def _suffixed(pattern: str, end: str, rules: list[str]) -> str:
    """The name of a new rule: the pattern up to its first end."""
    name = f"value_{len(rules)}"
    rules.append(f"{name}[suffix={quoted(end)}]: {pattern}")
    return name


def _free_text(tool: Tool, key: str) -> str:
    """The pattern of a text of which only the length may be limited."""
    schema = tool.schema_of(key)
    beyond = sorted({"allOf", "anyOf", "oneOf", "$ref", "not"} & set(schema))
    # Any other is an annotation.
    beyond += ["format"] * any(schema.get("format") == known for known in FORMATS)
    if tool.strict and beyond:
        raise InvalidRequestError(
            f"the parameters of the strict tool {tool.name!r} are not supported: in this model's "
            f"format of calls, {beyond[0]!r} of the text {key!r} cannot be enforced",
            param="tools",
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/"


def _named(parameters: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """The schemas of named parameters, and those that are required."""
    properties = parameters.get("properties") or {}
    schemas = {key: each if isinstance(each, Mapping) else {} for key, each in properties.items()}
    return schemas, set(parameters.get("required") or ())


def _is_closed(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("additionalProperties") is False


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _choices(schema: Mapping[str, Any]) -> str:
    """The grammar of a text that its schema limits."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        pattern = str(schema["pattern"]).removeprefix("^").removesuffix("$").replace("/", "\\/")
        return f"/{pattern}/"
    return "(" + " | ".join(quoted(str(each)) for each in values) + ")"


def python_arguments(tool: Tool, rules: list[str]) -> str:
    """The grammar of named arguments, first those that are required; where the schema names none,
    any. Their values are JSON's, of which `true`, `false` and `null` are read too.

    Args:
        rules: gets the rules that the result refers to.
    """
    parameters = tool.parameters or {}
    properties, required = _named(parameters)
    if not properties and not _is_closed(parameters):
        pair = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" %json {json_options({}, is_strict=False)}'
        return f'({pair} (", " {pair})*)?'
    names = {}
    for key, schema in properties.items():
        value = json_options({**schema, **_definitions(parameters)}, is_strict=tool.strict)
        names[key] = f"argument_{len(rules)}"
        rules.append(f"{names[key]}: {quoted(f'{key}=')} %json {value}")
    needed = [names[key] for key in properties if key in required]
    optional = [names[key] for key in properties if key not in required]
    rest = [
        " ".join(f'(", " {name})?' for name in optional[at:]) for at in range(len(optional) + 1)
    ]
    if needed:
        return f"""{' ", " '.join(needed)} {rest[0]}"""
    first = [f"{name} {rest[at + 1]}" for at, name in enumerate(optional)]
    return f"({' | '.join(first)})?" if first else ""


def json_options(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A schema as JSON without white space that models would not end.

    Args:
        is_strict: what cannot be enforced of it is refused; otherwise it is ignored.
    """
    schema = enforceable(schema, is_strict=is_strict)
    options = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
    return json.dumps({**schema, "x-guidance": options | {"lenient": not is_strict}})


def xml_written(values: Mapping[str, Any], *, begin: Callable[[str], str], end: str) -> str:
    """Arguments with a tag each."""
    texts = {
        key: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
        for key, each in values.items()
    }
    return "".join(f"{begin(key)}{text}{end}" for key, text in texts.items())


def python_written(values: Mapping[str, Any]) -> str:
    """Named arguments."""
    return ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
    )
