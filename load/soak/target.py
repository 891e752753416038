"""The server that is soaked: one of ours started for it, one that runs already, or the synthetic
one. Knows how to kill it, and not when.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shlex
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import psutil

from penstock.engine.errors import ConfigError
from penstock.load.client.address import Address
from penstock.load.launch import Started, redis_server
from penstock.load.launch import server as launch_server
from penstock.load.soak.log_pipe import LogPipe
from penstock.load.soak.watch import Family
from penstock.load.synthetic import settings as synthetic_settings
from penstock.load.synthetic.server import serve as serve_synthetic

# Stores so small that they are full within the warm-up: what grows after that is a leak. A pool so
# small that it has to preempt.
_OWN_FLAGS = (
    "--session-store-bytes 1M --response-log-bytes 1M --num-blocks 512 --num-host-blocks 512"
)
# Of a server that is attacked: gateways that stand in for each other.
_ATTACKED_FLAGS = "--api-workers 2 --redis-url"
_READY_WITHIN_S = 60.0
_DOWN_S = 0.3
_NUM_READY = 10  # times in a row, as each of several gateways may answer


async def _at_once() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """
    Attributes:
        family: its processes by name, as they are when asked; none where they cannot be known.
        kill: kills what is to be killed, and returns its name when the server is ready again; None
            where nothing may be killed.
        victims: what may be frozen, by name: gateways, the engine, Redis.
        ready: waits until a server that was frozen is ready again.
        log: what the server logs to, where the reader may pause.
    """

    name: str
    base_url: str
    family: Callable[[], Family]
    kill: Callable[[], Awaitable[str]] | None = None
    victims: Callable[[], Family] = dict
    ready: Callable[[], Awaitable[None]] = _at_once
    log: LogPipe | None = None


@contextlib.contextmanager
def own_server(model: str | None, flags: str, *, is_attacked: bool) -> Iterator[Target]:
    """A penstock server. Kills are of its engine and, where there are several, of a gateway, in
    turn: one that is alone takes with it what it has in memory.

    Args:
        is_attacked: it has two gateways, a Redis of its own, and a log in a pipe.
    """
    with contextlib.ExitStack() as stack:
        log, others = None, dict[str, psutil.Process]()
        if is_attacked:
            log = stack.enter_context(LogPipe.opened())
            url, others["redis"] = stack.enter_context(redis_server())
            flags = f"{_ATTACKED_FLAGS} {url} {flags}"
        arguments = shlex.split(f"{_OWN_FLAGS} {flags}")
        started = stack.enter_context(
            launch_server(model, arguments, log=log.path, stderr=log.write_end)
            if log is not None
            else launch_server(model, arguments)
        )
        yield _own_target(started, others, log, f"{model or 'demo'} {shlex.join(arguments)}")


def _own_target(started: Started, others: Family, log: LogPipe | None, arguments: str) -> Target:
    def victims() -> dict[str, psutil.Process]:
        family = started.family().items()
        return {name: each for name, each in family if name == "engine" or "gateway" in name}

    names = list(victims())
    killed = itertools.cycle(names if len(names) > 2 else ["engine"])

    def num_returns() -> int:
        return started.log.read_text().count(" is back after ")

    async def ready() -> None:
        num_ready = 0
        async with asyncio.timeout(_READY_WITHIN_S):
            while num_ready < _NUM_READY:
                await asyncio.sleep(0.05)
                is_ready = await asyncio.to_thread(_is_ready, started.base_url)
                num_ready = num_ready + 1 if is_ready else 0

    async def kill() -> str:
        num_before, victim = num_returns(), next(killed)
        started.family()[victim].kill()
        async with asyncio.timeout(_READY_WITHIN_S):
            # A gateway that has not noticed yet says it is ready: the supervisor knows.
            while num_returns() == num_before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await ready()
        return victim

    return Target(
        name=f"penstock serve {arguments}",
        base_url=started.base_url,
        family=started.family,
        kill=kill,
        victims=lambda: {**victims(), **others},
        ready=ready,
        log=log,
    )


@contextlib.contextmanager
def synthetic_server(flags: str) -> Iterator[Target]:
    """The synthetic server. A kill is of all of it, as of a gateway."""
    parser = argparse.ArgumentParser(prog="--synthetic")
    synthetic_settings.add_arguments(parser)
    settings = synthetic_settings.from_arguments(parser.parse_args(shlex.split(flags)))
    with serve_synthetic(settings) as server:

        async def kill() -> str:
            server.kill()
            await asyncio.sleep(_DOWN_S)
            server.restart()
            return "synthetic"

        def family() -> Family:
            if server.process.poll() is not None:
                return {}
            return {"synthetic": psutil.Process(server.process.pid)}

        name = f"the synthetic server {flags}".strip()
        yield Target(name=name, base_url=server.base_url, family=family, kill=kill, victims=family)


def given_server(base_url: str) -> Target:
    """A server that runs. Its processes are those that listen at its port, if they are on this
    machine, and their children.

    Raises:
        ConfigError: the address is none that can be soaked.
    """
    address = Address.parse(base_url)
    if address.is_tls or address.prefix:
        raise ConfigError(f"--base-url {base_url!r}: soak needs plain http://host:port")
    is_here = address.host in ("127.0.0.1", "::1", "localhost")
    everybody = psutil.process_iter() if is_here else ()
    listeners = [process for process in everybody if _listens(process, address.port)]
    found = {process.pid: process for process in listeners}
    for process in listeners:
        found.update({child.pid: child for child in process.children(recursive=True)})
    family = {f"{process.name()} {pid}": process for pid, process in found.items()}
    return Target(name=base_url, base_url=f"http://{address.netloc}", family=lambda: family)


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="inet")
    except psutil.Error:  # not ours to look into
        return False
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )


def _is_ready(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/ready", timeout=5) as response:  # noqa: S310
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
