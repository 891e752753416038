"""Starts our own server for a bench: `penstock serve` of this checkout, in its own processes."""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from penstock.engine.errors import ConfigError

_STOP_AND_CONTINUE = 'kill -STOP "$1" && sleep "$2"; kill -CONT "$1"'


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one process. `proportional_bytes` divides each shared page by its number of users,
    so sums over processes are right; it is 0 where the system does not report it (only Linux does).
    """

    resident_bytes: int  # all its pages in memory, shared ones too
    proportional_bytes: int
    unique_bytes: int  # private pages, which its end would free


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

    def memory(self) -> dict[str, Memory]:
        """The memory of each process of the family."""
        return {title: _memory(process) for title, process in self.family().items()}


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
        path = log or Path(directory) / "log"
        launched_s = time.perf_counter()
        process = _launch(model, flags, path, stderr)
        try:
            base_url = _await_ready(process, path)
            yield Started(
                base_url=base_url,
                ready_s=time.perf_counter() - launched_s,
                process=psutil.Process(process.pid),
                log=path,
            )
        finally:
            _stop(process)


@contextmanager
def peer_engine(flags: Sequence[str]) -> Iterator[str]:
    """`penstock engine` of the demo model on a free port of this machine: its address, once it
    listens. Raises ConfigError if it did not start."""
    address = f"127.0.0.1:{free_port()}"
    penstock = Path(sys.executable).with_name("penstock")
    process = subprocess.Popen(  # noqa: S603  (our own command)
        [str(penstock), "engine", "--listen", address, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        give_up_s = time.perf_counter() + _READY_WITHIN_S
        while not _listens_at(address):
            if process.poll() is not None or time.perf_counter() > give_up_s:
                raise ConfigError("penstock engine did not start")
            time.sleep(0.1)
        yield address
    finally:
        end(psutil.Process(process.pid), within_s=_STOP_WITHIN_S)
        process.wait()


def _listens_at(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def redis_server() -> Iterator[tuple[str, psutil.Process]]:
    """A Redis on a free port of this machine that keeps nothing on disk: its URL and its process.
    Raises ConfigError if it did not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    flags = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")
    try:
        process = subprocess.Popen(  # noqa: S603
            ("redis-server", *flags),  # noqa: S607
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    except OSError as error:
        raise ConfigError(f"redis-server did not start: {error}") from error
    try:
        with redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 50)) as client:
            client.ping()
        yield url, psutil.Process(process.pid)
    except redis.RedisError as error:
        raise ConfigError(f"redis-server did not start: {error}") from error
    finally:
        process.kill()
        process.wait()


def _launch(
    model: str | None, flags: Sequence[str], log: Path, stderr: int | None
) -> subprocess.Popen[str]:
    penstock = Path(sys.executable).with_name("penstock")
    command = [str(penstock), "serve", *([model] if model else []), "--port", "0", *flags]
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(  # noqa: S603  (our own command)
            command,
            # What a bench says is not kept among the user's chats.
            env={"PENSTOCK_DATA_DIR": "none", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file if stderr is None else stderr,
            text=True,
            process_group=0,  # Ctrl-C reaches only the bench, which then stops the server
        )


def _await_ready(process: subprocess.Popen[str], log: Path) -> str:
    """The server's base URL, from its ready line."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _READY_WITHIN_S)
    line = process.stdout.readline() if readable else ""
    found = re.search(r"http://\S+", line)
    if found is None:
        how = "ended" if readable else f"was not ready within {_READY_WITHIN_S:g} s"
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-_TAIL_LINES:])
        raise ConfigError(f"the server {how}; the end of its log:\n{tail}")
    return found.group()


def _stop(process: subprocess.Popen[str]) -> None:
    """End the whole family, with children that outlive the supervisor."""
    if process.poll() is None:
        end(psutil.Process(process.pid), within_s=_STOP_WITHIN_S)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _memory(process: psutil.Process) -> Memory:
    info = process.memory_full_info()
    return Memory(
        resident_bytes=info.rss, proportional_bytes=getattr(info, "pss", 0), unique_bytes=info.uss
    )
