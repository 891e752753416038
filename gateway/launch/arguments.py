"""A command line's parser that reports a mistake in one line: what is wrong, the nearest option or
command, and where help is."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_NUMBERS = {"int": "a whole number", "float": "a number"}
_MESSAGES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # What argparse says, as against what it should say.
    (
        re.compile(r"argument BENCH: invalid choice: '([^']*)' \(choose from (.*)\)"),
        lambda said: (
            f"unknown command {said[1]!r}{nearest(said[1], re.findall(r'[a-z]+', said[2]))}"
        ),
    ),
    (
        re.compile(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)"),
        lambda said: f"{said[1]} must be one of {said[3].replace(chr(39), '')}, not {said[2]}",
    ),
    (
        re.compile(r"argument (\S+): invalid (\w+) value: (.*)"),
        lambda said: (
            f"{said[1]} must be {_NUMBERS[said[2]]}, not {said[3]}"
            if said[2] in _NUMBERS
            else f"{said[1]} has the invalid value {said[3]}"
        ),
    ),
    (
        re.compile(r"argument (\S+): ignored explicit argument (.*)"),
        lambda said: f"{said[1]} takes no value, but got {said[2]}",
    ),
    (re.compile(r"argument (\S+): must be (.*)"), lambda said: f"{said[1]} must be {said[2]}"),
    (re.compile(r"argument (.*)"), lambda said: said[1]),
)
_MAX_CHARS = 1000


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line. Options are written out, with hyphens or, as vLLM also has
    them, with underscores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.object_options: frozenset[str] = frozenset()  # whose value is a JSON object
        self.options_elsewhere: frozenset[str] = frozenset()  # of vLLM, and not here
        # Otherwise vLLM's `--model X` would be `--model-impl X`.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(map(_hyphenated, sys.argv[1:] if args is None else args))
        parsed, unknown = super().parse_known_args(self._joined(given), namespace)
        options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if options:
            is_elsewhere = options[0].partition(".")[0] in self.options_elsewhere
            why = " (vLLM's; this server has nothing like it)"
            hint = why if is_elsewhere else nearest(options[0], self._names())
            self.error(f"unknown option {options[0]}{hint}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """With `--option.key.other value`, as vLLM also writes JSON objects, made one object."""
        rest, objects = list[str](), dict[str, dict[str, Any]]()
        left = iter(arguments)
        for argument in left:
            name, equals, value = argument.partition("=")
            option, *keys = name.split(".")
            is_part = keys and option in self.object_options
            if not is_part:
                rest.append(argument)
                continue
            where = objects.setdefault(option, {})
            for key in keys[:-1]:
                where = where.setdefault(key, {})
            where[keys[-1]] = _value(value if equals else next(left, ""))
        for option, values in objects.items():
            rest += [option, json.dumps(values)]
        return rest

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        for pattern, say in _MESSAGES:
            if said := pattern.fullmatch(text):
                text = say(said)
                break
        if len(text) > _MAX_CHARS:
            text = f"{text[:_MAX_CHARS]} …"
        self.exit(2, f"{self.prog}: error: {text}; see {self.prog} --help\n")

    def _names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def _hyphenated(argument: str) -> str:
    """`--max_model_len=x_y` → `--max-model-len=x_y`"""
    name, equals, value = argument.partition("=")
    name, dot, keys = name.partition(".")
    if not name.startswith("--"):
        return argument
    return f"{name.replace('_', '-')}{dot}{keys}{equals}{value}"


def _value(text: str) -> Any:
    """The value of a JSON text; if it is none, the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the most similar name, if there is one."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
