"""A template of the engine's process: its imports are done, and the next engine comes out of it.

Importing torch takes most of an engine's start. So before an engine loads its model, it forks a
process that waits, and shares its memory with it until one of them writes there. When the engine
dies, the template leaves a new one behind, and is the engine.

The template forks before anything starts a thread, opens a socket or touches a model; of the
engine's descriptors it has only that of the KV pool's file, which it does not map. Its parent is
the supervisor, which is the subreaper of what it started (Linux only). Orders come through a
socket, whose number is in `PENSTOCK_TEMPLATE_FD`:

    template   →  its process id, once it waits
    supervisor →  as JSON, the names of variables of `engine.process.launch`, with a descriptor
                  each, and whether to keep what an engine left in the pool (`blocks.lasting_pool`)

The end of the socket, at either end, says that the other one is gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from penstock.engine.process.launch import (
    HEARTBEAT_FD,
    LISTEN_FD,
    POOL_FD,
    STATUS_FD,
    SUPERVISOR_PID,
    TEMPLATE_FD,
    die_with_parent,
)

TEMPLATE_TITLE = "penstock-template"
_MAX_ORDER_BYTES, _MAX_DESCRIPTORS = 4096, 8
_LOOK_S = 0.001
_STDERR_FD = 2
_GPUS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def leave_template(title: str) -> None:
    """Leave a template behind, if the supervisor asked for one. Returns at once in this process;
    and later in the template, when it becomes the engine, with its own descriptors in the
    environment. Without memory for another process, the engine runs without a template.

    Args:
        title: of the engine's process.
    """
    supervisor = _supervisor()
    if supervisor is None:
        return
    import setproctitle  # as in `engine.process.launch`

    with contextlib.suppress(AttributeError, OSError):  # the system has none, or none is left
        os.environ[POOL_FD] = str(os.memfd_create("penstock-kv"))
    gc.freeze()  # a collection would write to objects, and so end their being shared
    with supervisor:
        while threading.active_count() == 1 and _fork_orphan():
            try:
                os.environ.update(_await_turn(supervisor))
                setproctitle.setproctitle(title)
            except BaseException as error:
                _give_up(error)


def decline_template() -> None:
    """Tell the supervisor that there will be no template."""
    supervisor = _supervisor()
    if supervisor is not None:
        supervisor.close()


def common_file() -> int | None:
    """A descriptor of a file without a name, in memory, that this process and its template have in
    common; None: there is none."""
    number = os.environ.get(POOL_FD)
    return None if number is None else int(number)


def has_gpu() -> bool:
    """Whether a driver of a GPU is there, without asking torch, which would start it."""
    return any(map(os.path.exists, _GPUS))


def _supervisor() -> socket.socket | None:
    number = os.environ.pop(TEMPLATE_FD, None)
    return None if number is None else socket.socket(fileno=int(number))


def _fork_orphan() -> bool:
    """Fork a process whose parent is the supervisor; True in that process, without what it would
    keep open of the engine's."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        import setproctitle

        setproctitle.setproctitle(TEMPLATE_TITLE)  # never another process of the engine's name
        if os.fork():
            os._exit(0)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles it
        for name in (STATUS_FD, HEARTBEAT_FD, LISTEN_FD):
            if name in os.environ:
                os.close(int(os.environ.pop(name)))
        while os.getppid() == between:
            time.sleep(_LOOK_S)
        die_with_parent(int(os.environ[SUPERVISOR_PID]))
    except BaseException as error:
        _give_up(error)
    return True


def _give_up(error: BaseException) -> NoReturn:
    """End the process: it must not go on as the engine's, which would run twice."""
    if not isinstance(error, ConnectionError):  # the supervisor needs no template any more
        line = f"penstock: a template of the engine gave up: {type(error).__name__}: {error}\n"
        with contextlib.suppress(OSError):
            os.write(_STDERR_FD, line.encode())
    os._exit(1)


def _await_turn(supervisor: socket.socket) -> Mapping[str, str]:
    """Wait until this process is to be the engine; its descriptors by the name of the variable."""
    supervisor.send(b"%d" % os.getpid())
    order, numbers, _, _ = socket.recv_fds(supervisor, _MAX_ORDER_BYTES, _MAX_DESCRIPTORS)
    if not order:  # the supervisor needs no template any more
        os._exit(0)
    names, keeps_pool = json.loads(order)
    if not keeps_pool and POOL_FD in os.environ:
        os.ftruncate(int(os.environ[POOL_FD]), 0)
    return dict(zip(names, map(str, numbers), strict=True))
