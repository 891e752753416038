"""A child of the supervisor: its start, status, end and restarts.

Settings go through a pipe, so that no secret shows in a command line, and one JSON line comes
back: ready, or why not (`engine.process.launch`). A child that left a template behind starts again
out of it (`engine.process.template`); without one, as the first time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.process.launch import (
    CONFIG_FD,
    EXIT_STUCK,
    HEARTBEAT_FD,
    LISTEN_FD,
    STATUS_FD,
    SUPERVISOR_PID,
    TEMPLATE_FD,
)

MAX_FAILED_STARTS = 5
LOOK_INTERVAL_S = 1.0
_LOOKS_FOR_STACKS = 2  # between asking for stacks and killing
_LOOKS_AT_STOPPED = 3  # before a stopped template is killed, which was to be the child
_HEALTHY_S = 30.0  # after this long, the next death counts as the first
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 10.0
_MAX_FROM_TEMPLATES = 2  # deaths in a row; the next start shares no memory with what died
_SOON_S = 10.0  # a death this soon after the last one may have the same cause
_WAIT_S = 0.01  # between looks whether a process has ended


@dataclass(slots=True)
class RestartPolicy:
    """When a dead child restarts: at once, then ever longer after it was last ready; and when to
    give up.

    Attributes:
        num_deaths: in a row, without a healthy time between them.
        num_failed_starts: how many of the latest came before the child was ready.
    """

    num_deaths: int = 0
    num_failed_starts: int = 0

    @property
    def is_hopeless(self) -> bool:
        return self.num_failed_starts >= MAX_FAILED_STARTS

    def note_death(self, ready_for_s: float | None) -> float:
        """Count a death; the seconds to wait before the restart. The time that the child was ready
        counts as waited: only one that dies soon again and again has to wait.

        Args:
            ready_for_s: how long the child was ready; None: never.
        """
        if ready_for_s is None:
            self.num_failed_starts += 1
        else:
            self.num_failed_starts = 0
            if ready_for_s >= _HEALTHY_S:
                self.num_deaths = 0
        self.num_deaths += 1
        if self.num_deaths == 1:
            return 0.0
        delay_s: float = min(_FIRST_DELAY_S * 2 ** min(self.num_deaths - 2, 16), _MAX_DELAY_S)
        return max(0.0, delay_s - (ready_for_s or 0.0))


@dataclass(slots=True)
class Child:
    """The engine or a gateway, over all its restarts.

    Attributes:
        label: for messages, as `the engine`.
        module: what is run.
        values: its settings.
        listener: a socket that it inherits.
        ready: its ready status since the last start.
        failure: why it could not start, in its own words.
        exit_code: with which the command then ends.
        max_silent_looks: looks in a row without a sign of life before a ready child is killed; 0:
            signs of life are not watched.
        num_silent_looks: in a row so far.
        pulse_fd: where signs of life come from.
        restart_at_s: on the monotonic clock; None while it runs.
        died_at_s: when it last died.
        keeps_pool: whether an engine may use what the one before left in its KV pool: not after a
            fault of its own, whose cause may be there or which may have written there, nor after
            two deaths soon after each other.
        has_template: whether it may leave a template behind; only where orphans are adopted.
    """

    label: str
    module: str
    values: Mapping[str, Any]
    listener: socket.socket | None = None
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    process: subprocess.Popen[bytes] | Adopted | None = None
    status_fd: int | None = None
    ready: dict[str, Any] | None = None
    failure: str | None = None
    exit_code: int = 1
    max_silent_looks: int = 0
    num_silent_looks: int = 0
    pulse_fd: int | None = None
    restart_at_s: float | None = None
    died_at_s: float = -math.inf
    keeps_pool: bool = False
    has_template: bool = False
    _template: socket.socket | None = None
    _ready_at_s: float | None = None
    _buffer: bytes = b""

    @property
    def is_watched(self) -> bool:
        """Whether `look` has something to look at."""
        return self.max_silent_looks > 0 or self._awaits_template

    @property
    def _awaits_template(self) -> bool:
        return self.ready is None and isinstance(self.process, Adopted)

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended and `reap` was not called yet."""
        return self.process is not None and self.process.poll() is not None

    def start(self) -> None:
        """Start the process; the caller then watches `status_fd`."""
        self.status_fd, status_write = os.pipe()
        os.set_blocking(self.status_fd, False)
        inherited = {STATUS_FD: status_write}
        if self.max_silent_looks:
            self.pulse_fd, inherited[HEARTBEAT_FD] = os.pipe()
            os.set_blocking(self.pulse_fd, False)
        given = list(inherited.values())
        if self.listener is not None:
            inherited[LISTEN_FD] = self.listener.fileno()
        self.ready = self.failure = self.restart_at_s = self._ready_at_s = None
        self.num_silent_looks = 0
        self._buffer = b""
        try:
            self.process = self._from_template(inherited) or self._from_nothing(inherited)
        finally:
            for number in given:
                os.close(number)

    def _from_template(self, inherited: Mapping[str, int]) -> Adopted | None:
        """The template as this child; None if there is none that waits."""
        pid = self._waiting_template()
        if pid is None:
            self._drop_template()  # it may come too late
            return None
        assert self._template is not None
        try:
            order = json.dumps([list(inherited), self.keeps_pool]).encode()
            socket.send_fds(self._template, [order], list(inherited.values()))
        except OSError:
            self._drop_template()
            return None
        return Adopted(pid)

    def _waiting_template(self) -> int | None:
        pid = None
        with contextlib.suppress(OSError):  # there is no more to read, or nobody writes any more
            while self._template is not None and (told := self._template.recv(64)):
                pid = int(told)
            return None  # it has ended
        return pid

    def _drop_template(self) -> None:
        """End the template, if there is one."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _from_nothing(self, inherited: Mapping[str, int]) -> subprocess.Popen[bytes]:
        config_read, config_write = os.pipe()
        process, given = None, {**inherited, CONFIG_FD: config_read}
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, config_read)
            if self.has_template:
                self._template, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._template.setblocking(False)
                given[TEMPLATE_FD] = stack.enter_context(theirs).fileno()
            try:
                process = subprocess.Popen(  # noqa: S603  (our own module)
                    [sys.executable, "-m", self.module],
                    env={
                        **os.environ,
                        **{name: str(number) for name, number in given.items()},
                        SUPERVISOR_PID: str(os.getpid()),
                    },
                    pass_fds=list(given.values()),
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C reaches only the supervisor, which ends children in order.
                    process_group=0,
                )
            finally:
                with contextlib.suppress(BrokenPipeError), os.fdopen(config_write, "wb") as pipe:
                    if process is not None:
                        stack.close()  # ours of what it reads from
                        pipe.write(json.dumps(self.values).encode())
        return process

    def read_status(self) -> bool:
        """Read its status; whether that was the end, with `ready` or `failure` set."""
        assert self.status_fd is not None
        try:
            data = os.read(self.status_fd, 65536)
        except BlockingIOError:
            return False
        self._buffer += data
        if data:
            return False  # the line ends with the pipe
        with contextlib.suppress(ValueError):  # cut short by its death
            event = json.loads(self._buffer or b"{}")
            if event.get("event") == "ready":
                self.ready, self._ready_at_s = event, time.monotonic()
            self.failure = event.get("message")
            self.exit_code = event.get("code", 1)
        return True

    def look(self) -> bool:
        """Look for a sign of life, once every `LOOK_INTERVAL_S`; whether the child has just been
        found silent. Then its stacks are requested, and some looks later it is killed.

        Looks are counted, not seconds, and a stopped child (SIGSTOP, a debugger) is not counted. A
        template is, which does not become the child because it is stopped: after a few looks it
        is killed, and the child starts as the first time.
        """
        if self._awaits_template:
            assert self.process is not None
            is_stopped = _is_stopped(self.process.pid)
            self.num_silent_looks = self.num_silent_looks + 1 if is_stopped else 0
            if self.num_silent_looks >= _LOOKS_AT_STOPPED:
                self.process.kill()
            return False
        if self.pulse_fd is None or self.process is None or self.ready is None:
            return False
        try:
            is_silent = not os.read(self.pulse_fd, 65536)  # it has ended
        except BlockingIOError:
            is_silent = True
        if is_silent and _is_stopped(self.process.pid):
            return False
        self.num_silent_looks = self.num_silent_looks + 1 if is_silent else 0
        if self.num_silent_looks >= self.max_silent_looks + _LOOKS_FOR_STACKS:
            self.process.kill()
        elif self.num_silent_looks == self.max_silent_looks:
            self.process.send_signal(signal.SIGUSR1)
            return True
        return False

    def reap(self) -> str:
        """Reap the dead process; how it died. Sets `restart_at_s`."""
        assert self.process is not None
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == EXIT_STUCK:
            how += ": a step did not end"
        self.process = None
        if self.pulse_fd is not None:
            os.close(self.pulse_fd)
            self.pulse_fd = None
        was_silent = 0 < self.max_silent_looks <= self.num_silent_looks
        last_died_at_s, self.died_at_s = self.died_at_s, time.monotonic()
        self.keeps_pool = (
            code == -signal.SIGKILL
            and not was_silent
            and self.died_at_s - last_died_at_s >= _SOON_S
        )
        ready_for_s = None if self._ready_at_s is None else self.died_at_s - self._ready_at_s
        self.restart_at_s = self.died_at_s + self.restarts.note_death(ready_for_s)
        if ready_for_s is None or self.restarts.num_deaths > _MAX_FROM_TEMPLATES:
            self._drop_template()  # perhaps its fault
        if self.failure is not None:
            return f"{self.label} could not start: {self.failure}"
        return f"{self.label} died ({how})"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def stop(self, deadline_s: float) -> bool:
        """Wait for the child to end after SIGTERM, and kill it at the deadline; whether it ended by
        itself.

        Args:
            deadline_s: on the monotonic clock.
        """
        self._drop_template()
        if self.process is None:
            return True
        try:
            code = self.process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code in (0, -signal.SIGTERM)


@dataclass(slots=True)
class Adopted:
    """A process that another one forked and that is now this one's child; as `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the call that this one interrupts, in a signal's handler
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Raises subprocess.TimeoutExpired: it still runs after `timeout` seconds."""
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_WAIT_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds it; False where that is unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
