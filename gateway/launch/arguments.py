"""A command line's parser that reports a mistake in one line: what is wrong, the nearest option or
command, and where help is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

_NUMBERS = {"int": "a whole number", "float": "a number"}
_MESSAGES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # What argparse says, as against what it should say.
    (
        re.compile(r"argument (?:COMMAND|BENCH): invalid choice: '([^']*)' \(choose from (.*)\)"),
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
    """Reports a mistake in one line."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if options:
            self.error(f"unknown option {options[0]}{nearest(options[0], self._names())}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        if text.endswith("required: COMMAND"):
            text = "give a command: serve, chat or bench"
        for pattern, say in _MESSAGES:
            if said := pattern.fullmatch(text):
                text = say(said)
                break
        if len(text) > _MAX_CHARS:
            text = f"{text[:_MAX_CHARS]} …"
        self.exit(2, f"{self.prog}: error: {text}; see {self.prog} --help\n")

    def _names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the most similar name, if there is one."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
