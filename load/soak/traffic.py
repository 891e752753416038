"""What well-meaning clients do: read to the end, converse, leave, cancel, read slowly, come in
crowds.

Each actor is a coroutine `actor(scene, rng)` that does its thing once and tells the journal. Not
known here: how often each acts, and what is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

from penstock.load.client.integrity import ResponseCheck
from penstock.load.client.records import Call, Fault, StreamRecord
from penstock.load.client.transport import Transport
from penstock.load.soak.lanes import ENDS, Lane, LaneSocket, open_socket, socket_body, unended
from penstock.load.soak.scene import STALL_S, Scene

_MAX_STAY_S = 1.0  # of a client that leaves
_CROWD = 24
_HOARD_S = 2.0  # how long it does not read
_HOARD_LANES = 12
_MUCH = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "store": False}
# A token is some kilobytes then, where the server knows these; too much to be kept by it.
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
    """Walk away in the middle: SSE closes its connection, WebSocket cancels."""
    name = rng.choice(sorted(scene.transports))
    call = scene.call(rng, max_tokens=rng.randint(32, 128))
    with scene.journal.stream(f"leave, {name}") as record:
        stream = asyncio.create_task(scene.transports[name].stream(call, record))
        await asyncio.wait([stream], timeout=rng.uniform(0, _MAX_STAY_S))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def drop_socket(scene: Scene, rng: random.Random) -> None:
    """End a WebSocket under several streams."""
    async with open_socket(scene.http) as socket:
        socket.read()
        for number in range(rng.randint(1, 6)):
            lane = Lane(ResponseCheck(StreamRecord(scheduled_s=time.perf_counter())))
            call = scene.call(rng, max_tokens=128)
            await socket.create(f"l{number}", socket_body(call), lane)
        await asyncio.sleep(rng.uniform(0, _MAX_STAY_S))
        socket.drop()


async def cancel_lanes(scene: Scene, rng: random.Random) -> None:
    """Several lanes of a socket; some are cancelled, and the others must not notice."""
    async with open_socket(scene.http) as socket:
        socket.read()
        await asyncio.gather(
            *(_run_lane(scene, rng, socket, f"l{number}") for number in range(rng.randint(2, 6)))
        )
        if not socket.errors.empty():
            event = socket.errors.get_nowait()
            scene.journal.problem("cancel a lane", f"an error of no lane: {event['error']}")


async def _run_lane(scene: Scene, rng: random.Random, socket: LaneSocket, name: str) -> None:
    is_cancelled = rng.random() < 0.5
    actor = "cancel a lane" if is_cancelled else "beside one"
    call = scene.call(rng, max_tokens=96) if is_cancelled else scene.call(rng)
    with scene.journal.stream(actor) as record:
        if not is_cancelled:
            record.expected_tokens = call.max_tokens
        lane = Lane(ResponseCheck(record))
        await socket.create(name, socket_body(call), lane)
        if is_cancelled:
            await _within(lane.heard)
            await asyncio.sleep(rng.uniform(0, _MAX_STAY_S))
            by_id = {"response_id": record.response_id} if record.response_id else {}
            await socket.send({"type": "penstock.cancel", **(by_id or {"stream_id": name})})
        await _ended(lane)
    if record.is_clean and record.finish_reason not in ENDS:
        scene.journal.problem(actor, f"it ended as {record.finish_reason!r}")


async def read_slowly(scene: Scene, rng: random.Random) -> None:
    """Over a line that is slower than the answer comes."""
    name = rng.choice(sorted(scene.transports))
    call = scene.call(rng, extra=_TEMPTATIONS.get(name, {}), max_tokens=24)
    async with scene.slow_transport(name) as transport:
        await _finish(scene, call, transport, actor=f"read slowly, {name}")


async def hoard(scene: Scene, rng: random.Random) -> None:
    """Ask for much, read nothing for a while, then all of it, or leave."""
    async with open_socket(scene.http) as socket:
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
    with scene.journal.stream("hoard") as record:
        record.expected_tokens = call.max_tokens
        lane = Lane(ResponseCheck(record))
        await socket.create(name, socket_body(call), lane)
        await _ended(lane)


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
    """Wait for an event; whether it came in time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), STALL_S)
    return event.is_set()
