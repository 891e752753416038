"""A WebSocket that has ended leaves nothing to the garbage collector."""

from __future__ import annotations

from penstock.gateway.api.responses.websocket import Connection, Lane
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol
from penstock.gateway.storage.response_log.log import ResponseLog

from ..conftest import Serve
from ..garbage import freed_without_collector
from ..sockets import send, until_end

KINDS = (PatientWebSocketProtocol, Connection, Lane, ResponseLog)


async def test_one_whose_responses_have_ended(serve: Serve) -> None:
    async with serve() as served, freed_without_collector(*KINDS), served.connect() as socket:
        for lane in "ab":
            await send(socket, type="response.create", input="x", stream_id=lane)
            await until_end(socket)


async def test_one_that_is_dropped_with_responses_running(serve: Serve) -> None:
    async with serve(step_s=0.01) as served, freed_without_collector(*KINDS):
        async with served.connect() as socket:
            for lane in "ab":
                await send(
                    socket, type="response.create", input="x", stream_id=lane,
                    ignore_eos=True, store=False,
                )  # fmt: skip
            await served.submitted(2)
            await socket.recv()
        await served.aborted(2)
