"""What a format of tool calls is, and what several formats share: JSON objects that name a
function, values in XML, and the grammar of arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool
from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.enforceable import enforceable, enforceable_pattern
from penstock.engine.structured_outputs.json_schema import FORMATS
from penstock.engine.structured_outputs.lark import quoted

# Where a call's own texts stand among the texts of a format. Nobody's text has them.
NAME, ID, NUMBER, ARGUMENTS = "\ue000", "\ue001", "\ue002", "\ue003"
KEY, TYPE, VALUE = "\ue004", "\ue005", "\ue006"
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
WriteLark = Callable[[Sequence[str]], str]  # texts in Lark, markers that are tokens as those
_CDATA = ("<![CDATA[", "]]>")  # around a text in XML
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
        otherwise: another `begin`.
        is_spaced: JSON has line ends.
    """

    begin: Callable[[str], Sequence[str]]
    end: Sequence[str]
    first: Sequence[str] = ()
    between: Sequence[str] = ()
    last: Sequence[str] = ()
    arguments: Callable[[Tool, list[str], WriteLark], str] | None = None
    written: Callable[[Mapping[str, Any]], str] | None = None
    thought: tuple[Sequence[str], str, Sequence[str]] | None = None
    answer: Sequence[str] = ()
    otherwise: Callable[[str], Sequence[str]] | None = None
    is_spaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        steps: reads an output after its first thought.
        markers: texts that may be special tokens.
        openings: texts of which one begins a call, wherever it stands.
        starts: characters of which one begins a call at the beginning of an output.
        frame: for grammars.
    """

    steps: Callable[[Scanner], Steps[None]]
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


def read_object(
    scanner: Scanner,
    *,
    begun: str = "",
    name_keys: Sequence[str] = NAME_KEYS,
    argument_keys: Sequence[str] = ARGUMENT_KEYS,
    within: Sequence[str] = (),
) -> Steps[bool]:
    """Read `{"name": …, "arguments": {…}}`, whichever comes first, and the call that it is.

    Args:
        begun: what was read before, which is text if this is no call; a marker, if it is not empty.
        within: keys of objects in which the name and the arguments may be, from the outside.

    Returns: whether it is one.
    """
    read: list[str] = [begun]
    name: str | None = None
    held: list[str] | None = None  # arguments that came before the name
    depth = 0

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
        if key in within and (yield from fetch("{")):
            depth += 1
            continue
        if key in name_keys and name is None:
            name = yield from scanner.take_text()
            if name is None:
                break
            scanner.call(name)
            if held is not None:
                scanner.arguments("".join(held))
        elif key in argument_keys and held is None:
            held = []
            yield from scanner.read_json(held.append if name is None else scanner.arguments)
            read += held
        else:
            yield from scanner.read_json(read.append)
        while depth and (yield from fetch("}")):
            depth -= 1
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
        return _of_python(bare) or json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or (isinstance(value, int | float) and "string" in kinds):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _of_python(text: str) -> str:
    """JSON text of a list or an object as Python writes it; empty if it is none."""
    if text[:1] not in ("[", "{"):
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


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
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
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
    if (yield from scanner.starts_with(_CDATA[0])):
        ends = [_CDATA[1] + each for each in ends]
    if not kinds or kinds == {"string"}:
        scanner.arguments('"')
        yield from scanner.read_until(ends, lambda text: scanner.arguments(escaped(text)))
        scanner.arguments("" if scanner.is_cut else '"')
        return
    read: list[str] = []
    yield from scanner.read_until(ends, read.append)
    scanner.arguments("" if scanner.is_cut else typed(kinds, "".join(read)))


def xml_arguments(
    tool: Tool,
    rules: list[str],
    write: WriteLark,
    *,
    begin: Callable[[str, str], str],
    end: str,
    separator: str = "",
    has_types: bool = False,
    also: Callable[[list[str], WriteLark], str] | None = None,
) -> str:
    """The grammar of arguments with a tag each, in the schema's order: those that are required, and
    any of the others; where the schema names none, any. Texts are free, other values JSON.

    Args:
        rules: gets the rules that the result refers to.
        write: writes texts in Lark.
        begin: what comes before the value of an argument, by its name and type.
        end: what comes after it, perhaps with `KEY`.
        has_types: `begin` depends on the type.
        also: makes the grammar of lists and objects that are not JSON.

    Raises:
        InvalidRequestError: the tool is strict, and a text's schema cannot be enforced.
    """
    parameters = tool.parameters or {}
    properties, required = named_parameters(parameters)
    after = f" {write([separator])}" if separator.strip() else ""
    if not properties and not is_closed(parameters):
        before, _, behind = begin("\0", "string").partition("\0")
        name = "/[A-Za-z_][A-Za-z0-9_.-]*/"
        value = suffixed("/(?s:.*)/", end.split(KEY)[0], rules, write)
        closing = "".join(f" {name} {write([each])}" for each in end.split(KEY)[1:])
        return f"({write([before])} {name} {write([behind])} {value}{closing}{after})*"
    parts, ending = list[str](), end
    for key, schema in properties.items():
        kinds, end = kinds_of(tool, key), ending.replace(KEY, key)
        schema = _with_pattern(schema, is_strict=tool.strict)
        begun = write([begin(key, "string")])
        if kinds and kinds != {"string"}:
            whole = {**schema, **definitions(parameters)}
            value = f"%json {json_options(whole, is_strict=tool.strict)}"
            if "boolean" in kinds and not tool.strict:
                value = f'({value} | "True" | "False")'  # as some templates write them
            if also is not None and not tool.strict:
                value = f"({value} | {also(rules, write)})"
            value = f"{value} {write([end])}"
            begun = " | ".join(dict.fromkeys(write([begin(key, kind)]) for kind in sorted(kinds)))
            begun = f"({begun})" if " | " in begun else begun
        elif {"enum", "const", "pattern"} & set(schema):  # written without quotes
            value = f"{_choices(schema)} {write([end])}"
        else:
            value = suffixed(_free_text(tool, key), end, rules, write)
            others = {write([begin(key, each)]) for each in ("number", "object")} - {begun}
            if has_types and not kinds and others:
                exact = json_options(
                    {"type": ["number", "boolean", "null", "array", "object"]}, is_strict=False
                )
                value = f"{value} | ({' | '.join(sorted(others))}) %json {exact} {write([end])}"
        part = f"({begun} {value}{after})"
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


def suffixed(pattern: str, end: str, rules: list[str], write: WriteLark) -> str:
    """The name of a new rule: the pattern up to its first end."""
    name = f"value_{len(rules)}"
    token = write([end.lstrip()])
    if token.startswith("<["):  # no text has it
        rules.append(f"{name}: {pattern} {token}")
    else:
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


def named_parameters(
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """The schemas of named parameters, and those that are required."""
    properties = parameters.get("properties") or {}
    schemas = {key: each if isinstance(each, Mapping) else {} for key, each in properties.items()}
    return schemas, set(parameters.get("required") or ())


def is_closed(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("additionalProperties") is False


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _choices(schema: Mapping[str, Any]) -> str:
    """The grammar of a text that its schema limits."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        pattern = str(schema["pattern"]).removeprefix("^").removesuffix("$").replace("/", "\\/")
        return f"/{pattern}/"
    return "(" + " | ".join(quoted(str(each)) for each in values) + ")"


def json_options(schema: Mapping[str, Any], *, is_strict: bool, is_spaced: bool = False) -> str:
    """A schema as JSON without white space that models would not end.

    Args:
        is_strict: what cannot be enforced of it is refused; otherwise it is ignored.
        is_spaced: with white space, since the model's template writes it so.
    """
    schema = enforceable(schema, is_strict=is_strict)
    options: dict[str, Any] = {"whitespace_flexible": is_spaced}
    if not is_spaced:
        options |= {"item_separator": ", ?", "key_separator": ": ?"}
    return json.dumps({**schema, "x-guidance": options | {"lenient": not is_strict}})


def xml_written(
    values: Mapping[str, Any],
    *,
    begin: Callable[[str, str], str],
    end: str,
    separator: str = "",
) -> str:
    """Arguments with a tag each."""
    return separator.join(
        f"{begin(key, _type_of(each))}{each if isinstance(each, str) else _json(each)}"
        f"{end.replace(KEY, key)}"
        for key, each in values.items()
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
