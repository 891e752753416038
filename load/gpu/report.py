"""Tables of a GPU run, from its JSON: `python -m penstock.load.gpu.report [FILE] [--update]`.

Without FILE, it reads the newest run committed under `load/results/gpu`. `--update` writes the
summary into `load/README.md`, between its markers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.load.report.tables import marked, replace_marked, table

# The figures of a run with their bars, as one JSON file that is whole at every moment.
#
# A figure is the worst of the cells its bar speaks of, and None unless all of them were measured.

JsonRow = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bound that a figure must reach."""

    bound: float
    is_upper: bool = False  # the figure may not exceed it; else it may not fall below
    meaning: str  # of the figure, with the cells it is the worst of

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.is_upper else value >= self.bound

    def worst(self, values: Sequence[float]) -> float:
        return max(values) if self.is_upper else min(values)


BARS: dict[str, Bar] = {
    "decode_attention_of_copy": Bar(
        bound=0.85,
        meaning="decode attention, KV bytes/s ÷ copy bandwidth: batch ≥ 32, context ≥ 4k",
    ),
    "paged_over_contiguous": Bar(
        bound=1.05,
        is_upper=True,
        meaning="time of decode attention over random block tables ÷ over contiguous KV: "
        "context ≥ 1k",
    ),
    "prefill_attention_of_matmul": Bar(
        bound=0.50, meaning="prefill attention, causal FLOP/s ÷ bf16 matrix product: a prompt of 8k"
    ),
    "decode_step_of_roofline": Bar(
        bound=0.75,
        meaning="decode step of an 8B Llama: time to read weights and KV at copy bandwidth ÷ step, "
        "batch 1–64",
    ),
    "swap_of_pinned_copy": Bar(
        bound=0.85, meaning="swap, bytes/s ÷ copy from and to pinned memory: both directions"
    ),
    "speedup_over_hf_generate": Bar(
        bound=24.0,
        meaning="output tokens/s of a whole workload ÷ Hugging Face generate at its best batch",
    ),
}


@dataclass(kw_only=True)
class Results:
    """The results of a run so far, written to all `paths` at every addition.

    A figure is the worst of the cells that its bar covers, and None unless all were measured.
    """

    about: Mapping[str, Any]
    paths: tuple[Path, ...] = ()
    checks: dict[str, JsonRow] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(BARS))
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_complete: bool = False

    def add_check(self, name: str, *, error: float, bound: float) -> bool:
        """Whether the error is within its bound; NaN is not, and becomes None."""
        is_right = error <= bound
        shown = error if math.isfinite(error) else None  # JSON has numbers only
        self.checks[name] = {"error": shown, "bound": bound, "is_right": is_right}
        self._save()
        return is_right

    def add_ceiling(self, name: str, value: float) -> None:
        self.ceilings[name] = value
        self._save()

    def add_figure(self, name: str, value: float | None) -> None:
        self.figures[name] = value
        self._save()

    def add_row(self, section: str, row: JsonRow) -> None:
        self._section(section)["rows"].append(dict(row))
        self._save()

    def add_note(self, section: str, note: str) -> None:
        """Note something that readers of the section's rows must know."""
        self._section(section)["notes"].append(note)
        self._save()

    def end_section(self, section: str, *, seconds: float) -> None:
        self._section(section)["seconds"] = round(seconds, 1)
        self._save()

    def end(self) -> None:
        self.is_complete = True
        self._save()

    def as_json(self) -> dict[str, Any]:
        return {
            **self.about,
            "is_complete": self.is_complete,
            "checks": self.checks,
            "ceilings": self.ceilings,
            "figures": self.figures,
            "bars": {name: _judged(name, value) for name, value in self.figures.items()},
            "sections": self.sections,
        }

    def _section(self, name: str) -> dict[str, Any]:
        return self.sections.setdefault(name, {"rows": [], "notes": []})

    def _save(self) -> None:
        text = json.dumps(self.as_json(), indent=2, ensure_ascii=False, allow_nan=False)
        for path in self.paths:
            write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def _judged(name: str, value: float | None) -> dict[str, Any]:
    bar = BARS[name]
    return {
        ("at_most" if bar.is_upper else "at_least"): bar.bound,
        "is_met": None if value is None else bar.is_met(value),
    }


# -- tables of a run ----------------------------------------------------------------------------

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
_YES = {True: "yes", False: "**no**", None: "–"}
Data = Mapping[str, Any]


def newest(folder: Path = RESULTS) -> Path | None:
    """The latest run in a folder."""
    files = sorted(folder.glob("*.json"), key=lambda path: (_load(path)["date"], path.name))
    return files[-1] if files else None


def read(path: Path | None) -> Data | None:
    """A run; None if there is none."""
    return None if path is None else _load(path)


def summary(data: Data | None) -> str:
    """What the docs show: machine, figures with their bars, ceilings."""
    if data is None:
        return NOTHING
    return "\n\n".join(part for part in (_about(data), _figures(data), _ceilings(data)) if part)


def details(data: Data) -> str:
    """Every check and cell, and the summary last, where a terminal shows it."""
    sections = [_section(name, section) for name, section in data["sections"].items()]
    return "\n\n".join(part for part in (_checks(data), *sections, summary(data)) if part)


def update(docs: Path, text: str) -> None:
    """Put the text between the markers of a page."""
    replace_marked(docs, NAME, text)


def shown(docs: Path) -> str:
    """The text between the markers."""
    return marked(docs, NAME)


# -- parts ------------------------------------------------------------------------------------


def _about(data: Data) -> str:
    words = [f"{data['device']}, {data['date']}", f"commit {data['commit'] or 'unknown'}"]
    words += [f"torch {data['torch']}", f"triton {data['triton']}"]
    if not data["is_measurement"]:
        words.append("**no measurement: tiny shapes in an interpreter**")
    if not data["is_complete"]:
        words.append("**the run did not end**")
    return "; ".join(words) + "."


def _figures(data: Data) -> str:
    rows = []
    for name, value in data["figures"].items():
        bar, met = BARS[name], _YES[data["bars"][name]["is_met"]]
        text = "not measured" if value is None else f"{value:.3f}"
        rows.append([bar.meaning, text, f"{'≤' if bar.is_upper else '≥'} {bar.bound:g}", met])
    return table(("figure", "measured", "bar", "met"), rows)


def _ceilings(data: Data) -> str:
    rows = [
        [_CEILINGS[name], _number(name, value), _unit(name)]
        for name, value in data["ceilings"].items()
    ]
    return table(("ceiling, measured in the same run", "", ""), rows) if rows else ""


def _checks(data: Data) -> str:
    rows = []
    for name, check in data["checks"].items():
        error = "not finite" if check["error"] is None else f"{check['error']:.1e}"
        rows.append([name, error, f"{check['bound']:.1e}", _YES[check["is_right"]]])
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
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="JSON of a run")
    add("--all", action="store_true", help="with every cell")
    add("--update", action="store_true", help="write the summary into the docs")
    parsed = parser.parse_args(words)
    data = read(parsed.file or newest())
    print(details(data) if parsed.all and data is not None else summary(data))
    if parsed.update:
        update(DOCS, summary(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
