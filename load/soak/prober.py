"""A separate process that asks `/health` and reads streams while a soak runs.

It does nothing else, so its figures exclude the event loop of the soak's clients; its own loop's
lag is reported with them. It ends when its pipe does, so it does not outlive a soak.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from itertools import pairwise
from multiprocessing.connection import Connection

import aiohttp

from penstock.load.client.records import Call, Message, StreamRecord
from penstock.load.client.transport import Wire
from penstock.load.soak.journal import Journal, Outcome, Probing
from penstock.load.workloads.datasets import WORDS

PROBE_EVERY_S = 0.2
# A connection belongs to one gateway: several, renewed now and then, so that each gateway is asked.
_NUM_CONNECTIONS = 8
_PROBES_PER_CONNECTION = 40
_NUM_STREAMS = 4
_STREAM_TOKENS = 512
_LAG_EVERY_S = 0.02
_PAUSE_S = 0.2
_PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def probing(
    base_url: str, model: str, api_key: str | None, journal: Journal
) -> AsyncIterator[Probing]:
    """Probe during the block; the results, and its streams in the journal, are there at the end."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_run, args=(its, base_url, model, api_key), daemon=True)
    process.start()
    its.close()
    seen = Probing()
    try:
        yield seen
        ours.send("end")
        for name, points in (await asyncio.to_thread(ours.recv)).items():
            setattr(seen, name, points)
        journal.outcomes.extend(seen.streams)
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, base_url: str, model: str, api_key: str | None) -> None:
    asyncio.run(_probe(pipe, base_url, model, api_key))


async def _probe(pipe: Connection, base_url: str, model: str, api_key: str | None) -> None:
    seen = Probing()
    works = [_ask(base_url, seen) for _ in range(_NUM_CONNECTIONS)]
    works += [_read(base_url, model, api_key, seen, seed) for seed in range(_NUM_STREAMS)]
    tasks = [asyncio.create_task(work) for work in (*works, _watch_lag(seen))]
    with contextlib.suppress(EOFError):  # the soak was killed
        await asyncio.to_thread(pipe.recv)
        pipe.send(asdict(replace(seen, streams=[])) | {"streams": seen.streams})
    for task in tasks:
        task.cancel()


async def _ask(base_url: str, seen: Probing) -> None:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    while True:
        async with aiohttp.ClientSession(base_url, timeout=timeout) as http:
            for _ in range(_PROBES_PER_CONNECTION):
                began_s = time.perf_counter()
                try:
                    async with http.get("/health") as response:
                        await response.read()
                except (aiohttp.ClientConnectionError, OSError) as error:
                    if not isinstance(error, TimeoutError):  # killed: no answer to measure
                        await asyncio.sleep(_PAUSE_S)
                        continue
                took_s = time.perf_counter() - began_s
                seen.health.append((began_s, took_s))
                await asyncio.sleep(PROBE_EVERY_S - took_s)


async def _read(base_url: str, model: str, api_key: str | None, seen: Probing, seed: int) -> None:
    rng = random.Random(seed)
    wire = Wire(endpoint="chat", api_key=api_key, stall_s=_PATIENCE_S)
    async with wire.open(base_url) as transport:
        while True:
            record = StreamRecord(scheduled_s=time.perf_counter())
            record.expected_tokens = _STREAM_TOKENS
            text = " ".join(rng.choices(WORDS, k=20))
            call = Call(
                model=model,
                messages=(Message(role="user", content=text),),
                max_tokens=_STREAM_TOKENS,
                ignore_eos=True,
            )
            try:
                await transport.stream(call, record)
            finally:
                ended_s = time.perf_counter()
                # The silence before a fault was a gap, too.
                times_s = record.event_times_s + [ended_s] * bool(record.faults)
                seen.gaps += [(at_s, next_s - at_s) for at_s, next_s in pairwise(times_s)]
            seen.streams.append(Outcome.of(record, "steady", ended_s=ended_s))
            if record.faults:
                await asyncio.sleep(_PAUSE_S)


async def _watch_lag(seen: Probing) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(_LAG_EVERY_S)
        seen.lags.append((began_s, time.perf_counter() - began_s - _LAG_EVERY_S))
