"""The Python client steers: its streams go on with the successor, also over connections that are
cut."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.clients import AsyncClient, Client, RefusedError, output_text

from ..system.processes import ENDLESS_TOKENS, Served
from .cutting_proxy import CuttingProxy

_STORY: dict[str, Any] = {
    "model": "demo",
    "input": "Tell me a long story.",
    "temperature": 0,
    "ignore_eos": True,
    "max_output_tokens": ENDLESS_TOKENS,
}
# Not for ever: who reconnects for every seven events is slower than the answers, each of which goes
# on until the one before it is read.
_CUTS = (0, *[7] * 8, None)


def _check(events: list[Any], num_answers: int) -> None:
    """Each answer's events without gap and repeat, and all but the last one were interrupted."""
    begins = [at for at, event in enumerate(events) if event["type"] == "response.created"]
    assert len(begins) == num_answers
    for begin, end in zip(begins, [*begins[1:], len(events)], strict=True):
        own = events[begin:end]
        assert [event["sequence_number"] for event in own] == list(range(len(own)))
        response = own[-1]["response"]
        deltas = [e["delta"] for e in own if e["type"] == "response.output_text.delta"]
        assert output_text(response) == "".join(deltas)
        if end < len(events):
            assert response["incomplete_details"] == {"reason": "steered"}
            (steer,) = response["penstock"]["steers"]
            assert steer["successor_id"] == events[end]["response"]["id"]
    assert events[-1]["response"]["status"] == "cancelled"


@pytest.mark.parametrize("wire", ["sse", "websocket"])
@pytest.mark.parametrize("cuts", [(None,), pytest.param(_CUTS, marks=pytest.mark.exhaustive)])
def test_a_stream_goes_on_with_the_successor(
    demo_server: Served, wire: str, cuts: tuple[int | None, ...]
) -> None:
    with (
        CuttingProxy(demo_server.base_url, *cuts) as proxy,
        Client(proxy.url) as client,
        client.connect() as socket,
    ):
        stream = client.responses.stream(**_STORY) if wire == "sse" else socket.create(**_STORY)
        events: list[Any] = []
        num_deltas = 0
        with stream:
            for event in stream:
                events.append(event)
                num_deltas += event["type"] == "response.output_text.delta"
                if event["type"] == "response.created":
                    num_deltas = 0
                if num_deltas == 3 and event["type"] == "response.output_text.delta":
                    if sum(each["type"] == "response.created" for each in events) < 3:
                        assert stream.steer("And now?")["status"] in ("accepted", "committed")
                    else:
                        assert stream.response_id is not None
                        client.responses.cancel(stream.response_id)
    _check(events, 3)
    assert stream.response == events[-1]["response"]


async def test_an_answer_that_has_ended_cannot_be_steered(demo_server: Served) -> None:
    async with AsyncClient(demo_server.base_url) as client:
        response = await client.responses.create(model="demo", input="Hi", max_output_tokens=1)
        with pytest.raises(RefusedError) as caught:
            await client.responses.steer(response["id"], "two")
        assert (caught.value.status, caught.value.code) == (409, "response_already_completed")
