"""Tables that read alike in a terminal and in Markdown, and the files a bench leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.engine.errors import ConfigError

T = TypeVar("T")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join(_aligned(line, widths)) + " |" for line in [header, rule, *rows]
    )


def table_of(rows: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> str:
    """A table with a row for each thing, of which each column says something."""
    return table(list(columns), [[text(row) for text in columns.values()] for row in rows])


def write_report(out: Path, name: str, *, markdown: str, data: Mapping[str, Any]) -> list[Path]:
    """Write `NAME.md` and `NAME.json` into a folder, which is made if need be; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {"md": markdown, "json": json.dumps(data, indent=2, ensure_ascii=False)}
    paths = []
    for suffix, text in texts.items():
        path = out / f"{name}.{suffix}"
        path.write_text(text + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def publish(
    out: Path,
    name: str,
    *,
    title: str,
    report: str,
    data: Mapping[str, Any],
    draw: Callable[[Path], object] | None = None,
    others: Sequence[Path] = (),
) -> None:
    """Write what a bench found, with a picture `NAME.png` where one can be drawn, and say where."""
    paths = [*write_report(out, name, markdown=f"# {title}\n\n{report}", data=data), *others]
    if draw is not None:
        try:
            draw(out / f"{name}.png")
            paths.append(out / f"{name}.png")
        except ConfigError as error:  # there is no matplotlib
            print(f"no picture: {error}", file=sys.stderr)
    print("\nwrote", ", ".join(map(str, paths)))


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = line
    return [
        first.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
    ]


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
