"""Which tests run when: two tiers, and in each of them two groups.

The first tier (`make test`) is what a change needs. The second (`make test-all` runs both) has what
is marked `exhaustive` or `external`; `make gpu` runs what is marked `gpu`.

Tests that kill or freeze processes (`process_kills`) run one at a time, apart from the others,
where what they look at may be over, or given up, when they come to it: whoever shares its cores
needs luck then. Where streams wait for the test (`tests/system/paced_engine.py`) or do not end
(`endless_streams.py`), the test runs beside others.

    pytest                                  all tests
    pytest --tier first --group alone       what the first tier kills
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

TIERS, GROUPS = ("first", "second", "gpu"), ("beside", "alone")
_SECOND, _ALONE = ("exhaustive", "external"), "process_kills"

# The folders that tests are in: those of the source whose behaviour they show, and some more. A
# test elsewhere is an error, so that each is where somebody would look for it.
_SOURCES = ("clients", "engine", "gateway", "kernels", "load")
_FOLDERS = {
    "system": "whole servers, as their users would start them",
    "system/browser": "the pages, in a browser",
}
_FILES = {
    "test_conftest.py": "what holds for all tests",
    "test_documents.py": "the Markdown files",
    "test_makefile.py": "the commands",
    "test_suite.py": "tiers, groups, durations",
}


def tiered(values: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Parameters of a test: the second tier has all of them, the first tier those of `first`.

    Args:
        values: for a test with several arguments, tuples.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in first else pytest.mark.exhaustive,
        )
        for value in values
    ]


def add_options(parser: pytest.Parser) -> None:
    options = parser.getgroup("tiers")
    options.addoption("--tier", choices=TIERS, help="only the tests of this tier")
    options.addoption("--group", choices=GROUPS, help="only those that run beside others, or alone")


class Tiers:
    """Leaves out what is not of the tier and group that were asked for.

    Args:
        tests: the folder of all tests.
    """

    def __init__(self, tests: Path) -> None:
        self._tests = tests

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Not to import files without a test of the group takes most of a small group's time."""
        is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
        if is_test and config.getoption("group") == "alone":
            return _ALONE not in collection_path.read_text("utf-8") or None
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for path in sorted({item.path for item in items}):
            self._check_place(path)
        tier, group = config.getoption("tier"), config.getoption("group")
        kept, left_out = [], []
        for item in items:
            fits = tier in (None, tier_of(item)) and group in (None, group_of(item))
            (kept if fits else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = kept

    def _check_place(self, path: Path) -> None:
        if not path.is_relative_to(self._tests):  # a test's own project
            return
        file = path.relative_to(self._tests)
        folder = file.parent
        has_place = (
            file.name in _FILES
            if folder == Path()
            else str(folder) in _FOLDERS
            or (folder.parts[0] in _SOURCES and (self._tests.parent / folder).is_dir())
        )
        if not has_place:
            raise pytest.UsageError(
                f"tests/{file} has no place: tests are in folders of the names of the source's, "
                "or in those that tests/support/tiers.py lists"
            )


def tier_of(item: pytest.Item) -> str:
    if item.get_closest_marker("gpu"):
        return "gpu"
    return "second" if any(map(item.get_closest_marker, _SECOND)) else "first"


def group_of(item: pytest.Item) -> str:
    return "alone" if item.get_closest_marker(_ALONE) else "beside"
