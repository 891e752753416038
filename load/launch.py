"""Starts servers for a bench, and stops them: above all `penstock serve` of this checkout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import redis

from penstock.engine.errors import ConfigError

T = TypeVar("T")
_PENSTOCK = Path(sys.executable).with_name("penstock")
_STOP_AND_CONTINUE = 'kill -STOP "$1" && sleep "$2"; kill -CONT "$1"'


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server answers 200 at once."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310
        return bool(response.status == 200)
    return False


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and its live descendants."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: psutil.Process, *, within_s: float) -> None:
    """Ask a process to end, wait for it, and kill what is left of its family."""
    processes = family(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    psutil.wait_procs([process], timeout=within_s)
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, timeout=within_s)


def end_as_interrupted() -> None:
    """Let a terminated bench stop what it started and wake what it froze: asyncio cancels the main
    task at SIGINT if this is its handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


async def freeze(process: psutil.Process, for_s: float) -> None:
    """Stop a process for a time. A shell does it, which wakes the process even if this one is
    killed."""
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", _STOP_AND_CONTINUE, "sh", str(process.pid), str(for_s)),
        stderr=asyncio.subprocess.DEVNULL,  # it may be gone already
        start_new_session=True,
    )
    try:
        await shell.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


_READY_WITHIN_S = 300.0
# The supervisor gives each of its two children 8 seconds.
_STOP_WITHIN_S = 20.0
_TAIL_LINES = 15
_LOOK_EVERY_S = 0.02


@contextmanager
def running(
    what: str,
    command: Sequence[object],
    until: Callable[[subprocess.Popen[str]], T | None],
    *,
    log: Path = Path(os.devnull),
    env: Mapping[str, str] | None = None,
    pipes: Mapping[str, int] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], T]]:
    """Run a command from when `until` gives something true, which is asked again and again, to the
    end of the block, when its whole family is stopped, by force if need be.

    Args:
        what: its name in errors.
        log: where it writes, but for the standard streams that `pipes` names.

    Raises ConfigError with the end of its log if it ended or was not ready in time.
    """
    with log.open("w", encoding="utf-8") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, **(pipes or {})}
        try:
            process = subprocess.Popen(  # noqa: S603  (our own command)
                [str(word) for word in command],
                # What a bench says is not kept among the user's chats; and what a server compiles
                # is kept for the next start, as where it is installed.
                env={
                    "PENSTOCK_DATA_DIR": "none",
                    **os.environ,
                    "PYTHONDONTWRITEBYTECODE": "",
                    **(env or {}),
                },
                text=True,
                process_group=0,  # Ctrl-C reaches only the bench, which then stops it
                **streams,  # type: ignore[call-overload]
            )
        except OSError as error:
            raise ConfigError(f"{what} did not start: {error}") from error
    try:
        give_up_s = time.perf_counter() + _READY_WITHIN_S
        while not (ready := until(process)):
            has_ended = process.poll() is not None
            if has_ended or time.perf_counter() > give_up_s:
                how = f"ended with {process.returncode}" if has_ended else "was not ready in time"
                raise ConfigError(f"{what} {how}; the end of its log:\n{tail(log)}")
            time.sleep(_LOOK_EVERY_S)
        yield process, ready
    finally:
        if process.poll() is None:
            end(psutil.Process(process.pid), within_s=_STOP_WITHIN_S)
        process.communicate()


def tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


# -- the servers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that is ready."""

    base_url: str
    ready_s: float  # from then to its ready line
    process: psutil.Process  # the supervisor
    log: Path  # its log; deleted after the server unless the caller named the file

    def family(self) -> dict[str, psutil.Process]:
        """Its live processes: `supervisor`, `gateway`, `engine`; a second gateway is `gateway
        2`."""
        found = {"supervisor": self.process}
        for child in self.process.children():
            name = title = child.name().removeprefix("penstock-")
            number = 1
            while name in found:
                number += 1
                name = f"{title} {number}"
            found[name] = child
        return found

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes of each process: `rss` counts all its pages, `pss` divides those that several
        share, so that it can be summed, and `uss` would be free without it."""
        return {name: each.memory_full_info()._asdict() for name, each in self.family().items()}


@contextmanager
def server(
    model: str | None = None,
    flags: Sequence[str] = (),
    *,
    log: Path | None = None,
    stderr: int | None = None,
) -> Iterator[Started]:
    """Run a server on a free port, and stop it at the end, by force if need be.

    Args:
        model: None for the demo model.
        log: the file for its log; None for one that is deleted with the server.
        stderr: a descriptor that it logs to instead; whoever reads it fills the file.

    Raises ConfigError with the end of its log if it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-launch-") as directory:
        path, launched_s = log or Path(directory) / "log", time.perf_counter()
        command = [_PENSTOCK, "serve", *([model] if model else []), "--port", "0", *flags]
        pipes = {"stdout": subprocess.PIPE} | ({} if stderr is None else {"stderr": stderr})
        with running("the server", command, _url, log=path, pipes=pipes) as (process, base_url):
            yield Started(
                base_url=base_url,
                ready_s=time.perf_counter() - launched_s,
                process=psutil.Process(process.pid),
                log=path,
            )


def _url(process: subprocess.Popen[str]) -> str | None:
    """The server's base URL, from its ready line."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _LOOK_EVERY_S)
    found = re.search(r"http://\S+", process.stdout.readline()) if readable else None
    return found and found.group()


@contextmanager
def peer_engine(flags: Sequence[str]) -> Iterator[str]:
    """`penstock engine` of the demo model on a free port of this machine: its address, once it
    listens. Raises ConfigError if it did not start."""
    port = free_port()
    address = f"127.0.0.1:{port}"

    def listens(_: object) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    command = (_PENSTOCK, "engine", "--listen", address, *flags)
    with running("penstock engine", command, listens):
        yield address


@contextmanager
def redis_server() -> Iterator[tuple[str, psutil.Process]]:
    """A Redis on a free port of this machine that keeps nothing on disk: its URL and its process.
    Raises ConfigError if it did not start."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"

    def pings(_: object) -> bool:
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(url) as client:
            return bool(client.ping())
        return False

    flags = ("--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no")
    with running("redis-server", ("redis-server", *flags), pings) as (process, _):
        yield url, psutil.Process(process.pid)
