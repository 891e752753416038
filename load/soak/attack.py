"""An attack beside the traffic: one kind of adversity at a time, each bounded, in rounds.

Kills, freezes, floods, silent handshakes, an unread log, prompts of 4 MB, and what is `expensive`.
What a server must refuse is checked here; `verdict.costs` judges the effect on other streams.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import aiohttp

from penstock.load.launch import freeze
from penstock.load.soak import expensive, traffic
from penstock.load.soak.hostile import large_prompts
from penstock.load.soak.journal import Adversity, Kind
from penstock.load.soak.scene import Scene, post, raw_connection
from penstock.load.soak.target import Target

Step: TypeAlias = Callable[[Scene, Target], Awaitable[object]]

FREEZES_S = (1.0, 3.2, 5.0, 9.0, 20.0)  # each victim gets a different one in each round
# Streams of each kind during a freeze. The engine computes them for longer than a gateway's lease,
# so the gateway that takes them over finds requests of the old one.
RUN_UP_S, NUM_RESUMED, RESUMED_TOKENS = 0.5, 8, range(600, 901)
REST_S = 2.0  # between two steps
CALM_S = 8.0
NUM_CLIENTS, NUM_BURSTS, BURST_EVERY_S, BURSTS_WITHIN_S = 6, 8, 1.0, 20.0  # of large prompts
FLOOD_S = 4.0  # that one connection lasts
NUM_PIPELINED = 300_000
MAX_TRAILER_BYTES = 16 << 20  # that a server may take; what is in the kernel's buffers too
TRAILERS_FOR_S = 2.0
NUM_CONNECTIONS, NUM_AT_ONCE = 600, 50
UNDRAINED_S = 10.0
NUM_SILENT = 100  # connections of each kind
SILENT_FOR_S = 25.0  # more than the server's --header-timeout-s
_SILENCES = (b"", b"\x16\x03\x01\x02\x00\x01", b"POST /v1/chat/completions HTTP/1.1\r\nHo")
_PIECE = 1000  # requests or trailers


async def attack(
    scene: Scene,
    target: Target,
    kinds: Container[Kind],
    *,
    until_s: float,
    kill_until_s: float,
    rest_s: float | None = None,
) -> None:
    """Rounds of adversities, with a rest before each. The first round, and every step that has
    begun, is completed however long it takes."""
    number = 0
    while not number or time.perf_counter() < until_s:
        for kind, step in _round(target, number):
            last_s = kill_until_s if kind is Kind.KILL else until_s
            if kind not in kinds or (number and time.perf_counter() > last_s):
                continue
            await asyncio.sleep(REST_S if rest_s is None else rest_s)
            note_themselves = (Kind.KILL, Kind.LARGE_PROMPTS, *Kind.freezes())
            noted = nullcontext() if kind in note_themselves else scene.journal.applying(kind)
            try:
                with noted:
                    await step(scene, target)
            except Exception as error:  # the soak continues to its verdict
                scene.journal.problem(kind, repr(error))
        number += 1


def kinds_of(target: Target, kinds: Container[Kind] = tuple(Kind)) -> list[Kind]:
    """The adversities among these that apply to this target."""
    found = [kind for kind in dict.fromkeys(kind for kind, _ in _round(target, 0)) if kind in kinds]
    return [*[Kind.CALM] * (Kind.LARGE_PROMPTS in found), *found]  # which compare with it


def _round(target: Target, number: int) -> Iterator[tuple[Kind, Step]]:
    needs = {
        Kind.KILL: target.kill,
        Kind.UNDRAINED_LOG: target.log,
        Kind.STORE: target.flood_key,
        Kind.IMAGE_HOST: target.image_host,
        Kind.IDLE_PEERS: target.peer_engine,
    }
    yield from ((kind, step) for kind, step in STEPS.items() if needs.get(kind, True) is not None)
    for index, name in enumerate(target.victims()):
        kind = {"engine": Kind.FREEZE_ENGINE, "redis": Kind.FREEZE_REDIS}.get(name, Kind.FREEZE)
        for_s = FREEZES_S[(number + index) % len(FREEZES_S)]
        yield kind, partial(_freeze, kind, name, for_s)


async def _kill(scene: Scene, target: Target) -> None:
    assert target.kill is not None
    began_s = time.perf_counter()
    try:
        victim = await target.kill()
    except Exception as error:
        raise RuntimeError(f"the server did not come back: {error!r}") from error
    times = {"began_s": began_s, "ended_s": time.perf_counter()}
    scene.journal.adversities.append(Adversity(kind=Kind.KILL, victim=victim, **times))


async def _freeze(kind: Kind, name: str, for_s: float, scene: Scene, target: Target) -> None:
    process = target.victims().get(name)
    if process is None:
        scene.journal.problem(kind, f"there is no {name}")
        return

    async def freeze_until_ready() -> None:
        await asyncio.sleep(RUN_UP_S)
        with scene.journal.applying(kind, name):
            await freeze(process, for_s)
            await target.ready()

    streams = [
        actor(scene, random.Random(number), RESUMED_TOKENS)
        for actor in (traffic.resume_sse, traffic.resume_socket)
        for number in range(NUM_RESUMED)
    ]
    await asyncio.gather(freeze_until_ready(), *streams)


async def _post_large_prompts(scene: Scene, _: Target) -> None:
    """Several clients at once, repeatedly, after an equally long calm for comparison."""
    prompts = await asyncio.to_thread(large_prompts)
    with scene.journal.applying(Kind.CALM):
        await asyncio.sleep(CALM_S)
    kind, statuses = Kind.LARGE_PROMPTS, (*range(400, 500), 503)  # it may be too busy
    with scene.journal.applying(kind):
        began_s = time.perf_counter()
        for number in range(NUM_BURSTS):
            waited_s = time.perf_counter() - began_s
            if waited_s > BURSTS_WITHIN_S:
                break
            await asyncio.sleep(number * BURST_EVERY_S - waited_s)
            path, body = prompts[number % len(prompts)]
            posts = (
                post(scene, path, body, actor=kind, statuses=statuses) for _ in range(NUM_CLIENTS)
            )
            await asyncio.gather(*posts)


async def _leave_log(scene: Scene, target: Target) -> None:
    """Stop reading the log, and make the server write to it."""
    assert target.log is not None
    with target.log.unread():
        began_s = time.perf_counter()
        await _get_many(scene, Kind.UNDRAINED_LOG)
        await asyncio.sleep(began_s + UNDRAINED_S - time.perf_counter())
        if not target.log.is_full:
            scene.journal.problem(Kind.UNDRAINED_LOG, "the pipe did not fill")


async def _stay_silent(scene: Scene, _: Target) -> None:
    """Connect, send nothing or too little, and wait until the server closes the connection."""

    async def is_let_go(data: bytes) -> bool:
        async with raw_connection(scene) as (reader, writer):
            writer.write(data)
            try:
                await asyncio.wait_for(reader.read(), SILENT_FOR_S)
            except TimeoutError:
                return False
        return True

    silences = [is_let_go(data) for data in _SILENCES for _ in range(NUM_SILENT)]
    num_kept = (await asyncio.gather(*silences)).count(False)
    if num_kept:
        detail = f"{num_kept} of {len(silences)} are still open after {SILENT_FOR_S:g} s"
        scene.journal.problem(Kind.SILENCE, detail)


async def _flood_pipeline(scene: Scene, _: Target) -> None:
    """Pipelined requests whose answers are not read."""
    request = f"GET /health HTTP/1.1\r\nHost: {scene.address.netloc}\r\n\r\n".encode()
    await _pour(scene, itertools.repeat(request * _PIECE, NUM_PIPELINED // _PIECE))


async def _flood_trailers(scene: Scene, _: Target) -> None:
    """A short chunked body followed by endless trailers."""
    key = "".join(f"{name}: {value}\r\n" for name, value in scene.headers.items())
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {scene.address.netloc}\r\n"
        f"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        f"{key}\r\n2\r\n{{}}\r\n0\r\n"
    ).encode()
    piece = (b"x-trailer: " + b"a" * 100 + b"\r\n") * _PIECE
    num_pieces = MAX_TRAILER_BYTES // len(piece) + 1
    # A server refuses them at once, so repeat, to have something to measure.
    ends_s = time.perf_counter() + TRAILERS_FOR_S
    while time.perf_counter() < ends_s:
        num_bytes = await _pour(scene, itertools.chain([head], itertools.repeat(piece, num_pieces)))
        if num_bytes > MAX_TRAILER_BYTES:
            scene.journal.problem(Kind.TRAILERS, f"{num_bytes:,} bytes of them were taken")
            break
        await asyncio.sleep(0.05)


async def _pour(scene: Scene, pieces: Iterable[bytes]) -> int:
    """Send on one connection until it breaks or time is over; return the number of bytes."""
    num_bytes = 0
    async with raw_connection(scene) as (_, writer):
        try:
            async with asyncio.timeout(FLOOD_S):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    num_bytes += len(piece)
                await asyncio.sleep(FLOOD_S)
        except TimeoutError:
            pass
    return num_bytes


async def _flood_connections(scene: Scene, _: Target) -> None:
    await _get_many(scene, Kind.CONNECTIONS)


async def _get_many(scene: Scene, kind: Kind) -> None:
    """Many short connections, several at once; each must be answered."""
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def get() -> bool:
        async with at_once, scene.http.get("/v1/models") as response:
            return response.status == 200

    try:
        async with asyncio.timeout(UNDRAINED_S):
            answers = await asyncio.gather(*(get() for _ in range(NUM_CONNECTIONS)))
    except (aiohttp.ClientError, OSError) as error:
        scene.journal.problem(kind, f"not all of {NUM_CONNECTIONS} requests answered: {error!r}")
    else:
        if num_wrong := answers.count(False):
            scene.journal.problem(kind, f"{num_wrong} of {NUM_CONNECTIONS} answers were not 200")


# In the order of a round. Freezes come last, and of each victim.
STEPS: Mapping[Kind, Step] = {
    Kind.KILL: _kill,
    Kind.LARGE_PROMPTS: _post_large_prompts,
    Kind.UNDRAINED_LOG: _leave_log,
    Kind.SILENCE: _stay_silent,
    Kind.PIPELINE: _flood_pipeline,
    Kind.CONNECTIONS: _flood_connections,
    Kind.TRAILERS: _flood_trailers,
    **{kind: partial(expensive.keep_sending, kind) for kind in expensive.BODIES},
    Kind.GRAMMARS: expensive.flood_grammars,
    Kind.STORE: expensive.flood_store,
    Kind.IMAGE_HOST: expensive.ask_image_host,
    Kind.IDLE_PEERS: expensive.idle_peers,
}
