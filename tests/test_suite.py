"""The suite and its tiers, in a project of few tests, some of which pass only when run again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import durations

ROOT = Path(__file__).parents[1]
CONFTEST = """\
from pathlib import Path
from tests.support import tiers
from tests.support.durations import CpuSeconds

def pytest_addoption(parser):
    tiers.add_options(parser)

def pytest_configure(config):
    for name in ("exhaustive", "external", "gpu", "process_kills"):
        config.addinivalue_line("markers", name)
    config.pluginmanager.register(tiers.Tiers(Path(__file__).parent))
    config.pluginmanager.register(CpuSeconds())
"""
# A test that fails as often as the file beside it says.
TEST = """\
from pathlib import Path
import pytest

{mark}
def test_it():
    path = Path(__file__).with_suffix(".num_failures")
    num_failures = int(path.read_text())
    path.write_text(str(num_failures - 1))
    assert num_failures <= 0
"""
MAKEFILE = """\
check:
	@echo checked
test-all:
	@{python} -m tests.support.suite all $(ARGS)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "engine").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    add_test(tmp_path, "engine/test_a.py")
    add_test(tmp_path, "engine/test_b.py", mark="exhaustive")
    add_test(tmp_path, "system/test_c.py", mark="process_kills")
    add_test(tmp_path, "engine/test_gpu.py", mark="gpu")
    # Not a part of the run that runs this.
    for name in [name for name in os.environ if "MAKE" in name or "PYTEST" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of so small a run
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q -p xdist")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def add_test(project: Path, file: str, *, mark: str = "") -> None:
    path = project / "tests" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEST.format(mark=mark and f"@pytest.mark.{mark}"))
    path.with_suffix(".num_failures").write_text("0")


def fail(project: Path, **num_failures: int) -> None:
    """Let modules' tests fail so often before they pass."""
    for module, number in num_failures.items():
        (path,) = project.glob(f"tests/*/{module}.num_failures")
        path.write_text(str(number))


def output(project: Path, *command: str | Path) -> tuple[int, list[str]]:
    """A command's exit status and the lines it printed."""
    done = subprocess.run(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout.splitlines()


def suite(project: Path, *arguments: str) -> tuple[int, list[str]]:
    return output(project, sys.executable, "-m", "tests.support.suite", *arguments)


@pytest.mark.exhaustive
def test_ci_runs_the_checks_and_everything_though_a_make_runs_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGS", "--no-such-option")
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--no-such-option")
    status, lines = output(project, "bash", project / ".ci" / "run")
    assert status == 0
    assert lines[0] == "checked"
    assert lines[-1] == "3 passed, 0 failed, 0 skipped"
    assert re.fullmatch(r"first and second tier: \d+:\d\d minutes", lines[-2])


def test_where_a_check_fails_no_test_runs(project: Path) -> None:
    (project / "Makefile").write_text("check:\n\t@false\ntest-all:\n\t@echo tests run\n")
    status, lines = output(project, "bash", project / ".ci" / "run")
    assert status != 0
    assert "tests run" not in lines


def test_a_tier_runs_its_tests_and_writes_what_they_took(project: Path) -> None:
    status, lines = suite(project, "first")
    assert status == 0
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"
    reports = sorted((project / "build" / "tests").iterdir())
    assert [report.name for report in reports] == ["first-alone.xml", "first-beside.xml"]
    found = durations.read(reports)
    assert [(file, test) for file, test in found] == [
        ("tests/system/test_c", "test_it"),
        ("tests/engine/test_a", "test_it"),
    ]
    rows = [line.split() for line in lines]
    for name in ("tests/engine/test_a", "tests/engine/test_a::test_it"):
        assert [row[2] for row in rows if row[-1:] == [name]] == ["1"]


@pytest.mark.exhaustive
def test_arguments_go_to_pytest(project: Path) -> None:
    assert suite(project, "all", "tests/engine/test_b.py")[0] == 0
    status, lines = suite(project, "first", "-k", "no_such_test")
    assert status != 0
    assert lines[-1] == "0 passed, 0 failed, 0 skipped"


@pytest.mark.exhaustive
def test_what_fails_has_failed(project: Path) -> None:
    fail(project, test_a=1)
    status, lines = suite(project, "first")
    assert status != 0
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.exhaustive
def test_with_rerun_what_passes_by_itself_is_named(project: Path) -> None:
    fail(project, test_a=1)
    status, lines = suite(project, "all", "--rerun")
    assert status == 0
    assert [line for line in lines if line.startswith(("passed then", "failed again"))] == [
        "passed then: tests/engine/test_a.py::test_it"
    ]
    assert lines[-1] == "3 passed, 0 failed, 0 skipped"


def test_what_fails_twice_has_failed(project: Path) -> None:
    fail(project, test_a=2, test_b=1)
    status, lines = suite(project, "all", "--rerun")
    assert status != 0
    assert "failed again: tests/engine/test_a.py::test_it" in lines
    assert "passed then: tests/engine/test_b.py::test_it" in lines
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"


@pytest.mark.exhaustive
def test_a_system_test_has_to_pass_at_once(project: Path) -> None:
    fail(project, test_c=1)
    status, lines = suite(project, "all", "--rerun")
    assert status != 0
    assert "passed then, too late: tests/system/test_c.py::test_it" in lines


@pytest.mark.exhaustive
def test_a_failure_that_an_earlier_run_left_is_not_this_ones(project: Path) -> None:
    fail(project, test_c=9)
    suite(project, "first", "--rerun")
    fail(project, test_c=0)
    assert suite(project, "first", "--rerun")[0] == 0


@pytest.mark.parametrize("file", ["test_new.py", "elsewhere/test_new.py", "engine/new/test_new.py"])
def test_a_test_without_its_place_is_an_error(project: Path, file: str) -> None:
    add_test(project, file)
    status, lines = output(project, sys.executable, "-m", "pytest")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert any(f"tests/{file} has no place" in line for line in lines)


@pytest.mark.exhaustive
def test_cpu_time_is_that_of_a_test_and_of_what_it_starts(project: Path) -> None:
    burn = "while time.process_time() < 0.3: pass"
    (project / "tests" / "engine" / "test_a.py").write_text(
        "import subprocess, sys, time\n"
        f"burn = 'import time\\n{burn}'\n"
        "def test_itself():\n"
        "    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
        "def test_a_child():\n"
        "    subprocess.run([sys.executable, '-c', burn])\n"
        "def test_a_child_that_lives_on():\n"
        "    child = subprocess.Popen([sys.executable, '-c', burn + '\\nprint(1, flush=True)\\n'\n"
        "        'input()'], stdout=subprocess.PIPE, stdin=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
    )
    suite(project, "first", "tests/engine/test_a.py")
    found = durations.read([project / "build" / "tests" / "first-beside.xml"])
    assert len(found) == 3
    assert all(duration.cpu_s >= 0.28 for duration in found.values())
