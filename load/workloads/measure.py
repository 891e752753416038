"""One measured run against one server, with a progress bar."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from tqdm import tqdm

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Address, Dialogue, StreamRecord
from penstock.load.workloads.driver import Arrivals, ClosedLoop, RunResult, run
from penstock.load.workloads.options import Wire

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to measure."""

    name: str
    base_url: str
    model: str  # the name that requests carry


def target_of(name: str, base_url: str, *, model: str | None, wire: Wire) -> Target:
    """A server to measure. Raises ConfigError if no model is named and the server does not name
    one."""
    return Target(name=name, base_url=base_url, model=model or first_model(base_url, wire.api_key))


def first_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises ConfigError if it cannot be reached or lists
    none."""
    address = Address.parse(base_url)
    url = f"http{'s' * address.is_tls}://{address.netloc}{address.prefix}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as got:  # noqa: S310
            return str(orjson.loads(got.read())["data"][0]["id"])
    except (urllib.error.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} lists no model ({error}): pass --model") from error
    except OSError as error:
        raise ConfigError(f"no server at {base_url}: {error}") from error


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
) -> RunResult:
    """Send a workload, with a progress bar in a terminal."""
    num_turns = sum(len(dialogue.turns) for dialogue in dialogues)
    with tqdm(total=num_turns, desc=target.name, unit="request", leave=False, disable=None) as bar:

        def advance(_: StreamRecord) -> None:
            bar.update()

        async with wire.open(target.base_url) as transport:
            return await run(
                transport,
                dialogues,
                arrivals=arrivals,
                model=target.model,
                history=wire.history,
                extra=wire.extra,
                on_end=advance,
            )
