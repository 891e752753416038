"""What a change must pass: the static checks and the README's test command.

A test skipped for want of a system package (Redis, a browser) fails here.

Many tests watch several processes at once, and two such tests run side by side on two cores. One
that fails there must pass by itself, the second time at the latest. The end of the output names
those that did; one of `tests/system`, which run whole servers as a user would, must not be among
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own list, kept for --last-failed
NUM_RETRIES = 2
RETRY = "ARGS=--last-failed --last-failed-no-failures none -n 0"


def make(*arguments: str) -> tuple[int, str]:
    """Run make, its output passed on; its exit status and the last line of the output."""
    closing_line = ""
    with subprocess.Popen(  # noqa: S603
        ["make", *arguments],  # noqa: S607
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PENSTOCK_TESTS_REQUIRE_ALL": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing_line = line.strip() or closing_line
    return process.returncode, closing_line


def failed_tests() -> list[str]:
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    status, _ = make("check")
    if status:
        return status
    FAILED.unlink(missing_ok=True)  # of another run
    status, closing_line = make("test")
    retried = failed_tests()
    closing_lines = [closing_line]
    for _ in range(NUM_RETRIES):
        if status:
            status, closing_line = make("test", RETRY)
            closing_lines.append(closing_line)
    if retried:
        tell(retried, set(failed_tests()) if status else set())
        print(*closing_lines, sep="\n")
    return status or int(any(is_strict(test) for test in retried))


def tell(retried: list[str], still_failing: set[str]) -> None:
    print("\n=== run again by themselves, since they failed beside others ===")
    for test in retried:
        verdict = "failed again" if test in still_failing else "passed then"
        print(f"{verdict}{', too late' if is_strict(test) else ''}: {test}")


def is_strict(test: str) -> bool:
    """Whether it must pass the first time."""
    return test.startswith("tests/system/")


if __name__ == "__main__":
    sys.exit(main())
