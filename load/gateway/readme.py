"""Writes the table of the gateway's cost in RESULTS.md, from a run's JSON:

python -m penstock.load.gateway.readme load/results/DATE-gateway.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.load.bench.gateway import Row, markdown
from penstock.load.report.tables import replace_marked

README = Path(__file__).parents[1] / "RESULTS.md"
NAME = "gateway: written by load.gateway.readme"


def summary(path: Path) -> str:
    """The table, and what an idle socket takes."""
    data = json.loads(path.read_text("utf-8"))
    rows = [Row(**row) for row in data["rows"]]
    idle = f"An idle WebSocket takes {data['idle_socket_bytes'] / 1024:.1f} KiB."
    return f"{markdown(rows)}\n\n{idle}"


def main(path: str) -> int:
    text = summary(Path(path))
    replace_marked(README, NAME, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
