"""Responses with `store: false` go on over the socket that they came on, and nowhere else."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import websockets

from ..conftest import ANSWER, Serve, Served
from ..sockets import send, until_end

SECOND = f"<user>one\n<assistant>{ANSWER}\n<user>two\n<assistant>"


async def ask(socket: websockets.ClientConnection, **body: Any) -> Any:
    """The last event of a response that is not stored."""
    await send(socket, type="response.create", **{"store": False, **body})
    return (await until_end(socket))[-1]


async def answered(socket: websockets.ClientConnection, **body: Any) -> Any:
    event = await ask(socket, **body)
    assert event["type"] in ("response.completed", "response.incomplete"), event
    return event["response"]


def code_of(event: Any) -> Any:
    return event["error"]["code"]


async def test_turn_after_turn(served: Served) -> None:
    async with served.connect() as socket:
        first = await answered(socket, input="one")
        second = await answered(socket, input="two", previous_response_id=first["id"])
        assert served.prompt_of() == SECOND
        assert second["previous_response_id"] == first["id"]
        await answered(socket, input="three", previous_response_id=second["id"])
        assert served.prompt_of() == f"{SECOND}{ANSWER}\n<user>three\n<assistant>"
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(second["id"])
    assert not (await served.client.get("/conversations", cast_to=dict[str, Any]))["data"]


async def test_every_lane_remembers_its_latest(served: Served) -> None:
    async with served.connect() as socket:
        first = await answered(socket, input="one", stream_id="a")
        await answered(socket, input="else", stream_id="b")
        # A fork onto another lane, and then on where it came from.
        await answered(socket, input="two", stream_id="c", previous_response_id=first["id"])
        assert served.prompt_of() == SECOND
        await answered(socket, input="two", stream_id="a", previous_response_id=first["id"])
        assert served.prompt_of() == SECOND
        again = await ask(socket, input="two", stream_id="a", previous_response_id=first["id"])
        assert (again["status"], code_of(again)) == (400, "previous_response_not_found")
        assert (again["stream_id"], again["error"]["param"]) == ("a", "previous_response_id")


async def test_another_connection_knows_nothing_of_it(served: Served) -> None:
    async with served.connect() as socket, served.connect() as other:
        first = await answered(socket, input="one")
        event = await ask(other, input="two", previous_response_id=first["id"])
        assert code_of(event) == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(
            model="tiny", input="two", previous_response_id=first["id"]
        )
    assert caught.value.code == "previous_response_not_found"


async def test_between_stored_ones(served: Served) -> None:
    """Stored, not stored, stored: the last one has a tree of its own, with all that was said."""
    async with served.connect() as socket:
        stored = await answered(socket, input="one", store=True)
        between = await answered(socket, input="two", previous_response_id=stored["id"])
        assert served.prompt_of() == SECOND
        last = await answered(socket, input="three", store=True, previous_response_id=between["id"])
        assert served.prompt_of() == f"{SECOND}{ANSWER}\n<user>three\n<assistant>"
    items = await served.client.responses.input_items.list(last["id"], order="asc")
    said = [item.content[0].text async for item in items]  # type: ignore[union-attr]
    assert said == ["one", ANSWER, "two", ANSWER, "three"]
    await served.client.responses.create(model="tiny", input="4", previous_response_id=last["id"])
    assert served.prompt_of().startswith(f"{SECOND}{ANSWER}\n<user>three\n<assistant>{ANSWER}\n")


async def test_a_prepared_prompt(served: Served) -> None:
    async with served.connect() as socket:
        prepared = await answered(socket, input="one", generate=False)
        await answered(socket, previous_response_id=prepared["id"])
        assert served.prompt_of() == "<user>one\n<assistant>"


async def test_an_answer_that_was_cut_goes_on(serve: Serve) -> None:
    async with serve() as served, served.connect() as socket:
        half = await answered(socket, input="one", max_output_tokens=3)
        goes_on = {"penstock": {"continue": True}, "previous_response_id": half["id"]}
        rest = await answered(socket, **goes_on)
        texts = [response["output"][0]["content"][0]["text"] for response in (half, rest)]
        await answered(socket, input="two", previous_response_id=rest["id"])
        assert served.prompt_of() == (
            f"<user>one\n<assistant>{''.join(texts)}\n<user>two\n<assistant>"
        )


@pytest.mark.parametrize(
    "broken",
    [
        {"temperature": "hot"},
        {"mood": "x"},
        {"model": "other"},
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]},
        {"input": "x" * 2000},
    ],
    ids=["type", "parameter", "model", "call", "context"],
)
async def test_what_a_failed_turn_was_to_continue_is_forgotten(
    served: Served, broken: dict[str, Any]
) -> None:
    async with served.connect() as socket:
        first = await answered(socket, input="one")
        other = await answered(socket, input="else", stream_id="b")
        continued = {"input": "two", "previous_response_id": first["id"]}
        failed = await ask(socket, **{**continued, **broken}, stream_id="c")
        assert failed["type"] == "error"
        again = await ask(socket, **continued)
        assert (again["status"], code_of(again)) == (400, "previous_response_not_found")
        # Nothing else is.
        await answered(socket, input="two", previous_response_id=other["id"], stream_id="b")


async def test_so_is_that_of_a_turn_that_fails_in_the_engine(served: Served) -> None:
    async with served.connect() as socket:
        first = await answered(socket, input="one")
        continued = {"input": "two", "previous_response_id": first["id"]}
        served.engine.refusal = "no room"
        failed = await ask(socket, **continued, stream_id="c")
        assert failed["type"] == "response.failed"
        served.engine.refusal = None
        assert code_of(await ask(socket, **continued)) == "previous_response_not_found"


async def test_a_stored_response_outlives_a_failed_turn(served: Served) -> None:
    async with served.connect() as socket:
        first = await answered(socket, input="one", store=True)
        continued = {"input": "two", "previous_response_id": first["id"]}
        failed = await ask(socket, **continued, temperature="hot")
        assert failed["type"] == "error"
        await answered(socket, **continued)
        assert served.prompt_of() == SECOND
