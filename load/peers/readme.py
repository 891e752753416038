"""Writes a table of rivals in RESULTS.md, from a comparison's JSON:

python -m penstock.load.peers.readme load/results/DATE-peers.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.load.peers.report import OURS, Cell, Report, cells
from penstock.load.report.tables import replace_marked, table

README = Path(__file__).parents[1] / "RESULTS.md"
_WORKLOADS = {
    "single": "single stream",
    "c8": "8 in flight",
    "c32": "32 in flight",
    "front128": "128 in flight",
    "echo": "copying the prompt",
    "novel": "nothing to copy",
}


def marker(comparison: str) -> str:
    """Of the table of this comparison."""
    kind = "" if comparison == "bf16" else f" in {comparison}"
    return f"rivals{kind}: written by load.peers.readme"


def summary(found: Sequence[Cell]) -> str:
    """Tokens per second of ours, and ours by each rival's."""
    systems = [name for name in dict.fromkeys(cell.system for cell in found) if name != OURS]
    by_place = {(cell.model, cell.workload, cell.system): cell for cell in found}
    rows = []
    for model, workload in dict.fromkeys((cell.model, cell.workload) for cell in found):
        ours = by_place.get((model, workload, OURS))
        if workload not in _WORKLOADS or ours is None:
            continue
        rivals = (by_place.get((model, workload, name)) for name in systems)
        rows.append(
            [
                f"{model}, {_WORKLOADS[workload]}",
                f"{ours.tokens_per_s:,.0f}",
                *(
                    "–" if each is None or not each.ratio else f"{1 / each.ratio:.2f}×"
                    for each in rivals
                ),
            ]
        )
    return table(["", "our tokens/s", *(f"by {name}" for name in systems)], rows)


def main(path: str) -> int:
    report = Report.read(Path(path))
    text = summary(cells(report.observations))
    replace_marked(README, marker(report.comparison), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
