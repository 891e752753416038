"""Tables that read alike in a terminal and in Markdown, and the files a bench leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join(_aligned(line, widths)) + " |" for line in [header, rule, *rows]
    )


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


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = line
    return [
        first.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
    ]
