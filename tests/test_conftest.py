"""What `conftest.py` does for tests wherever they are run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cpu.build import CACHE_VARIABLE

from .support.fetched import kept

TESTS = Path(__file__).parent
INTERRUPTS = TESTS / "engine" / "offline" / "test_deferred_interrupt.py"


@pytest.mark.exhaustive
def test_tests_run_where_sigint_is_ignored() -> None:
    """As a shell has it ignored for what it runs in the background."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERRUPTS)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stdout


def test_what_was_fetched_is_kept_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by processes that fetch the same at the same time, the slower of which is this one."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def fill(folder: Path) -> None:
        (folder / "file").write_text("first")

    def fill_slowly(folder: Path) -> None:
        (folder / "file").write_text("second")
        assert (kept("name", b"wanted", fill) / "file").read_text() == "first"

    for _ in range(2):
        assert (kept("name", b"wanted", fill_slowly) / "file").read_text() == "first"
    assert (kept("name", b"another", fill_slowly) / "file").read_text() == "second"

    def fail(folder: Path) -> None:
        fill(folder)
        raise RuntimeError

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RuntimeError):
        kept("name", b"a third", fail)
    assert sorted(tmp_path.rglob("*")) == before
