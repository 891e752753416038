"""Shared by all tests: which of them can run on this machine."""

from __future__ import annotations

import os
import shutil

import pytest

_PROGRAMS = {"redis": "redis-server", "browser": "chromium", "node": "npm", "nginx": "nginx"}
_missing = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a program that is not there; count it for one line at the end."""
    missing: dict[str, int] = {}
    for item in items:
        for marker, program in _PROGRAMS.items():
            if item.get_closest_marker(marker) and shutil.which(program) is None:
                missing[program] = missing.get(program, 0) + 1
                item.add_marker(pytest.mark.skip(reason=f"{program} is not installed"))
    config.stash[_missing] = missing


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for program, count in terminalreporter.config.stash.get(_missing, {}).items():
        terminalreporter.write_line(f"{count} tests skipped: {program} is not installed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything must run (`.ci/run`), a skip for want of a program is a failure."""
    if os.environ.get("PENSTOCK_TESTS_REQUIRE_ALL") and session.config.stash.get(_missing, {}):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
