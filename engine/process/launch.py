"""The supervisor's child processes: they read their settings, report, and die with the supervisor.

The supervisor passes three environment variables: `PENSTOCK_CONFIG_FD` (a pipe with one JSON
object, so that no secret shows in a process list), `PENSTOCK_STATUS_FD` (a pipe for JSON lines
about start-up) and `PENSTOCK_SUPERVISOR_PID`. A child that accepts connections gets the socket as
`PENSTOCK_LISTEN_FD`. A child that must show signs of life also gets
`PENSTOCK_HEARTBEAT_FD`, a pipe for one byte each. One that may leave a template behind gets
`PENSTOCK_TEMPLATE_FD` (`engine.process.template`), and both then have `PENSTOCK_POOL_FD`
(`engine.blocks.lasting_pool`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.errors import ConfigError, EngineError, ModelLoadError

CONFIG_FD = "PENSTOCK_CONFIG_FD"
STATUS_FD = "PENSTOCK_STATUS_FD"
SUPERVISOR_PID = "PENSTOCK_SUPERVISOR_PID"
HEARTBEAT_FD = "PENSTOCK_HEARTBEAT_FD"
LISTEN_FD = "PENSTOCK_LISTEN_FD"
TEMPLATE_FD = "PENSTOCK_TEMPLATE_FD"
POOL_FD = "PENSTOCK_POOL_FD"
EXIT_WRONG_OPTION = 2  # exit code of the command; a restart would not help
EXIT_STUCK = 70  # exit code of an engine whose step hung
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


class Status:
    """Reports to the supervisor, once: either ready or failed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ready(self, **details: object) -> None:
        self._say({"event": "ready", **details})

    def failed(self, message: str, *, code: int = 1) -> None:
        """`code` is how the supervisor ends."""
        self._say({"event": "failed", "message": message, "code": code})

    def _say(self, event: Mapping[str, object]) -> None:
        try:
            os.write(self._fd, json.dumps(event).encode() + b"\n")
            os.close(self._fd)
        except OSError:
            pass  # the supervisor has died, and this process dies with it


def run_child(
    title: str,
    main: Callable[[Mapping[str, Any], Status], None],
    *,
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config,
) -> int:
    """Run `main(prepare(config), status)` as a child process; its exit code. `prepare` may fork.

    A user's mistake (`EngineError`) is reported in one line through the status pipe; any other
    exception is a bug, and its traceback is logged too.
    """
    import setproctitle  # a GPU's machine, where only models run, may lack it

    setproctitle.setproctitle(title)
    die_with_parent(int(os.environ[SUPERVISOR_PID]))
    with os.fdopen(int(os.environ[CONFIG_FD]), "rb") as pipe:
        config = json.load(pipe)
    try:
        prepared = prepare(config)
        main(prepared, _status())
    except EngineError as error:
        is_option = isinstance(error, ConfigError) and not isinstance(error, ModelLoadError)
        _status().failed(str(error), code=EXIT_WRONG_OPTION if is_option else 1)
        return 1
    except BaseException as error:
        _status().failed(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    return 0


def _status() -> Status:
    """The process's own: that of a fork is another."""
    return Status(int(os.environ[STATUS_FD]))


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent dies, for whatever reason."""
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def adopt_orphans() -> bool:
    """Have processes whose parent dies become this one's children, if it started that parent;
    whether the system can do so."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> bool:
    """Set an attribute of this process; False where the system has no such attributes."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:  # not Linux
        return False
    return bool(prctl(option, argument) == 0)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)
