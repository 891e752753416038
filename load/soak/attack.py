"""An attack beside the traffic: one kind of adversity at a time, each bounded, in rounds.

Kills, freezes, floods, silent handshakes, an unread log, prompts of 4 MB, and what is `expensive`.
What a server must refuse is checked here; `verdict.costs` judges the effect on other streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from functools import partial
from typing import TypeAlias

import aiohttp

from penstock.load.launch import freeze
from penstock.load.soak import expensive, traffic
from penstock.load.soak.hostile import large_prompts, refused
from penstock.load.soak.journal import Adversity, Journal, Kill, Kind
from penstock.load.soak.scene import Scene
from penstock.load.soak.target import LogPipe, Target

Step: TypeAlias = Callable[[Scene], Awaitable[object]]

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
    *,
    until_s: float,
    kill_until_s: float,
    only: Container[Kind] = tuple(Kind),
) -> None:
    """Rounds of all adversities, or only of some, that apply to this target. The first round, and
    every step that has begun, is completed however long it takes."""
    number = 0
    while not number or time.perf_counter() < until_s:
        for kind, step in _round(target, number):
            if kind not in only:
                continue
            last_s = kill_until_s if kind is Kind.KILL else until_s
            if number and time.perf_counter() > last_s:
                continue
            await asyncio.sleep(REST_S)
            try:
                await step(scene)
            except Exception as error:  # the soak continues to its verdict
                scene.journal.problem(kind, repr(error))
        number += 1


def kinds_of(target: Target, only: Container[Kind] = tuple(Kind)) -> list[Kind]:
    """The adversities of an attack on this target, or some of them."""
    kinds = [kind for kind in dict.fromkeys(kind for kind, _ in _round(target, 0)) if kind in only]
    return [*[Kind.CALM] * (Kind.LARGE_PROMPTS in kinds), *kinds]  # which compare with it


def _round(target: Target, number: int) -> Iterator[tuple[Kind, Step]]:
    if target.kill is not None:
        yield Kind.KILL, lambda scene: kill_once(scene.journal, target)
    yield Kind.LARGE_PROMPTS, _post_large_prompts
    if target.log is not None:
        yield Kind.UNDRAINED_LOG, partial(_leave_log, target.log)
    yield Kind.SILENCE, _stay_silent
    yield Kind.PIPELINE, _flood_pipeline
    yield Kind.CONNECTIONS, _flood_connections
    yield Kind.TRAILERS, _flood_trailers
    yield from _expensive(target)
    for index, name in enumerate(target.victims()):
        kind = {"engine": Kind.FREEZE_ENGINE, "redis": Kind.FREEZE_REDIS}.get(name, Kind.FREEZE)
        for_s = FREEZES_S[(number + index) % len(FREEZES_S)]
        yield kind, partial(_freeze, target, kind, name, for_s)


def _expensive(target: Target) -> Iterator[tuple[Kind, Step]]:
    key, redis = target.flood_key, target.victims().get("redis")
    steps: list[tuple[Kind, Step]] = [
        (kind, partial(expensive.keep_sending, flood_key=key, kind=kind))
        for kind in expensive.BODIES
    ]
    steps.append((Kind.GRAMMARS, partial(expensive.flood_grammars, flood_key=key)))
    if key is not None:
        steps.append((Kind.STORE, partial(expensive.flood_store, flood_key=key, redis=redis)))
    if target.image_host is not None:
        host = target.image_host
        steps.append((Kind.IMAGE_HOST, partial(expensive.ask_image_host, flood_key=key, host=host)))
    if target.peer_engine is not None:
        engine = target.peer_engine
        steps.append((Kind.IDLE_PEERS, partial(expensive.idle_peers, engine=engine)))
    for kind, step in steps:
        yield kind, partial(_note, kind, step)


async def _note(kind: Kind, step: Step, scene: Scene) -> None:
    with _noted(scene.journal, kind):
        await step(scene)


@contextlib.contextmanager
def _noted(journal: Journal, kind: Kind, victim: str = "") -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    journal.adversities.append(
        Adversity(kind=kind, victim=victim, began_s=began_s, ended_s=time.perf_counter())
    )


async def kill_once(journal: Journal, target: Target) -> bool:
    """Kill the next process; return whether the server came back."""
    assert target.kill is not None
    killed_s = time.perf_counter()
    try:
        with _noted(journal, Kind.KILL):
            victim = await target.kill()
    except Exception as error:  # the soak continues to its verdict
        journal.problem("kill", f"the server did not come back: {error!r}")
        return False
    journal.kills.append(Kill(victim=victim, killed_s=killed_s, ready_s=time.perf_counter()))
    return True


async def _freeze(target: Target, kind: Kind, name: str, for_s: float, scene: Scene) -> None:
    process = target.victims().get(name)
    if process is None:
        scene.journal.problem(kind, f"there is no {name}")
        return

    async def freeze_until_ready() -> None:
        await asyncio.sleep(RUN_UP_S)
        with _noted(scene.journal, kind, name):
            await freeze(process, for_s)
            await target.ready()

    streams = [
        actor(scene, random.Random(number), RESUMED_TOKENS)
        for actor in (traffic.resume_sse, traffic.resume_socket)
        for number in range(NUM_RESUMED)
    ]
    await asyncio.gather(freeze_until_ready(), *streams)


async def _post_large_prompts(scene: Scene) -> None:
    """Several clients at once, repeatedly, after an equally long calm for comparison."""
    prompts = await asyncio.to_thread(large_prompts)
    with _noted(scene.journal, Kind.CALM):
        await asyncio.sleep(CALM_S)
    with _noted(scene.journal, Kind.LARGE_PROMPTS):
        began_s = time.perf_counter()
        for number in range(NUM_BURSTS):
            waited_s = time.perf_counter() - began_s
            if waited_s > BURSTS_WITHIN_S:
                break
            await asyncio.sleep(number * BURST_EVERY_S - waited_s)
            path, body = prompts[number % len(prompts)]
            # A server may refuse because it is too busy.
            statuses = (*range(400, 500), 503)
            posts = [
                refused(scene, path, body, what=Kind.LARGE_PROMPTS, statuses=statuses)
                for _ in range(NUM_CLIENTS)
            ]
            await asyncio.gather(*posts)


async def _leave_log(log: LogPipe, scene: Scene) -> None:
    """Stop reading the log, and make the server write to it."""
    with _noted(scene.journal, Kind.UNDRAINED_LOG), log.unread():
        began_s = time.perf_counter()
        await _get_many(scene, Kind.UNDRAINED_LOG)
        await asyncio.sleep(began_s + UNDRAINED_S - time.perf_counter())
        is_full = log.is_full
    if not is_full:
        scene.journal.problem(Kind.UNDRAINED_LOG, "the pipe did not fill")


async def _stay_silent(scene: Scene) -> None:
    """Connect, send nothing or too little, and wait until the server closes the connection."""
    with _noted(scene.journal, Kind.SILENCE):
        silences = [_is_let_go(scene, data) for data in _SILENCES for _ in range(NUM_SILENT)]
        num_kept = (await asyncio.gather(*silences)).count(False)
    if num_kept:
        detail = f"{num_kept} of {len(silences)} are still open after {SILENT_FOR_S:g} s"
        scene.journal.problem(Kind.SILENCE, detail)


async def _is_let_go(scene: Scene, data: bytes) -> bool:
    reader, writer = await asyncio.open_connection(scene.address.host, scene.address.port)
    try:
        writer.write(data)
        await asyncio.wait_for(reader.read(), SILENT_FOR_S)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    finally:
        writer.transport.abort()
    return True


async def _flood_pipeline(scene: Scene) -> None:
    """Pipelined requests whose answers are not read."""
    request = f"GET /health HTTP/1.1\r\nHost: {scene.address.netloc}\r\n\r\n".encode()
    with _noted(scene.journal, Kind.PIPELINE):
        await _pour(scene, itertools.repeat(request * _PIECE, NUM_PIPELINED // _PIECE))


async def _flood_trailers(scene: Scene) -> None:
    """A short chunked body followed by endless trailers."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {scene.address.netloc}\r\n"
        f"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        f"{scene.authorization}\r\n2\r\n{{}}\r\n0\r\n"
    ).encode()
    piece = (b"x-trailer: " + b"a" * 100 + b"\r\n") * _PIECE
    num_pieces = MAX_TRAILER_BYTES // len(piece) + 1
    with _noted(scene.journal, Kind.TRAILERS):
        # A server refuses them at once, so repeat, to have something to measure.
        ends_s = time.perf_counter() + TRAILERS_FOR_S
        while time.perf_counter() < ends_s:
            pieces = itertools.chain([head], itertools.repeat(piece, num_pieces))
            num_bytes = await _pour(scene, pieces)
            if num_bytes > MAX_TRAILER_BYTES:
                scene.journal.problem(Kind.TRAILERS, f"{num_bytes:,} bytes of them were taken")
                break
            await asyncio.sleep(0.05)


async def _pour(scene: Scene, pieces: Iterable[bytes]) -> int:
    """Send on one connection until it breaks or time is over; return the number of bytes."""
    num_bytes = 0
    _, writer = await asyncio.open_connection(scene.address.host, scene.address.port)
    try:
        async with asyncio.timeout(FLOOD_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                num_bytes += len(piece)
            await asyncio.sleep(FLOOD_S)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return num_bytes


async def _flood_connections(scene: Scene) -> None:
    with _noted(scene.journal, Kind.CONNECTIONS):
        await _get_many(scene, Kind.CONNECTIONS)


async def _get_many(scene: Scene, kind: Kind) -> None:
    """Many short connections, several at once; each must be answered."""
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def get() -> bool:
        async with at_once, scene.http.get("/v1/models") as response:
            return response.status == 200

    try:
        async with asyncio.timeout(UNDRAINED_S):
            num_wrong = (await asyncio.gather(*(get() for _ in range(NUM_CONNECTIONS)))).count(
                False
            )
    except (aiohttp.ClientError, OSError) as error:
        scene.journal.problem(kind, f"not all of {NUM_CONNECTIONS} requests answered: {error!r}")
    else:
        if num_wrong:
            scene.journal.problem(kind, f"{num_wrong} of {NUM_CONNECTIONS} answers were not 200")
