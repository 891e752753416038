"""Tables that are readable in a terminal and as Markdown, and the files that a bench writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    columns = zip(header, *rows, strict=True)
    widths = [max(3, *map(len, column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [f"{cell:{'>' if index else '<'}{widths[index]}}" for index, cell in enumerate(line)]
        for line in (header, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(rows: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> str:
    """A table with a row for each item; a column's function gives the text of its cell."""
    return table(list(columns), [[text(row) for text in columns.values()] for row in rows])


def write_report(out: Path, name: str, *, markdown: str, data: Mapping[str, Any]) -> list[Path]:
    """Write `NAME.md` and `NAME.json` into a folder; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {"md": markdown, "json": json.dumps(data, indent=2, ensure_ascii=False)}
    for suffix, text in texts.items():
        (out / f"{name}.{suffix}").write_text(text + "\n", encoding="utf-8")
    return [out / f"{name}.{suffix}" for suffix in texts]


def publish(
    out: Path,
    name: str,
    title: str,
    report: str,
    data: Mapping[str, Any],
    *,
    others: Sequence[Path] = (),
) -> None:
    """Print a report, write it with its data, and print the paths written."""
    print(report)
    paths = [*write_report(out, name, markdown=f"# {title}\n\n{report}", data=data), *others]
    print("\nwrote", ", ".join(map(str, paths)))
