"""The parts of redis-py that are used without its promise, as `storage/redis` lists them."""

from __future__ import annotations

import re
from pathlib import Path

import redis

import penstock.gateway.storage.redis as ours

_NAMES = re.compile(r"^    ((?:\w+, )*\w+)  +\w", re.MULTILINE)
_WORD = re.compile(r"\w+")


def words_of(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return {word for path in files for word in _WORD.findall(path.read_text())}


def test_each_that_is_listed_is_theirs_and_is_used() -> None:
    names = {name for names in _NAMES.findall(ours.__doc__ or "") for name in names.split(", ")}
    assert {"connect_check_health", "pack_commands", "key_slot"} <= names
    assert names <= words_of(Path(redis.__file__).parent)
    assert names <= words_of(Path(ours.__file__).parent)


def test_nothing_is_used_that_begins_with_an_underscore() -> None:
    theirs = Path(redis.__file__).parent / "asyncio" / "connection.py"
    private = set(re.findall(r"def (_[a-z]\w+)\(", theirs.read_text()))
    source = "".join(path.read_text() for path in Path(ours.__file__).parent.glob("*.py"))
    used = set(re.findall(r"(?:connection|pool|base|client|redis)\.(_[a-z]\w+)", source))
    # of a connection, where `self` is one
    overridden = source[source.index("def _telling_of_closing") : source.index("def _text(")]
    assert not private & (used | set(re.findall(r"self\.(_[a-z]\w+)", overridden)))
