"""`.ci/run` in a project of three tests, some of which pass only when they are run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = """\
check:
	@echo checked
test:
	@{python} -m pytest -q -p xdist -n 2 tests $(ARGS)
"""
# A test that fails as often as the file beside it says.
TEST = """\
from pathlib import Path

def test_it():
    path = Path(__file__).with_suffix(".num_failures")
    num_failures = int(path.read_text())
    path.write_text(str(num_failures - 1))
    assert num_failures <= 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("engine/test_a", "engine/test_b", "system/test_c"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST)
        path.with_suffix(".num_failures").write_text("0")
    return tmp_path


def ci_run(project: Path, **num_failures: int) -> tuple[int, list[str]]:
    """Its exit status and the lines it printed.

    Args:
        num_failures: of a module's test, before it passes.
    """
    for module, number in num_failures.items():
        (path,) = project.glob(f"tests/*/{module}.num_failures")
        path.write_text(str(number))
    # Not as a part of the `make test` that may run this one.
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    environment.pop("MFLAGS", None)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of the time of so small a run
    done = subprocess.run(
        ["bash", project / ".ci" / "run"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_where_all_pass_the_last_line_is_pytests(project: Path) -> None:
    status, lines = ci_run(project)
    assert status == 0
    assert lines[0] == "checked"
    assert lines[-1].startswith("3 passed in")


@pytest.mark.parametrize("number", [1, 2])
def test_what_passes_by_itself_is_named(project: Path, number: int) -> None:
    status, lines = ci_run(project, test_a=number)
    assert status == 0
    section = lines[-3 - number :]
    assert section[0].startswith("===")
    assert section[1] == "passed then: tests/engine/test_a.py::test_it"
    assert section[2].startswith("1 failed, 2 passed in")
    assert section[-1].startswith("1 passed")
    assert len([line for line in lines if line.startswith("passed then")]) == 1


def test_what_fails_three_times_has_failed(project: Path) -> None:
    status, lines = ci_run(project, test_a=3, test_b=1)
    assert status != 0
    assert lines[-5:-3] == [
        "failed again: tests/engine/test_a.py::test_it",
        "passed then: tests/engine/test_b.py::test_it",
    ]
    assert lines[-1].startswith("1 failed")


def test_a_system_test_has_to_pass_at_once(project: Path) -> None:
    status, lines = ci_run(project, test_c=1)
    assert status != 0
    assert "passed then, too late: tests/system/test_c.py::test_it" in lines
    assert lines[-1].startswith("1 passed")


def test_a_failure_that_an_earlier_run_left_is_not_this_ones(project: Path) -> None:
    ci_run(project, test_c=9)
    assert ci_run(project, test_c=0)[0] == 0


def test_where_a_check_fails_no_test_runs(project: Path) -> None:
    (project / "Makefile").write_text("check:\n\t@false\ntest:\n\t@echo tests run\n")
    status, lines = ci_run(project)
    assert status != 0
    assert "tests run" not in lines
