"""One measured run against one server: warmed up, its metrics watched, progress shown.

Knows how a run is made, not what is said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, StreamRecord
from penstock.load.workloads.arrivals import Arrivals, ClosedLoop
from penstock.load.workloads.driver import RunResult, run
from penstock.load.workloads.server_pages import ServerPages
from penstock.load.workloads.wire import Wire

_WATCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to measure.

    Attributes:
        model: the name that requests carry.
    """

    name: str
    base_url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, and the server's metrics before, during and after it, if it has any."""

    result: RunResult
    metrics_texts: Sequence[str]


def target_of(name: str, base_url: str, *, model: str | None, wire: Wire) -> Target:
    """A server under a name of its own.

    Raises:
        ConfigError: no model is named, and it cannot be asked for one.
    """
    pages = ServerPages(base_url, wire.api_key)
    return Target(name=name, base_url=base_url, model=model or pages.first_model())


async def warm_up(target: Target, wire: Wire, dialogues: Sequence[Dialogue]) -> None:
    """Send the first turns of some dialogues, all at once.

    Raises:
        ConfigError: one had a fault: better now than in every request.
    """
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
    """Send a workload; a progress bar is shown in a terminal."""
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
