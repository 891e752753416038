"""Arguments that are written as literals: `key="text", other=[1, True]`, as in Python, or with
other signs, as Gemma 4 does."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool
from penstock.engine.chat_formats.tool_format import (
    WriteLark,
    definitions,
    escaped,
    is_closed,
    json_options,
    kinds_of,
    named_parameters,
    suffixed,
)

_BARE_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_WORDS = r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|[Tt]rue|[Ff]alse|null|None/"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    each: each for each in ("true", "false", "null")
}


def literal_arguments(
    scanner: Scanner, tool: Tool, *, assign: str = "=", close: str = ")", quote: str = ""
) -> Steps[None]:
    """Read `key=literal, …)` and write it as a JSON object.

    Args:
        assign: between key and literal.
        close: after the last one.
        quote: around texts, besides Python's.
    """
    separator = "{"
    while True:
        yield from scanner.skip_space()
        if (yield from scanner.peek()) in (close, ""):
            break
        key = yield from scanner.take_until(assign)
        key = (key or "").strip()
        if not (key.isidentifier() or tool.schema_of(key)):
            break
        scanner.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _literal(scanner, close, quote)
        yield from scanner.skip_space()
        yield from scanner.starts_with(",")
    yield from scanner.starts_with(close)
    scanner.end_call("}" if separator == ", " else "{}")


def _literal(scanner: Scanner, close: str, quote: str) -> Steps[None]:
    """Read a literal and write it as JSON, texts as they come."""
    depth = 0
    closings: list[str] = []
    while True:
        yield from scanner.skip_space()
        character = yield from scanner.peek()
        if not character or (not depth and character in f",{close}"):
            return
        if character in "'\"":
            yield from _text(scanner, character)
        elif quote and character == quote[0] and (yield from scanner.starts_with(quote)):
            scanner.text = quote + scanner.text
            yield from _text(scanner, quote)
        elif character in "[({":
            depth += 1
            closings.append("}" if character == "{" else "]")
            scanner.arguments("{" if character == "{" else "[")
            scanner.text = scanner.text[1:]
        elif character in "])}":
            depth -= 1
            if depth < 0:
                return
            scanner.arguments(closings.pop())
            scanner.text = scanner.text[1:]
        elif character in ",:":
            rest = scanner.text[1:]
            scanner.text = rest
            yield from scanner.skip_space()
            if (yield from scanner.peek()) not in ("]", ")", "}"):
                scanner.arguments(f"{character} ")
        else:
            yield from _word(scanner)
        if not depth and character not in "[({":
            return


def _word(scanner: Scanner) -> Steps[None]:
    """Read a number or a constant."""
    while True:
        end = next((i for i, each in enumerate(scanner.text) if each in ",:)]} \n"), None)
        if end is not None or scanner.is_over:
            break
        yield
    word, scanner.text = scanner.text[:end], "" if end is None else scanner.text[end:]
    if scanner.is_cut and end is None:
        return
    if word in _CONSTANTS:
        scanner.arguments(_CONSTANTS[word])
        return
    try:
        scanner.arguments(json.dumps(ast.literal_eval(word)))
    except (ValueError, SyntaxError, TypeError):
        scanner.arguments(json.dumps(word, ensure_ascii=False))


def _text(scanner: Scanner, quote: str) -> Steps[None]:
    """Read a string and write it as a JSON text. Only Python's has escape sequences."""
    scanner.text = scanner.text[len(quote) :]
    scanner.arguments('"')
    if len(quote) > 1:
        yield from scanner.read_until([quote], lambda text: scanner.arguments(escaped(text)))
        scanner.arguments("" if scanner.is_cut else '"')
        return
    while True:
        at = min(
            (i for i in (scanner.text.find(quote), scanner.text.find("\\")) if i >= 0),
            default=len(scanner.text),
        )
        scanner.arguments(escaped(scanner.text[:at]))
        scanner.text = scanner.text[at:]
        if scanner.text.startswith(quote):
            scanner.text = scanner.text[1:]
            break
        if scanner.text.startswith("\\"):
            needed = {"x": 4, "u": 6, "U": 10}.get(scanner.text[1:2], 2)
            if len(scanner.text) >= needed:
                scanner.arguments(escaped(_unescaped(scanner.text[:needed])))
                scanner.text = scanner.text[needed:]
                continue
        if scanner.is_over:
            scanner.text = ""
            break
        yield
    scanner.arguments("" if scanner.is_cut else '"')


def _unescaped(sequence: str) -> str:
    try:
        value = ast.literal_eval(f'"{sequence}"')
    except (ValueError, SyntaxError):
        return sequence
    return value if isinstance(value, str) else sequence


def literal_grammar(
    tool: Tool,
    rules: list[str],
    write: WriteLark,
    *,
    assign: str = "=",
    separator: str = ", ",
    quote: str = '"',
) -> str:
    """The grammar of named arguments, first those that are required; where the schema names none,
    any. Their values are JSON's where texts are quoted as there; `true`, `false` and `null` are
    read too.

    Args:
        rules: gets the rules that the result refers to.
        write: writes texts in Lark.
    """
    parameters = tool.parameters or {}
    properties, required = named_parameters(parameters)
    between = write([separator])
    if not properties and not is_closed(parameters):
        value = _value(tool, "", {}, rules, write, assign, separator, quote)
        pair = f"/[A-Za-z_][A-Za-z0-9_]*/ {write([assign])} {value}"
        return f"({pair} ({between} {pair})*)?"
    names = {}
    for key, schema in properties.items():
        whole = {**schema, **definitions(parameters)}
        value = _value(tool, key, whole, rules, write, assign, separator, quote)
        names[key] = f"argument_{len(rules)}"
        rules.append(f"{names[key]}: {write([f'{key}{assign}'])} {value}")
    if len(quote) > 1 and not tool.strict:  # Gemma 4's template sorts them
        one = f"({' | '.join(names.values())})"
        return f"({one} ({between} {one})*)?" if names else ""
    needed = [names[key] for key in properties if key in required]
    optional = [names[key] for key in properties if key not in required]
    rest = [
        " ".join(f"({between} {name})?" for name in optional[at:])
        for at in range(len(optional) + 1)
    ]
    if needed:
        return f"{f' {between} '.join(needed)} {rest[0]}"
    first = [f"{name} {rest[at + 1]}" for at, name in enumerate(optional)]
    return f"({' | '.join(first)})?" if first else ""


def _value(
    tool: Tool,
    key: str,
    schema: Mapping[str, Any],
    rules: list[str],
    write: WriteLark,
    assign: str,
    separator: str,
    quote: str,
) -> str:
    """The grammar of one value. Python's quote stands beside JSON's; another one is the only one,
    and within objects too, whose keys have none."""
    exact = f"%json {json_options(schema, is_strict=tool.strict)}"
    kinds = kinds_of(tool, key) if key else set()
    if quote == '"' or (tool.strict and len(quote) == 1):
        return exact
    plain = {"integer", "number", "boolean"}
    if kinds and kinds <= plain:
        return f'({exact} | "True" | "False")' if "boolean" in kinds else exact
    text = _quoted_text(quote, rules, write)
    if "enum" in schema and len(quote) > 1 and all(isinstance(e, str) for e in schema["enum"]):
        return f"({' | '.join(write([quote, each, quote]) for each in schema['enum'])})"
    if kinds == {"string"}:
        return text if len(quote) > 1 else f"({exact} | {text})"
    name = any_literal(rules, write, assign=assign, separator=separator, quote=quote)
    return name if len(quote) > 1 else f"({exact} | {name})"


def any_literal(
    rules: list[str],
    write: WriteLark,
    *,
    assign: str = "=",
    separator: str = ", ",
    quote: str,
) -> str:
    """The name of a new rule: any literal."""
    text, name = _quoted_text(quote, rules, write), f"value_{len(rules)}"
    sign = write([assign.replace("=", ": ")])
    between, named = write([separator]), text if len(quote) == 1 else _BARE_KEY
    rules.append(
        f'{name}: {text} | {_WORDS} | "[" ({name} ({between} {name})*)? "]"'
        f' | "{{" ({named} {sign} {name} ({between} {named} {sign} {name})*)? "}}"'
    )
    return name


def _quoted_text(quote: str, rules: list[str], write: WriteLark) -> str:
    if len(quote) == 1:
        return f"/{quote}([^{quote}\\\\\\n]|\\\\.)*{quote}/"
    return f"{write([quote])} {suffixed('/(?s:.*)/', quote, rules, write)}"


def literals_written(
    values: Mapping[str, Any], *, assign: str = "=", separator: str = ", ", quote: str = '"'
) -> str:
    """Named arguments."""
    return separator.join(f"{key}{assign}{_written(value, quote)}" for key, value in values.items())


def _written(value: Any, quote: str) -> str:
    if len(quote) < 2:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(each, quote) for each in value) + "]"
    return json.dumps(value)
