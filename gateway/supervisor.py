"""The parent of all: binds the socket, starts engine and gateway, and leaves nothing behind.

Standard library only, so that it is small and its memory too. It hands one listening socket to
the gateway (a killed worker then loses no queued connection), passes settings through pipes (no
secret shows in their command lines) and reads one line from each child: ready, or why not. Children
ask the kernel to be killed when it dies (`engine.process`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError

_BACKLOG = 1024
_MAX_TEMP_PATH_CHARS = 60
_STOP_GRACE_S = 8.0  # after SIGTERM, before SIGKILL
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(slots=True)
class Child:
    """A process we started, and what it has told us."""

    name: str
    process: subprocess.Popen[bytes]
    status_fd: int
    ready: dict[str, Any] | None = None
    buffer: bytes = field(default=b"")


class StartupError(Exception):
    """A child could not start; the text is its own."""


class Supervisor:
    """Runs `penstock serve` until a signal or a failure ends it.

    Args:
        settings: every flag of `serve` by key (`gateway.cli`).
    """

    def __init__(self, settings: Mapping[str, Any], engine: EngineConfig) -> None:
        self._settings = settings
        self._engine = engine
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._num_stop_signals = 0

    def run(self) -> int:
        """Serve; the command's exit code: 0 after a signal, 1 after a failure."""
        started_s = time.monotonic()
        with (
            self._listen() as listener,
            tempfile.TemporaryDirectory(prefix="penstock-", dir=_socket_root()) as directory,
            self._signals(),
        ):
            try:
                address = f"ipc://{directory}/engine.sock"
                self._start("engine", self._engine_values(address))
                self._start("gateway", self._gateway_values(address, listener), listener)
                self._await_ready()
                if not self._num_stop_signals:
                    print(self._ready_line(listener, time.monotonic() - started_s), flush=True)
                return self._watch()
            except StartupError as error:
                print(f"penstock: error: {error}", file=sys.stderr, flush=True)
                return 1
            finally:
                self._stop_all()

    # -- start ------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        host, port = self._settings["host"], self._settings["port"]
        problem: Exception = OSError("the name has no address")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, OverflowError, UnicodeError) as error:
            found, problem = [], error
        for family, kind, _, _, address in found:
            listener = socket.socket(family, kind)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
            except (OSError, OverflowError) as error:
                listener.close()
                problem = error
            else:
                return listener
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from problem

    def _engine_values(self, address: str) -> dict[str, Any]:
        return {
            "engine": dataclasses.asdict(self._engine),
            "address": address,
            "log_level": self._settings["log_level"],
            "log_format": _LOG_FORMAT,
        }

    def _gateway_values(self, address: str, listener: socket.socket) -> dict[str, Any]:
        return {
            **self._settings,
            "host": listener.getsockname()[0],
            "host_name": self._settings["host"],
            "model": dataclasses.asdict(self._engine.model),
            "engine_address": address,
            "log_format": _LOG_FORMAT,
        }

    def _start(
        self, name: str, values: Mapping[str, Any], listener: socket.socket | None = None
    ) -> None:
        config_read, config_write = os.pipe()
        status_read, status_write = os.pipe()
        environment = {
            **os.environ,
            "PENSTOCK_CONFIG_FD": str(config_read),
            "PENSTOCK_STATUS_FD": str(status_write),
            "PENSTOCK_SUPERVISOR_PID": str(os.getpid()),
        }
        inherited = [config_read, status_write]
        if listener is not None:
            environment["PENSTOCK_LISTEN_FD"] = str(listener.fileno())
            inherited.append(listener.fileno())
        module = "penstock.engine.server" if name == "engine" else "penstock.gateway.process"
        process = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", module],
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches us alone, and we tell the children in order
        )
        os.close(config_read)
        os.close(status_write)
        with contextlib.suppress(BrokenPipeError), os.fdopen(config_write, "wb") as pipe:
            pipe.write(json.dumps(values).encode())
        child = Child(name, process, status_read)
        self._children[name] = child
        self._selector.register(status_read, selectors.EVENT_READ, child)

    def _await_ready(self) -> None:
        while not self._num_stop_signals:
            if all(child.ready is not None for child in self._children.values()):
                return
            for child in self._poll():
                self._read_status(child)
            for child in self._children.values():
                # One that has not spoken yet is reported by the end of its pipe, with its reason.
                if child.ready is not None and child.process.poll() is not None:
                    raise StartupError(_ending(child))

    def _read_status(self, child: Child) -> None:
        data = os.read(child.status_fd, 65536)
        child.buffer += data
        if data:
            return  # the line ends with the pipe
        self._selector.unregister(child.status_fd)
        os.close(child.status_fd)
        event = json.loads(child.buffer or b"{}")
        if event.get("event") == "ready":
            child.ready = event
        else:
            raise StartupError(event.get("message") or _ending(child))

    def _ready_line(self, listener: socket.socket, took_s: float) -> str:
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104, E501  # fmt: skip
        engine = self._children["engine"].ready or {}
        is_int8 = engine.get("quantization") == "int8"
        dtype = f"{engine.get('dtype')}{' and int8' if is_int8 else ''}"
        return (
            f"penstock is ready at http://{host}:{port}  "
            f"(model {self._settings['model']}, {dtype} on {engine.get('device')}, "
            f"context {engine.get('max_model_len')}, "
            f"KV cache {engine.get('kv_cache_tokens')} tokens, {took_s:.1f} s)"
        )

    # -- run --------------------------------------------------------------------------------

    def _watch(self) -> int:
        """Wait for a signal (0) or the gateway's end (1). An engine's end is said, not fatal:
        the gateway answers for it."""
        engine_is_dead = False
        while not self._num_stop_signals:
            if self._children["gateway"].process.poll() is not None:
                print(f"penstock: error: {_ending(self._children['gateway'])}", file=sys.stderr)
                return 1
            if not engine_is_dead and self._children["engine"].process.poll() is not None:
                engine_is_dead = True
                text = f"{_ending(self._children['engine'])}; restart the server"
                print(f"penstock: error: {text}", file=sys.stderr, flush=True)
            self._poll()
        return 0

    def _poll(self) -> list[Child]:
        """Wait for a status line, a signal or a child's end."""
        ready = []
        for key, _ in self._selector.select():
            if isinstance(key.data, Child):
                ready.append(key.data)
            else:
                key.fileobj.recv(4096)  # type: ignore[union-attr]  # the wake-up socket
        return ready

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGCHLD into wake-ups of the selector; to the end of the
        process, whose exit code is settled then, a late SIGINT or SIGTERM changes nothing."""
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.setblocking(False)
            sender.setblocking(False)
            self._selector.register(receiver, selectors.EVENT_READ)
            signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, self._on_signal)
            try:
                yield
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
                self._selector.close()

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGCHLD:
            return
        self._num_stop_signals += 1
        if self._num_stop_signals > 1:  # asked twice: at once
            for child in self._children.values():
                child.process.kill()

    # -- stop -------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """End the children, the gateway before the engine it streams from."""
        for name in ("gateway", "engine"):
            child = self._children.get(name)
            if child is None:
                continue
            child.process.terminate()
            try:
                child.process.wait(timeout=_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def _socket_root() -> str | None:
    """Where the socket's folder is made: a Unix socket's path has 107 bytes at most."""
    return "/tmp" if len(tempfile.gettempdir()) > _MAX_TEMP_PATH_CHARS else None  # noqa: S108


def _ending(child: Child) -> str:
    code = child.process.wait()
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the {child.name} died ({how})"
