"""The WebSocket transport against a server that does as told: streams, sockets, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from penstock.load.client.records import Fault, StreamRecord
from penstock.load.client.websocket import LANES_PER_SOCKET, WebSocketTransport

from .manual_loop import ManualLoop, play, until
from .scripted_server import CALL, record_of
from .websocket_peer import EVENTS, Peer, connected


async def _answer_all(peer: Peer) -> None:
    while True:
        await peer.answer((await peer.take())["stream_id"])


async def _record(
    transport: WebSocketTransport, record: StreamRecord | None = None
) -> StreamRecord:
    record = record or record_of(expected_tokens=3)
    await asyncio.wait_for(transport.stream(CALL, record), 60)
    return record


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# -- good streams ---------------------------------------------------------------------------------


async def test_a_stream_fills_a_record() -> None:
    creates = []

    async def handle(peer: Peer) -> None:
        creates.append(await peer.take())
        await peer.answer(creates[0]["stream_id"])
        await peer.take()

    async with connected(handle) as (transport, _):
        record = await _record(transport)
    assert (record.faults, record.detail, record.status) == ([], "", 101)
    assert (record.text, record.finish_reason) == ("one two", "max_output_tokens")
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 5, 3)
    assert record.response_id == "resp_1"
    assert len(record.event_times_s) == 3
    times_s = [record.sent_s, *record.event_times_s, record.ended_s, time.perf_counter()]
    assert times_s == sorted(times_s)
    assert creates[0].pop("stream_id")
    assert creates == [
        {
            "type": "response.create",
            "model": "m",
            "input": [{"role": "user", "content": "hello"}],
            "max_output_tokens": 3,
            "ignore_eos": True,
        }
    ]


async def test_sockets_are_opened_as_needed_and_used_again() -> None:
    async with connected(_answer_all) as (transport, peers):
        for _ in range(3):
            num_streams = 3 * LANES_PER_SOCKET + 1
            records = await asyncio.gather(*(_record(transport) for _ in range(num_streams)))
            assert all(record.is_clean for record in records)
        assert len(peers) == 4


# -- faults ---------------------------------------------------------------------------------------


async def test_a_lost_socket_cuts_its_streams_and_the_next_call_gets_another() -> None:
    async def handle(peer: Peer) -> None:
        handled.append(peer)
        if len(handled) > 1:
            await _answer_all(peer)
        lanes = [(await peer.take())["stream_id"] for _ in range(3)]
        await peer.answer(lanes[0])
        await peer.answer(lanes[1], num_events=3)
        peer.connection.transport.abort()

    handled: list[Peer] = []
    async with connected(handle) as (transport, _):
        records = await asyncio.gather(*(_record(transport) for _ in range(3)))
        assert [record.faults for record in records] == [[], [Fault.CUT], [Fault.CUT]]
        assert records[1].text == "one t"
        assert (await _record(transport)).faults == []


async def test_events_after_the_end_are_noted_even_later() -> None:
    async def handle(peer: Peer) -> None:
        lane = (await peer.take())["stream_id"]
        await peer.answer(lane)
        await is_seen.wait()
        await peer.send(EVENTS[-1], lane)
        await peer.take()

    is_seen = asyncio.Event()
    async with connected(handle) as (transport, _):
        record = await _record(transport)
        assert record.faults == []
        is_seen.set()
        await _until(lambda: record.faults)
    assert record.faults == [Fault.AFTER_END]


@pytest.mark.parametrize(
    "stray", ['{"type": "error", "status": 400}', "{oops", "7", '{"stream_id": "x"}']
)
async def test_what_belongs_to_no_stream_spoils_all(stray: str) -> None:
    async def handle(peer: Peer) -> None:
        lanes = [(await peer.take())["stream_id"] for _ in range(2)]
        await peer.connection.send(stray)
        for lane in lanes:
            await peer.answer(lane)
        await peer.take()

    async with connected(handle) as (transport, _):
        records = await asyncio.gather(*(_record(transport) for _ in range(2)))
    assert [record.faults for record in records] == [[Fault.MALFORMED]] * 2
    assert stray in records[0].detail


async def test_a_handshake_may_be_refused() -> None:
    def refuse(connection: ServerConnection, _: object) -> Any:
        return connection.respond(HTTPStatus.UNAUTHORIZED, "no key\n")

    async with serve(_answer_all, "127.0.0.1", 0, process_request=refuse) as server:  # type: ignore[arg-type]
        base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with WebSocketTransport(base_url) as transport:
            record = await _record(transport)
    assert (record.faults, record.status) == ([Fault.REFUSED], 401)


# -- walking away ---------------------------------------------------------------------------------


def test_a_silent_stream_is_left_and_its_lane_waits_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def handle(peer: Peer) -> None:
        lane = (await peer.take())["stream_id"]
        await peer.answer(lane, num_events=2)
        cancels.append(await peer.take())
        ended.append(await peer.take())  # the next call comes on another lane
        await peer.answer(ended[0]["stream_id"])
        await peer.send(EVENTS[-1], lane)
        await _answer_all(peer)

    cancels: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []

    async def run(loop: ManualLoop) -> None:
        async with connected(handle, stall_s=5.0) as (transport, peers):
            record = record_of(expected_tokens=3)
            silent = asyncio.create_task(_record(transport, record))
            await until(lambda: record.event_times_s)
            loop.now_s += 5.0
            await silent
            other = await _record(transport)
            again = await asyncio.gather(*(_record(transport) for _ in range(LANES_PER_SOCKET)))
        assert (record.faults, record.text) == ([Fault.STALLED], "on")
        assert cancels[0]["type"] == "penstock.cancel"
        assert cancels[0]["stream_id"] != ended[0]["stream_id"]
        assert other.is_clean
        assert all(each.is_clean for each in again)
        assert len(peers) == 1

    play(monkeypatch, run)


async def test_walking_away_cancels_the_response_and_no_other() -> None:
    async def handle(peer: Peer) -> None:
        lanes = [(await peer.take())["stream_id"] for _ in range(2)]
        await peer.answer(lanes[0], num_events=2)
        cancel = await peer.take()
        assert cancel == {"type": "penstock.cancel", "stream_id": lanes[0]}
        for lane in lanes[::-1]:
            await peer.answer(lane)
        await peer.take()

    async with connected(handle) as (transport, peers):
        record, other = record_of(), record_of()
        leaving = asyncio.create_task(transport.stream(CALL, record))
        staying = asyncio.create_task(transport.stream(CALL, other))
        await _until(lambda: record.event_times_s)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await staying
    assert leaving.cancelled()
    assert (record.faults, record.text) == ([], "on")
    assert (other.faults, other.text) == ([], "one two")
    assert len(peers) == 1
