"""The parts of uvicorn that are used without its promise, as `gateway/http` lists them."""

from __future__ import annotations

import re
from pathlib import Path

import uvicorn

import penstock.gateway.http

_NAMES = re.compile(r"^    ((?:\w+, )*\w+)  +\w", re.MULTILINE)
_WORD = re.compile(r"\w+")


def listed() -> set[str]:
    text = penstock.gateway.http.__doc__ or ""
    return {name for names in _NAMES.findall(text) for name in names.split(", ")}


def words_of(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return {word for path in files for word in _WORD.findall(path.read_text())}


def test_each_that_is_listed_is_uvicorns_and_is_used() -> None:
    names = listed()
    assert {"_start_asgi_task", "close_timer", "server_state"} <= names
    assert names <= words_of(Path(uvicorn.__file__).parent)
    gateway = Path(penstock.gateway.http.__file__).parents[1]
    assert names <= words_of(gateway / "http") | words_of(gateway / "launch")


def test_each_private_name_that_is_used_is_listed() -> None:
    """Of those that begin with an underscore, which nothing else tells from ours."""
    folder = Path(uvicorn.__file__).parent / "protocols"
    definition = re.compile(r"def (_[a-z]\w+)\(")
    theirs = {
        name for path in folder.rglob("*.py") for name in definition.findall(path.read_text())
    }
    folder = Path(penstock.gateway.http.__file__).parent
    ours = {
        word
        for path in folder.glob("*_protocol.py")
        for word in re.findall(r"self\.(_[a-z]\w+)\(", path.read_text())
    }
    assert theirs & ours <= listed()
