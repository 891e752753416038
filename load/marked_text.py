"""The part of a page that a command writes, between two comments."""

from __future__ import annotations

from pathlib import Path


def replace_marked(page: Path, name: str, text: str) -> None:
    """Put the text where the page has the comments of this name."""
    begin, end = _comments(name)
    head, _, rest = page.read_text("utf-8").partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"{page} lacks the comments of {name!r}"
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")


def marked(page: Path, name: str) -> str:
    """What stands there."""
    begin, end = _comments(name)
    return page.read_text("utf-8").partition(begin)[2].partition(end)[0].strip()


def _comments(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
