"""Shared by all tests: which of them can run on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

with contextlib.suppress(ImportError):  # a GPU's machine has its own packages
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's affair. What a change must pass (`.ci/run`) is the
    # same examples every time; `make test` draws new ones.
    settings.register_profile(
        "any machine",
        deadline=None,
        derandomize="PENSTOCK_TESTS_REQUIRE_ALL" in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

_PROGRAMS = {"redis": "redis-server", "browser": "chromium", "node": "npm", "nginx": "nginx"}


def _missing() -> list[str]:
    return [program for program in _PROGRAMS.values() if shutil.which(program) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a program that is not there."""
    missing = _missing()
    for item in items:
        for marker, program in _PROGRAMS.items():
            if program in missing and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{program} is not installed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line each what was skipped for want of a program."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for program in _missing():
        text = f"{program} is not installed"
        count = sum(text in reason for reason in reasons)
        terminalreporter.write_line(f"{count} tests skipped: {text}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything must run (`.ci/run`), a skip for want of a program is a failure."""
    if os.environ.get("PENSTOCK_TESTS_REQUIRE_ALL") and _missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
