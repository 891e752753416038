"""Matches the regular expressions of an adapter's settings with the names of modules.

They are Python's, as in PEFT, with look-ahead, so a matcher without backtracking does not know them
all. Python's own may take for ever: `([a-z._0-9]+)+X`. So they are matched in a process of its own,
under limits of CPU time and memory; plain names, which most are, are matched here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.engine.process.sandbox import LENGTH_BYTES, framed, limit_process, refusal, serve

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 16384
MAX_CPU_S = 2.0
_MAX_WALL_S = 30.0
_MAX_MEMORY_BYTES = 512 << 20
_MAX_PLAIN = 200_000  # matches of plain names, about 50 ms
_PLAIN = re.compile(r"(?:[\w.\-]|\\\.)*")


class Pattern(NamedTuple):
    """A regular expression.

    Attributes:
        is_full: it matches a whole name, otherwise its beginning.
        plain: the part of it that the settings have.
    """

    expression: str
    is_full: bool = False
    plain: str = ""


class PatternError(Exception):
    """A pattern is invalid, or matching takes too long."""


def matches(patterns: Sequence[Pattern], names: Sequence[str]) -> list[dict[str, str]]:
    """By pattern, the names that match, each with the text of its first group.

    Raises:
        PatternError: one cannot be matched, within the limits.
    """
    if len(patterns) > MAX_PATTERNS:
        raise PatternError(f"{len(patterns)} patterns are more than {MAX_PATTERNS}")
    for pattern in patterns:
        own = pattern.plain or pattern.expression
        if len(own) > MAX_PATTERN_CHARS:
            raise PatternError(f"a pattern has more than {MAX_PATTERN_CHARS} characters")
    is_plain = all(_PLAIN.fullmatch(each.plain or each.expression) for each in patterns)
    if is_plain and len(patterns) * len(names) <= _MAX_PLAIN:
        return _matched(patterns, names)
    return _matched_in_sandbox(patterns, names)


def _matched(patterns: Sequence[Pattern], names: Sequence[str]) -> list[dict[str, str]]:
    found = []
    for pattern in patterns:
        try:
            compiled = re.compile(pattern.expression)
        except (re.error, RecursionError, OverflowError) as error:
            shown = (pattern.plain or pattern.expression)[:100]
            raise PatternError(f"{shown!r} is no regular expression: {error}") from error
        match = compiled.fullmatch if pattern.is_full else compiled.match
        groups = ((name, match(name)) for name in names)
        found.append(
            {name: each[1] or "" if compiled.groups else "" for name, each in groups if each}
        )
    return found


def _matched_in_sandbox(patterns: Sequence[Pattern], names: Sequence[str]) -> list[dict[str, str]]:
    job = json.dumps({"patterns": patterns, "names": list(names)}).encode()
    command = [sys.executable, "-m", "penstock.engine.lora.patterns"]
    try:
        done = subprocess.run(  # noqa: S603
            [*command, str(os.getpid()), str(MAX_CPU_S)],
            input=framed(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _too_slow() from error
    answer = done.stdout[LENGTH_BYTES:]
    if answer.startswith(b"-"):
        raise PatternError(json.loads(answer[1:])["message"])
    if not answer.startswith(b"+"):
        raise _too_slow()
    found: list[dict[str, str]] = json.loads(answer[1:])
    return found


def _too_slow() -> PatternError:
    return PatternError(
        f"matching takes more than {MAX_CPU_S:g} s, or {_MAX_MEMORY_BYTES >> 20} MiB"
    )


def _answer(job: dict[str, Any]) -> bytes:
    try:
        patterns = [Pattern(*each) for each in job["patterns"]]
        return b"+" + json.dumps(_matched(patterns, job["names"])).encode()
    except PatternError as error:
        return refusal(str(error))


if __name__ == "__main__":
    limit_process(int(sys.argv[1]), max_memory_bytes=_MAX_MEMORY_BYTES)
    serve(_answer, max_cpu_s=float(sys.argv[2]))
