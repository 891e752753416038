"""Tables of a GPU run, from its JSON: `python -m penstock.load.gpu.report [FILE] [--update]`.

Without FILE, the newest of those committed under `load/results/gpu`. `--update` writes the summary
into `load/README.md`, between its markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.load.gpu.figures import BARS
from penstock.load.marked_text import marked, replace_marked
from penstock.load.tables import table

LOAD = Path(__file__).parents[1]
RESULTS = LOAD / "results" / "gpu"
DOCS = LOAD / "README.md"
NAME = "GPU figures: written by load.gpu.report"
NOTHING = "No figure of a GPU has been measured yet: nothing is committed under `results/gpu`."
_CEILINGS = {
    "copy_bytes_per_s": "copy in device memory, bytes read + written",
    "matmul_flop_per_s": "bf16 matrix product",
    "host_to_device_bytes_per_s": "copy from pinned memory",
    "device_to_host_bytes_per_s": "copy to pinned memory",
}
Data = Mapping[str, Any]


def newest(folder: Path = RESULTS) -> Path | None:
    """The latest run of all that is there."""
    files = sorted(folder.glob("*.json"), key=lambda path: (_load(path)["date"], path.name))
    return files[-1] if files else None


def read(path: Path | None) -> Data | None:
    """A run; None if there is none."""
    return None if path is None else _load(path)


def summary(data: Data | None) -> str:
    """What the docs show: where it was measured, the figures with their bars, the ceilings."""
    if data is None:
        return NOTHING
    return "\n\n".join(part for part in (_about(data), _figures(data), _ceilings(data)) if part)


def details(data: Data) -> str:
    """Every check and cell, and the summary at the end, where a terminal shows it."""
    sections = [_section(name, section) for name, section in data["sections"].items()]
    return "\n\n".join(part for part in (_checks(data), *sections, summary(data)) if part)


def update(docs: Path, text: str) -> None:
    """Put the text between the markers of a page."""
    replace_marked(docs, NAME, text)


def shown(docs: Path) -> str:
    """What stands between the markers."""
    return marked(docs, NAME)


# -- parts ------------------------------------------------------------------------------------


def _about(data: Data) -> str:
    words = [
        f"{data['device']}, {data['date']}",
        f"commit {data['commit'] or 'unknown'}",
        f"torch {data['torch']}",
        f"triton {data['triton']}",
    ]
    if not data["is_measurement"]:
        words.append("**no measurement: tiny shapes in an interpreter**")
    if not data["is_complete"]:
        words.append("**the run did not end**")
    return "; ".join(words) + "."


def _figures(data: Data) -> str:
    rows = []
    for name, value in data["figures"].items():
        bar, judged = BARS[name], data["bars"][name]["is_met"]
        text = "not measured" if value is None else f"{value:.3f}"
        met = {True: "yes", False: "**no**", None: "–"}[judged]
        rows.append([bar.meaning, text, f"{'≤' if bar.is_upper else '≥'} {bar.bound:g}", met])
    return table(("figure", "measured", "bar", "met"), rows)


def _ceilings(data: Data) -> str:
    rows = [
        [_CEILINGS[name], _number(name, value), _unit(name)]
        for name, value in data["ceilings"].items()
    ]
    return table(("ceiling, measured in the same run", "", ""), rows) if rows else ""


def _checks(data: Data) -> str:
    rows = [
        [
            name,
            "not finite" if check["error"] is None else f"{check['error']:.1e}",
            f"{check['bound']:.1e}",
            "yes" if check["is_right"] else "**no**",
        ]
        for name, check in data["checks"].items()
    ]
    return table(("check against float64", "error", "bound", "right"), rows) if rows else ""


def _section(name: str, section: Data) -> str:
    parts = [f"### {name.replace('_', ' ')}"]
    rows: list[Data] = section["rows"]
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        header = [f"{key.replace('_', ' ')} {_unit(key)}".strip() for key in keys]
        parts.append(table(header, [[_number(key, row.get(key)) for key in keys] for row in rows]))
    return "\n\n".join([*parts, *section["notes"]])


def _unit(key: str) -> str:
    if key.endswith("bytes_per_s"):
        return "GB/s"
    return "TFLOP/s" if key.endswith("flop_per_s") else ""


def _number(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:,.1f}"
    if key.endswith("flop_per_s"):
        return f"{value / 1e12:,.1f}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.load.gpu.report", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="JSON of a run")
    parser.add_argument("--all", action="store_true", help="with every cell")
    parser.add_argument("--update", action="store_true", help="write the summary into the docs")
    parsed = parser.parse_args(words)
    data = read(parsed.file or newest())
    print(details(data) if parsed.all and data is not None else summary(data))
    if parsed.update:
        update(DOCS, summary(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
