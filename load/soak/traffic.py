"""What well-meaning clients do: read to the end, converse, disconnect, cancel, read slowly, come
in crowds. Each actor is a coroutine `actor(scene, rng)` that acts once and reports to the
journal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import aiohttp
import orjson

from penstock.load.client.integrity import check_of
from penstock.load.client.records import PATHS, Call, Fault, StreamRecord, body_of
from penstock.load.client.sse import EventStreamParser
from penstock.load.client.transport import Transport
from penstock.load.client.websocket import Lane, LaneSocket, socket_body
from penstock.load.soak.scene import (
    ENDS,
    STALL_S,
    TRANSPORTS,
    Scene,
    open_lane,
    open_socket,
    post,
    slow_session,
    unended,
)

_BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
_MAX_STAY_S = 1.0  # how long a client stays before it leaves
_CROWD = 24
_HOARD_S = 2.0  # before it starts to read
_HOARD_LANES = 12
_SLOW_BYTES_PER_S, _SLOW_PIECE_BYTES = 32_000, 640
_MUCH = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "store": False}
# A token is then some kilobytes, if the server knows these fields; too much for it to keep.
_TEMPTATIONS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 20},
    "responses": _MUCH,
    "websocket": _MUCH,
}


async def read_to_the_end(scene: Scene, rng: random.Random) -> None:
    name = rng.choice(sorted(scene.transports))
    transport = scene.transports[name]
    await _finish(scene, scene.call(rng), transport, actor=f"read to the end, {name}")


async def converse(scene: Scene, rng: random.Random) -> None:
    """Some turns, each by the id of the answer before."""
    name, previous_id = rng.choice(("responses", "websocket")), None
    for _ in range(rng.randint(2, 4)):
        call = scene.call(rng, previous_response_id=previous_id)
        record = await _finish(scene, call, scene.transports[name], actor=f"converse, {name}")
        if not record.is_clean:
            return
        previous_id = record.response_id
        await asyncio.sleep(rng.uniform(0, 0.3))


async def leave(scene: Scene, rng: random.Random) -> None:
    """Leave in the middle: SSE closes its connection, WebSocket cancels."""
    name = rng.choice(sorted(scene.transports))
    call = scene.call(rng, max_tokens=rng.randint(32, 128))
    with scene.journal.stream(f"leave, {name}") as record:
        stream = asyncio.create_task(scene.transports[name].stream(call, record))
        await asyncio.wait([stream], timeout=rng.uniform(0, _MAX_STAY_S))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def drop_socket(scene: Scene, rng: random.Random) -> None:
    """Break a WebSocket with several streams."""
    async with open_socket(scene.http) as socket:
        for number in range(rng.randint(1, 6)):
            lane = Lane(StreamRecord(scheduled_s=time.perf_counter()))
            call = scene.call(rng, max_tokens=128)
            await socket.create(f"l{number}", socket_body(call), lane)
        await asyncio.sleep(rng.uniform(0, _MAX_STAY_S))
        socket.drop()


async def cancel_lanes(scene: Scene, rng: random.Random) -> None:
    """Cancel some lanes of a socket; the others must not be affected."""
    async with open_socket(scene.http) as socket:
        names = [f"l{number}" for number in range(rng.randint(2, 6))]
        await asyncio.gather(*(_run_lane(scene, rng, socket, name) for name in names))
        if not socket.errors.empty():
            event = socket.errors.get_nowait()
            scene.journal.problem("cancel a lane", f"an error of no lane: {event['error']}")


async def _run_lane(scene: Scene, rng: random.Random, socket: LaneSocket, name: str) -> None:
    is_cancelled = rng.random() < 0.5
    actor = "cancel a lane" if is_cancelled else "beside one"
    call = scene.call(rng, max_tokens=96) if is_cancelled else scene.call(rng)
    with open_lane(scene, actor, call, is_whole=not is_cancelled) as lane:
        record = lane.record
        await socket.create(name, socket_body(call), lane)
        if is_cancelled:
            await _within(lane.heard)
            await asyncio.sleep(rng.uniform(0, _MAX_STAY_S))
            by_id = {"response_id": record.response_id} if record.response_id else {}
            await socket.send({"type": "penstock.cancel", **(by_id or {"stream_id": name})})
        await _ended(lane)
    _check_end(scene, actor, record)


def _check_end(scene: Scene, actor: str, record: StreamRecord) -> None:
    if record.is_clean and record.finish_reason not in ENDS:
        scene.journal.problem(actor, f"it ended as {record.finish_reason!r}")


async def read_slowly(scene: Scene, rng: random.Random) -> None:
    """Read more slowly than the answer comes."""
    name = rng.choice(sorted(scene.transports))
    call = scene.call(rng, extra=_TEMPTATIONS.get(name, {}), max_tokens=24)
    endpoint = TRANSPORTS[name][1]
    with scene.journal.stream(f"read slowly, {name}") as record:
        record.expected_tokens = call.max_tokens
        check, parser = check_of(endpoint, record), EventStreamParser()
        async with slow_session(scene) as http:
            try:
                if name == "websocket":
                    async with open_socket(http, bytes_per_s=_SLOW_BYTES_PER_S) as socket:
                        await _run(socket, "slow", call, Lane(record))
                    return
                async with http.post(PATHS[endpoint], json=body_of(endpoint, call)) as response:
                    if response.status != 200:
                        said = f"{response.status} {(await response.read())[:200]!r}"
                        check.fail(Fault.REFUSED, said, time.perf_counter())
                    async for piece in response.content.iter_chunked(_SLOW_PIECE_BYTES):
                        for data in parser.feed(piece):
                            check.take(data, time.perf_counter())
                        await asyncio.sleep(len(piece) / _SLOW_BYTES_PER_S)
            except _BROKEN as error:
                check.fail(Fault.CUT, repr(error), time.perf_counter())
        check.close(time.perf_counter())


async def _run(socket: LaneSocket, name: str, call: Call, lane: Lane) -> None:
    await socket.create(name, socket_body(call), lane)
    await _ended(lane)


async def hoard(scene: Scene, rng: random.Random) -> None:
    """Request much and read nothing for a while; then read all of it, or disconnect."""
    async with open_socket(scene.http, is_read=False) as socket:
        names = [f"l{number}" for number in range(_HOARD_LANES)]
        lanes = asyncio.gather(*(_hoard_lane(scene, rng, socket, name) for name in names))
        await asyncio.sleep(_HOARD_S)
        if rng.random() < 0.5:
            socket.drop()
            lanes.cancel()
            await asyncio.gather(lanes, return_exceptions=True)
        else:
            socket.read()
            await lanes


async def _hoard_lane(scene: Scene, rng: random.Random, socket: LaneSocket, name: str) -> None:
    call = scene.call(rng, extra=_MUCH, max_tokens=48)
    with open_lane(scene, "hoard", call) as lane:
        await _run(socket, name, call, lane)


async def crowd(scene: Scene, rng: random.Random) -> None:
    """Many at once."""
    await asyncio.gather(*(read_to_the_end(scene, rng) for _ in range(_CROWD)))


async def _finish(scene: Scene, call: Call, transport: Transport, *, actor: str) -> StreamRecord:
    with scene.journal.stream(actor) as record:
        record.expected_tokens = call.max_tokens
        await transport.stream(call, record)
    return record


async def _ended(lane: Lane) -> None:
    if not await _within(lane.ended):
        lane.check.fail(Fault.STALLED, f"no end within {STALL_S:g} s", time.perf_counter())
    unended(lane)


async def _within(event: asyncio.Event) -> bool:
    """Wait for an event; return whether it came in time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), STALL_S)
    return event.is_set()


# Streams that outlive their connection can be resumed, and cancelled by id:
#
#     SSE         GET /v1/responses/{id}?stream=true&starting_after=N
#     WebSocket   penstock.resume {response_id, starting_after}, answered by recovered: true | false
#     cancel      POST /v1/responses/{id}/cancel
#
# Over all its connections a stream has no gap and no repeat in its numbers, and
# its text is that of its terminal event.

Request: TypeAlias = AbstractAsyncContextManager[aiohttp.ClientResponse]

_PATH = "/v1/responses"
_NUM_TOKENS = range(32, 129)
_MAX_DROPS = 3
_MAX_EVENTS = 60  # before a drop
_MAX_AWAY_S = 1.5
_RETRY_S = 0.2
_BACK_WITHIN_S = 60.0  # after a kill
_PATIENCE_S = 3.5  # with a silent gateway; its lease of 3 s has expired by then


async def resume_sse(scene: Scene, rng: random.Random, num_tokens: range = _NUM_TOKENS) -> None:
    """Resume over HTTP: every connection but the last is dropped after some events."""
    call = scene.call(rng, max_tokens=rng.choice(num_tokens))
    with open_lane(scene, "resume, sse", call, is_resumable=True) as lane:

        async def attach(max_events: float) -> None:
            query = {"stream": "true", "starting_after": str(lane.last_number)}
            request = (
                scene.http.get(f"{_PATH}/{lane.record.response_id}", params=query)
                if lane.record.response_id
                else scene.http.post(_PATH, json=body_of("responses", call))
            )
            await _read_events(request, lane, max_events)

        await _carry(lane, attach, rng)


async def resume_socket(scene: Scene, rng: random.Random, num_tokens: range = _NUM_TOKENS) -> None:
    """Resume over WebSockets: every one but the last is dropped after some events."""
    call = scene.call(rng, max_tokens=rng.choice(num_tokens))
    with open_lane(scene, "resume, websocket", call, is_resumable=True) as lane:

        async def attach(max_events: float) -> None:
            async with open_socket(scene.http) as socket:
                if lane.record.response_id:
                    await socket.resume("again", lane.record.response_id, lane)
                else:
                    await socket.create("first", socket_body(call), lane)
                try:
                    await _hear(lane, max_events)
                finally:
                    if not lane.check.is_ended:
                        socket.drop()

        await _carry(lane, attach, rng)


async def cancel_by_id(scene: Scene, rng: random.Random) -> None:
    """Cancel a stream from another connection than the one that reads it."""
    call = scene.call(rng, max_tokens=128)
    with open_lane(scene, "cancel by id", call, is_whole=False) as lane:
        request = scene.http.post(_PATH, json=body_of("responses", call))
        reading = asyncio.create_task(_read_events(request, lane, math.inf, STALL_S))
        reading.add_done_callback(lambda _: lane.heard.set())  # in case no event comes at all
        await lane.heard.wait()
        await asyncio.sleep(rng.uniform(0, _MAX_AWAY_S))
        if lane.record.response_id:
            path = f"{_PATH}/{lane.record.response_id}/cancel"
            await post(scene, path, b"", actor="cancel by id", statuses=(200,))
        await asyncio.gather(reading, return_exceptions=True)
        unended(lane)
    _check_end(scene, "cancel by id", lane.record)


async def _carry(
    lane: Lane, attach: Callable[[float], Awaitable[None]], rng: random.Random
) -> None:
    """Read a stream over several connections, both lost and dropped ones."""
    num_drops = rng.randint(1, _MAX_DROPS)
    give_up_s, last_number = time.monotonic() + _BACK_WITHIN_S, -1
    while not lane.check.is_ended and time.monotonic() < give_up_s:
        max_events = rng.randint(1, _MAX_EVENTS) if num_drops > 0 else math.inf
        num_drops -= 1
        lane.ended.clear()
        try:
            await attach(max_events)
        except _BROKEN:
            if not lane.record.response_id:  # it never began: nothing to resume
                break
            await asyncio.sleep(_RETRY_S)
        if lane.last_number > last_number:
            give_up_s, last_number = time.monotonic() + _BACK_WITHIN_S, lane.last_number
        if not lane.check.is_ended:
            await asyncio.sleep(rng.uniform(0, _MAX_AWAY_S))
    unended(lane)


async def _read_events(
    request: Request, lane: Lane, max_events: float, patience_s: float = _PATIENCE_S
) -> None:
    """Read `max_events` of a response, or all up to the end of the connection. Raises
    TimeoutError if a stream that has begun is silent for `patience_s`."""
    parser, num_events = EventStreamParser(), 0
    now_s = asyncio.get_running_loop().time
    first_s = patience_s if lane.record.response_id else STALL_S
    async with asyncio.timeout(first_s) as silence, request as response:
        if response.status == 503 and lane.record.response_id:
            raise aiohttp.ClientConnectionError("not ready")
        if response.status != 200:
            detail = f"{response.status} {(await response.read())[:200]!r}"
            lane.check.fail(Fault.REFUSED, detail, time.perf_counter())
            return
        async for piece in response.content.iter_any():
            silence.reschedule(now_s() + patience_s)
            for data in parser.feed(piece):
                lane.take(orjson.loads(data), time.perf_counter())
                num_events += 1
                if num_events >= max_events and not lane.check.is_ended:
                    response.close()
                    return


async def _hear(lane: Lane, max_events: float) -> None:
    """Wait for `max_events` of a lane, or for its end."""
    enough = lane.num_events + max_events
    while lane.num_events < enough and not lane.ended.is_set():
        lane.heard.clear()
        patience_s = _PATIENCE_S if lane.record.response_id else STALL_S
        await asyncio.wait_for(lane.heard.wait(), patience_s)
        if lane.recovered is False:
            lane.check.fail(Fault.FAILED, "not recovered", time.perf_counter())
            return
