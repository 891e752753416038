"""The corpus's text files, read by name.

Most have sections: `[section]` on a line, then a phrase a line; an empty line separates groups. In
the tables of answers (`penstock`, `serving`, `models`) a block is an answer: subjects (`what:`,
`are:` or `why:`, read with the forms in `questions`), further questions (`?`), the answer (`=`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"


def read_text(name: str) -> str:
    """Return a file whole."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def groups(name: str, section: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of phrases in a section."""
    return tuple(tuple(group.splitlines()) for group in _sections(name)[section].split("\n\n"))


def phrases(name: str, section: str) -> tuple[str, ...]:
    """Return the phrases of a section that is one group."""
    (group,) = groups(name, section)
    return group


def words(name: str, section: str) -> list[str]:
    """Return the words of a section whose lines are only for reading."""
    return _sections(name)[section].split()


@cache
def _sections(name: str) -> dict[str, str]:
    parts = (part.partition("]\n") for part in f"\n{read_text(name)}".split("\n[")[1:])
    return {section: body.strip("\n") for section, _, body in parts}
