"""The parent process: binds the socket, keeps engine and gateways running, and cleans up.

It uses the standard library only, to stay small in memory. It hands one listening socket to every
gateway and keeps it open, so connections wait in the socket's queue while a gateway restarts.
Children ask the kernel to kill them when the supervisor dies (`engine.process.launch`).

    start      any child's death ends the command: exit code 1, or 2 if it refused an option
    running    a death is logged and the child restarts (`launch.child`); an engine without signs
               of life is killed and restarts too
    stopping   on SIGINT or SIGTERM: gateways, then the engine; exit code 0 if all of them ended by
               themselves. A second signal kills them
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import math
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.config import MAX_LOGPROBS, CacheConfig, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.process.launch import adopt_orphans
from penstock.engine.process.logs import configure_logging
from penstock.engine.settings.declaration import Section, settings_of
from penstock.gateway.config import GatewayConfig, pool_name
from penstock.gateway.launch.child import LOOK_INTERVAL_S, MAX_FAILED_STARTS, Child
from penstock.gateway.launch.config import ServeConfig
from penstock.gateway.launch.settings import ENGINE

_LOG = logging.getLogger("penstock")
_BACKLOG = 1024
# The engine is killed after this many looks without a sign of life: no legitimate work holds its
# interpreter's lock so long. Gateways have dropped it by then; their streams wait a minute.
_MAX_SILENT_LOOKS, _MIN_SILENT_LOOKS = 30, 5
_HAND_OVER_S = 5.0  # for an engine's streams to leave for another one
_STOP_MARGIN_S = 8.0  # for what a child does beside waiting, before it is killed
_DIRECTORY_PREFIX = "penstock-"
_LOCK = "lock"
_MAX_DIRECTORY_CHARS = 60  # a Unix socket's path has 107 bytes at most


class ServeError(Exception):
    """A child cannot run; the text is the child's, the exit code that of the command."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """Runs `penstock serve` or `penstock engine` until a signal or a failure ends it.

    Args:
        settings: all of the command's by key (`launch.settings`).
        without_effect: options of the command line that have no meaning here, and why.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        engine: EngineConfig,
        *,
        without_effect: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._engine_config = engine
        self._without_effect = without_effect
        self._children: list[Child] = []  # the engines first
        self._num_engines = 1  # or what starts them elsewhere
        self._num_local = 1
        self._adopts = adopt_orphans()
        self._selector = selectors.DefaultSelector()
        self._num_stop_signals = 0
        self._next_look_s = 0.0

    def run(self) -> int:
        """Serve; the command's exit code: 0 after an orderly stop, 1 after a failure, 2 if a
        child refused an option."""
        configure_logging("info", self._settings["log_format"], text_format="penstock: %(message)s")
        started_s = time.monotonic()
        is_well, failed = False, 1
        with _listen(self._settings) as listener, _run_directory() as directory, self._signals():
            try:
                self._children = self._plan(directory, listener)
                for child in self._children:
                    self._start(child)
                self._await_ready()
                if not self._num_stop_signals:
                    self._say_without_effect()
                    print(self._ready_line(listener, time.monotonic() - started_s), flush=True)
                    self._keep_running()
                is_well = True
            except ServeError as error:
                self._say_without_effect()
                print(f"penstock: error: {error}", file=sys.stderr, flush=True)
                failed = error.exit_code
            finally:
                if self._num_stop_signals:
                    grace_s = self._settings["shutdown_grace_s"]
                    _LOG.info("stopping; streams have %g s, a second signal ends them now", grace_s)
                listener.close()  # new connections are refused instead of left waiting
                if self._settings.get("uds") is not None:
                    Path(self._settings["uds"]).unlink(missing_ok=True)
                is_well = self._stop_all() and is_well
        return 0 if is_well else failed

    # -- start ------------------------------------------------------------------------------

    def _plan(self, directory: Path, listener: socket.socket) -> list[Child]:
        """The children of `penstock serve`: engines and gateways, or what starts engines on other
        machines."""
        num_local = 0 if self._settings["ray_address"] else self._settings["replicas"]
        config = dataclasses.replace(
            self._engine_config,
            device=dataclasses.replace(self._engine_config.device, num_sharing=num_local or 1),
        )
        address = f"{directory}/engine.sock"
        addresses = [
            address if i == 0 else f"{directory}/engine-{i}.sock" for i in range(num_local)
        ]
        engines = [
            self._plan_engine(
                "the engine" if num_local == 1 else f"engine {index}",
                config,
                {"address": each, "index": index, "drain_s": _HAND_OVER_S * (num_local > 1)},
            )
            for index, each in enumerate(addresses)
        ]
        if self._settings["ray_address"]:
            ray = "penstock.gateway.launch.ray_engines"
            theirs = _only(self._settings, *ENGINE, ServeConfig)
            engines = [Child("what starts engines on Ray", ray, theirs)]
        self._num_local, self._num_engines = num_local, len(engines)
        gateway = {
            **_only(self._settings, GatewayConfig),
            # A Unix socket has no host that a web page could have in common with it.
            "host": "" if listener.family == socket.AF_UNIX else listener.getsockname()[0],
            "host_name": self._settings["host"],
            "model": dataclasses.asdict(self._engine_config.model),
            "engine_address": address,
            "engine_addresses": addresses,
        }
        num_workers = self._settings["api_workers"]
        gateways = [
            Child(
                "the gateway" if num_workers == 1 else f"gateway {index}",
                "penstock.gateway.launch.process",
                {**gateway, "worker_index": index, "num_workers": num_workers},
                listener,
            )
            for index in range(num_workers)
        ]
        return [*engines, *gateways]

    def _plan_engine(
        self,
        label: str,
        config: EngineConfig,
        values: Mapping[str, Any],
        listener: socket.socket | None = None,
    ) -> Child:
        step_timeout_s = self._settings["step_timeout_s"]
        return Child(
            label,
            "penstock.engine.process",
            {
                "log_level": self._settings["log_level"],
                "log_format": self._settings["log_format"],
                "engine": dataclasses.asdict(config),
                "step_timeout_s": step_timeout_s,
                **values,
            },
            listener,
            max_silent_looks=_max_silent_looks(step_timeout_s),
            has_template=self._adopts,
        )

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:
            raise ServeError(f"{child.label} cannot be started: {error}") from error
        assert child.status_fd is not None
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)

    def _await_ready(self) -> None:
        while not self._num_stop_signals:
            for child in self._wait():
                if child.ready is None and child.failure is not None:
                    raise ServeError(child.failure, exit_code=child.exit_code)
            for child in self._children:
                # A child whose pipe is still open reports its reason there first.
                if child.is_dead and child.status_fd is None:
                    raise ServeError(child.reap())
            if all(child.ready is not None for child in self._children):
                return

    def _say_without_effect(self) -> None:
        found = [*self._without_effect, *self._without_effect_here()]
        self._without_effect = ()
        if found:
            _LOG.info("accepted without effect: %s", ", ".join(found))

    def _without_effect_here(self) -> Iterator[str]:
        """Options that mean nothing for this engine, model or API."""
        if (self._settings.get("max_logprobs") or 0) > MAX_LOGPROBS:
            yield f"--max-logprobs (more than {MAX_LOGPROBS} are never given)"
        engine = self._children[0].ready or {}
        if engine.get("device") == "cpu":
            if self._engine_config.device.cudagraph_mode == "none":
                yield "--cudagraph-mode none or --enforce-eager (a CPU has no CUDA graphs)"
            share = self._engine_config.cache.gpu_memory_utilization
            if share != CacheConfig().gpu_memory_utilization:
                yield "--gpu-memory-utilization (it runs on a CPU: see --kv-cache-memory-bytes)"
        if engine.get("is_native") and self._engine_config.model.trust_remote_code:
            yield "--trust-remote-code (this model runs without code of its own)"

    def _ready_line(self, listener: socket.socket, took_s: float) -> str:
        if listener.family == socket.AF_UNIX:
            return f"penstock is ready at unix:{listener.getsockname()}  ({self._about(took_s)})"
        scheme = "http" if self._settings["ssl_certfile"] is None else "https"
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104, E501  # fmt: skip
        base_url = f"{scheme}://{host}:{port}"  # harnesses read the first URL of this line
        return (
            f"penstock is ready at {base_url}  (chat page), "
            f"API: {base_url}/v1, dashboard: {base_url}/dashboard  ({self._about(took_s)})"
        )

    def _about(self, took_s: float) -> str:
        several = f"{self._num_local} engines, each " if self._num_local > 1 else ""
        about = self._about_engine() if self._num_local else "on engines elsewhere"
        gateway = self._children[-1].ready or {}
        formats = f"{gateway['formats']}, " if "formats" in gateway else ""
        place = f"chats are kept {gateway['place']}, " if "place" in gateway else ""
        model = self._settings["model"]
        return f"model {model}, {several}{about}, {formats}{place}{took_s:.1f} s"

    def _about_engine(self) -> str:
        engine = self._children[0].ready or {}
        kinds = [engine.get("dtype"), engine.get("quantization")]
        weights = " and ".join(str(kind) for kind in kinds if kind != "none")
        size = f"{int(engine.get('weight_bytes') or 0) / 1e6:,.1f} MB"
        return (
            f"{weights} on {engine.get('device')}, "
            f"weights {size}, "
            f"context {engine.get('max_model_len')}, "
            f"KV cache {engine.get('kv_cache_tokens')} tokens"
        )

    # -- run --------------------------------------------------------------------------------

    def _keep_running(self) -> None:
        """Restart children that die, until a signal comes.

        Raises:
            ServeError: a child keeps dying.
        """
        while not self._num_stop_signals:
            for child in self._wait(self._next_wake_s()):
                if child.ready is not None:
                    took_s = time.monotonic() - child.died_at_s
                    _LOG.info("%s is back after %.1f s", child.label, took_s)
            for child in self._children:
                if child.is_dead and child.status_fd is None:
                    self._note_death(child)
                if child.restart_at_s is not None and child.restart_at_s <= time.monotonic():
                    self._start(child)
            if self._adopts:
                self._reap_adopted()
            if time.monotonic() >= self._next_look_s:
                self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
                for child in self._children:
                    if child.look():
                        silent_s = child.num_silent_looks * LOOK_INTERVAL_S
                        text = (
                            "%s has given no sign of life for %.0f s: logging stacks, then killing"
                        )
                        _LOG.error(text, child.label, silent_s)

    def _reap_adopted(self) -> None:
        """Reap what others forked and has ended: templates, and what a dead child had started."""
        known = {child.process.pid for child in self._children if child.process is not None}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in known:
                    return  # its turn comes, and then that of what ended after it
                os.waitpid(ended.si_pid, 0)

    def _note_death(self, child: Child) -> None:
        ending = child.reap()
        assert child.restart_at_s is not None
        if child.restarts.is_hopeless:
            times = f"{MAX_FAILED_STARTS} times before it was ready"
            if self._has_another_engine(child):
                child.restart_at_s = None
                _LOG.error("%s does not come back; it died %s: %s", child.label, times, ending)
                return
            raise ServeError(f"{child.label} does not come back; it died {times}: {ending}")
        delay_s = child.restart_at_s - child.died_at_s
        when = f"restarting in {delay_s:.1f} s" if delay_s else "restarting"
        _LOG.error("%s; %s", ending, when)

    def _has_another_engine(self, child: Child) -> bool:
        """Whether a child is an engine that the others can do without."""
        engines = self._children[: self._num_engines]
        return child in engines and any(each.ready for each in engines if each is not child)

    def _next_wake_s(self) -> float | None:
        """Seconds until a restart or a look is due; None if none will be."""
        due = [child.restart_at_s for child in self._children if child.restart_at_s is not None]
        if any(child.is_watched for child in self._children):
            due.append(self._next_look_s)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _wait(self, timeout_s: float | None = None) -> list[Child]:
        """Wait for a signal or a child's status; the children whose status is now complete."""
        finished = []
        for key, _ in self._selector.select(timeout_s):
            child = key.data
            if child is None:
                key.fileobj.recv(4096)  # type: ignore[union-attr]  # the wake-up socket
            elif child.read_status():
                self._selector.unregister(key.fd)
                os.close(key.fd)
                child.status_fd = None
                finished.append(child)
        return finished

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGCHLD into wake-ups of the selector. Afterwards the exit code
        is settled, so a late SIGINT or SIGTERM is ignored until the process ends."""
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
        if self._num_stop_signals > 1:  # the second asks for an immediate end
            for child in self._children:
                child.kill()

    # -- stop -------------------------------------------------------------------------------

    def _stop_all(self) -> bool:
        """End the gateways, then the engines they stream from; whether all ended by themselves."""
        engines, gateways = self._children[: self._num_engines], self._children[self._num_engines :]
        # The second time is for readers of responses that another server's gateway runs now.
        grace_s = 2 * self._settings["shutdown_grace_s"] + _STOP_MARGIN_S
        return self._stop(gateways, grace_s) & self._stop(engines, self._engine_grace_s())

    def _engine_grace_s(self) -> float:
        if self._settings["ray_address"]:
            return float(self._settings["shutdown_grace_s"]) + _STOP_MARGIN_S
        return _STOP_MARGIN_S + _HAND_OVER_S * (self._num_local > 1)

    def _stop(self, children: Iterable[Child], grace_s: float) -> bool:
        running = [child for child in children if child.process is not None]
        for child in running:
            assert child.process is not None
            child.process.terminate()
        deadline_s = time.monotonic() + grace_s
        endings = [child.stop(deadline_s) for child in running]
        return all(endings)


class EngineSupervisor(Supervisor):
    """Runs `penstock engine`: an engine for gateways on other machines, and what registers it."""

    def _plan(self, directory: Path, listener: socket.socket) -> list[Child]:
        settings, address = self._settings, f"{directory}/engine.sock"
        tls = [settings[name] for name in ("tls_cert", "tls_key", "tls_ca")]
        values = {"address": address, "tls": tls, "drain_s": settings["shutdown_grace_s"]}
        engine = self._plan_engine("the engine", self._engine_config, values, listener)
        if settings["redis_url"] is None:
            return [engine]
        registrar = {
            "log_level": settings["log_level"],
            "log_format": settings["log_format"],
            "redis_url": settings["redis_url"],
            "model": pool_name(settings),
            "engine_address": address,
            "advertised": self._endpoint(listener),
        }
        return [engine, Child("the registrar", "penstock.gateway.launch.registrar", registrar)]

    def _endpoint(self, listener: socket.socket) -> str:
        host, port = listener.getsockname()[:2]
        host = self._settings["advertise"] or host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _ready_line(self, listener: socket.socket, took_s: float) -> str:
        return (
            f"penstock engine is ready at {self._endpoint(listener)}  "
            f"(model {self._settings['model']}, {self._about_engine()}, {took_s:.1f} s)"
        )

    def _engine_grace_s(self) -> float:
        return float(self._settings["shutdown_grace_s"]) + _STOP_MARGIN_S


def _max_silent_looks(step_timeout_s: float) -> int:
    """0: signs of life are not watched."""
    if not step_timeout_s:
        return 0
    return max(_MIN_SILENT_LOOKS, min(math.ceil(step_timeout_s), _MAX_SILENT_LOOKS))


def _only(settings: Mapping[str, Any], *sections: type[Section]) -> dict[str, Any]:
    """The settings of these sections."""
    keys = (each.key for each in settings_of(*sections))
    return {key: settings[key] for key in keys if key in settings}


def _listen(settings: Mapping[str, Any]) -> socket.socket:
    """
    Raises:
        ConfigError: host and port, or the path of --uds, cannot be listened on.
    """
    if settings.get("uds") is not None:
        return _listen_at_path(Path(settings["uds"]))
    host, port = settings["host"], settings["port"]
    problem: Exception = OSError("the host has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        found, problem = [], error
    for family, kind, _, _, address in found:
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener
    reason = _listen_fault(problem, host, port)
    raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from problem


def _listen_at_path(path: Path) -> socket.socket:
    """A Unix socket, for whoever may write to it: this user. That of a server that was killed is
    replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise OSError(errno.EADDRINUSE, "another server listens there")
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"--uds: cannot listen on {path}: {reason}") from error
    return listener


def _listen_fault(problem: Exception, host: str, port: int) -> str:
    """The problem, and what to do about it."""
    code = problem.errno if isinstance(problem, OSError) else None
    if code == errno.EADDRINUSE:
        return f"port {port} is in use; try --port 0"
    if code == errno.EACCES:
        return f"port {port} needs privileges; try one above 1023"
    if code == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; try --host 127.0.0.1 or --host 0.0.0.0"
    return getattr(problem, "strerror", None) or str(problem)


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    """A new folder for the engine's socket, for this user only, removed with the server.

    A supervisor that was killed leaves its folder, and the next one removes it. A folder is in use
    while its `lock` is held; the kernel releases the lock when its holder dies.
    """
    default = tempfile.gettempdir()
    root = Path(default if len(default) <= _MAX_DIRECTORY_CHARS else "/tmp")  # noqa: S108
    for path in root.glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or already removed
            _remove_directory_of_dead(path)
    with tempfile.TemporaryDirectory(prefix=_DIRECTORY_PREFIX, dir=root) as name:
        path = Path(name)
        with (path / "unlocked").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The file never has this name without being locked.
            (path / "unlocked").rename(path / _LOCK)
            yield path


def _remove_directory_of_dead(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return
    with (path / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
