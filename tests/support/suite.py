"""The test suite: tier by tier, group by group, and what it took.

    python -m tests.support.suite first         what a change needs: `make test`
    python -m tests.support.suite all           everything: `make test-all`
    python -m tests.support.suite all --rerun   as `.ci/run` does

Further arguments go to pytest. JUnit reports are in `build/tests/`, one of each tier and group.

With `--rerun`, what failed is run once more, one by one with nothing beside it. A test that passes
then is named and does not fail the run, unless it is one of `tests/system`: whole servers have to
work as a user would start them, at the first try.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import durations
from tests.support.tiers import GROUPS

_REPORTS = Path("build/tests")
_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own list, kept for --last-failed
_TIERS = {"first": ("first",), "all": ("first", "second")}
_NUM_WORKERS = 2
_OF_GROUP = {
    "beside": ("-n", str(_NUM_WORKERS), "--dist", "loadfile", "--no-loadscope-reorder"),
    "alone": ("-n", "0"),
}
_NONE_COLLECTED = pytest.ExitCode.NO_TESTS_COLLECTED
_STRICT = "tests/system/"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("tiers", choices=_TIERS)
    parser.add_argument("--rerun", action="store_true")
    options, arguments = parser.parse_known_args()
    tiers = _TIERS[options.tiers]
    shutil.rmtree(_REPORTS, ignore_errors=True)
    if options.rerun:
        _FAILED.unlink(missing_ok=True)  # of another run
    begin_s = time.monotonic()
    statuses = {run(tier, group, arguments) for tier in tiers for group in GROUPS}
    if statuses != {_NONE_COLLECTED}:
        statuses.discard(_NONE_COLLECTED)  # of one group
    status = max(statuses)
    reports = sorted(_REPORTS.glob("*.xml"))
    print(f"\n{durations.table(durations.read(reports))}")
    counts = count(reports)
    if options.rerun and status == pytest.ExitCode.TESTS_FAILED:
        status = rerun(arguments, counts)
    minutes, seconds = divmod(round(time.monotonic() - begin_s), 60)
    print(f"\n{' and '.join(tiers)} tier: {minutes}:{seconds:02} minutes")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return status


def rerun(arguments: Sequence[str], counts: Counter[str]) -> int:
    """Run what failed once more, say so by name, and count it anew; the exit status."""
    failed = failed_tests()
    again = ("--last-failed", "--last-failed-no-failures=none")
    status = run("again", "alone", (*arguments, *again))
    still_failing = failed_tests() if status else []
    print("\n=== run once more by themselves, since they failed ===")
    for test in failed:
        verdict = "failed again" if test in still_failing else "passed then"
        print(f"{verdict}{', too late' if test.startswith(_STRICT) else ''}: {test}")
    num_passed = len(set(failed).difference(still_failing))
    counts["failed"] -= num_passed
    counts["passed"] += num_passed
    return status or int(any(test.startswith(_STRICT) for test in failed))


def run(tier: str, group: str, arguments: Sequence[str]) -> int:
    """pytest's exit status. The tier `again` is whatever was asked for."""
    print(f"\n=== {tier} tier, {group} ===", flush=True)
    chosen = () if tier == "again" else ("--tier", tier, "--group", group)
    report = _REPORTS / f"{tier}-{group}.xml"
    command = [sys.executable, "-m", "pytest", *_OF_GROUP[group], *chosen]
    return subprocess.run([*command, f"--junit-xml={report}", *arguments], check=False).returncode


def failed_tests() -> list[str]:
    return sorted(json.loads(_FAILED.read_text())) if _FAILED.exists() else []


def count(reports: Sequence[Path]) -> Counter[str]:
    """Tests that passed, failed (or whose set-up or tear-down did), and were skipped."""
    counts: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag for child in case}
            if outcomes & {"failure", "error"}:
                counts["failed"] += 1
            else:
                counts["skipped" if "skipped" in outcomes else "passed"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
