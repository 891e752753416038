"""`python -m tests.support.synthetic --ttft-ms 50 --itl-ms 10`."""

from __future__ import annotations

import argparse

from penstock.engine.process.launch import die_with_parent

from .server import run
from .settings import add_arguments, from_arguments


def main() -> None:
    parser = argparse.ArgumentParser(
        description="An OpenAI-compatible server of exactly known latency.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--die-with", type=int, metavar="PID", help="end when this parent does")
    parsed = parser.parse_args()
    if parsed.die_with is not None:
        die_with_parent(parsed.die_with)
    run(from_arguments(parsed))


main()
