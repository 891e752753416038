"""What `conftest.py` does for tests wherever they are run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
INTERRUPTS = TESTS / "engine" / "test_deferred_interrupt.py"


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
