"""One measured run against one server, with its metrics and a progress bar."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import orjson
from tqdm import tqdm

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Address, Dialogue, StreamRecord
from penstock.load.workloads.driver import Arrivals, ClosedLoop, RunResult, run
from penstock.load.workloads.options import Wire

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerPages:
    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def first_model(self) -> str:
        """The first model that the server lists. Raises ConfigError if it cannot be reached or
        lists none."""
        try:
            status, body = self._get("/v1/models")
        except OSError as error:
            raise ConfigError(f"no server at {self.base_url}: {error}") from error
        try:
            return str(orjson.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self.base_url}/v1/models lists no model (status {status}): pass --model"
            ) from error

    def metrics(self) -> str | None:
        """The Prometheus text; None without one."""
        try:
            status, body = self._get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        return body.decode(errors="replace") if status == 200 else None

    @asynccontextmanager
    async def watched(self, *, every_s: float) -> AsyncIterator[list[str]]:
        """The metrics before, regularly during, and after the block; empty if there are none.

        A thread fetches them, and they are parsed later, so as not to disturb the run.
        """
        texts: list[str] = []
        before = await asyncio.to_thread(self.metrics)
        if before is None:
            yield texts
            return
        texts.append(before)
        watch = asyncio.create_task(self._watch(texts, every_s))
        try:
            yield texts
        finally:
            watch.cancel()
        after = await asyncio.to_thread(self.metrics)
        if after is not None:
            texts.append(after)

    async def _watch(self, texts: list[str], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            text = await asyncio.to_thread(self.metrics)
            if text is not None:
                texts.append(text)

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body; without any proxy of the environment."""
        address = Address.parse(self.base_url)
        kind = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
        connection = kind(address.host, address.port, timeout=_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            connection.request("GET", address.prefix + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


# -- a measured run -----------------------------------------------------------------------------

_WATCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to measure."""

    name: str
    base_url: str
    model: str  # the name that requests carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, and the server's metrics before, during and after it, if it has any."""

    result: RunResult
    metrics_texts: Sequence[str]


def target_of(name: str, base_url: str, *, model: str | None, wire: Wire) -> Target:
    """A server to measure. Raises ConfigError if no model is named and the server does not name
    one."""
    pages = ServerPages(base_url, wire.api_key)
    return Target(name=name, base_url=base_url, model=model or pages.first_model())


async def warm_up(target: Target, wire: Wire, dialogues: Sequence[Dialogue]) -> None:
    """Send the first turns of some dialogues at once. Raises ConfigError if one had a fault,
    before every request has it."""
    first_turns = [replace(dialogue, turns=dialogue.turns[:1]) for dialogue in dialogues]
    async with wire.open(target.base_url) as transport:
        result = await run(
            transport,
            first_turns,
            arrivals=ClosedLoop(max(len(first_turns), 1)),
            model=target.model,
            extra=wire.extra,
        )
    for record in result.records:
        if not record.is_clean:
            raise ConfigError(
                f"{target.base_url}: a warm-up request was {record.faults[0]}: {record.detail}"
            )


async def measure(
    target: Target, wire: Wire, dialogues: Sequence[Dialogue], arrivals: Arrivals
) -> Measured:
    """Send a workload, with a progress bar in a terminal."""
    pages = ServerPages(target.base_url, wire.api_key)
    num_turns = sum(len(dialogue.turns) for dialogue in dialogues)
    with tqdm(total=num_turns, desc=target.name, unit="request", leave=False, disable=None) as bar:

        def advance(_: StreamRecord) -> None:
            bar.update()

        async with (
            wire.open(target.base_url) as transport,
            pages.watched(every_s=_WATCH_S) as metrics_texts,
        ):
            result = await run(
                transport,
                dialogues,
                arrivals=arrivals,
                model=target.model,
                history=wire.history,
                extra=wire.extra,
                on_end=advance,
            )
    return Measured(result=result, metrics_texts=metrics_texts)
