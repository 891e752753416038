"""The figures of a run with their bars, as one JSON file that is whole at every moment.

A figure is the worst of the cells its bar speaks of, and None unless all of them were measured.
Knows nothing of devices or of how anything is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JsonRow = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a figure is to reach.

    Attributes:
        is_upper: the figure may not exceed it; else it may not fall below.
        meaning: of the figure, with the cells it is the worst of.
    """

    bound: float
    is_upper: bool = False
    meaning: str

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
        bound=0.50,
        meaning="prefill attention, causal FLOP/s ÷ bf16 matrix product: a prompt of 8k",
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
    """What a run has found so far. Every addition is on disk when the call returns.

    Args:
        about: device, commit, versions, date, is_measurement.
        paths: each gets the whole file.
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
        """Something a reader of the section's rows must know."""
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
        text = json.dumps(self.as_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)


def _judged(name: str, value: float | None) -> dict[str, Any]:
    bar = BARS[name]
    return {
        ("at_most" if bar.is_upper else "at_least"): bar.bound,
        "is_met": None if value is None else bar.is_met(value),
    }
