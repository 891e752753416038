"""A response of several items: its events, their numbers and ids, and what is stored of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.clients import Client, output_text
from penstock.engine.chat_formats import OutputFormat, OutputSyntax
from penstock.engine.request import FinishReason
from penstock.gateway.api.responses.events import response_object
from penstock.gateway.api.responses.prompt import all_items
from penstock.gateway.api.shared.items import messages_of
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.turn_codec import node_of, pack, unpack
from penstock.gateway.storage.response_log.codec import (
    UnreadableEntryError,
    decode_delta,
    decode_header,
    decode_log,
    encode_delta,
    encode_header,
    encode_log,
)
from penstock.gateway.storage.response_log.item_kinds import KINDS
from penstock.gateway.storage.response_log.log import ResponseLog, ResponseMovedError
from penstock.gateway.storage.response_log.record import DeltaEntry, LogHeader

from ..storage.conversations.making import a_conversation, a_turn, finished
from .test_response_events import Seen, Subscriber, end, events_of, filled, header, jsons

BROWSER = Path(__file__).parents[3] / "clients" / "browser"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


WITH_THOUGHTS = OutputFormat(syntax=OutputSyntax(reasoning="qwen3"))
SAID = [(0, "reasoning", "Hm"), (0, "reasoning", "m."), (1, "message", "Hel"), (1, "message", "lo")]
TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def _continued(log: ResponseLog, num_said: int = 0) -> ResponseLog:
    """The log with the rest of `SAID`."""
    for token_id, (output_index, kind, text) in list(enumerate(SAID))[num_said:]:
        log.append_delta(text, (token_id,), output_index=output_index, kind=kind)
    log.append(end(log, FinishReason.STOP))
    return log


def _header(*, has_summary: bool) -> LogHeader:
    plain = header(output_format=WITH_THOUGHTS)
    reasoning = {"effort": None, "summary": "auto" if has_summary else None}
    return dataclasses.replace(plain, echo={**plain.echo, "reasoning": reasoning})


def _log(*, has_summary: bool = False) -> ResponseLog:
    return _continued(ResponseLog(_header(has_summary=has_summary)))


WHERE = pytest.mark.parametrize("has_summary", [False, True], ids=["content", "summary"])
SUMMARY_TYPES = {
    **{number: f"response.reasoning_summary_text.{end}" for number, end in
       ((4, "delta"), (5, "delta"), (6, "done"))},
    3: "response.reasoning_summary_part.added",
    7: "response.reasoning_summary_part.done",
}  # fmt: skip


@WHERE
async def test_items_come_one_after_the_other(has_summary: bool) -> None:
    events = await events_of(_log(has_summary=has_summary))
    types = [SUMMARY_TYPES.get(at, each) if has_summary else each for at, each in enumerate(TYPES)]
    assert [event["type"] for event in events] == types
    assert [event["sequence_number"] for event in events] == list(range(len(TYPES)))
    for event in events:
        EVENTS.validate_python(event)
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == [0] * 7 + [1] * 7
    reasoning, message = events[-1]["response"]["output"]
    thought, other = ("summary", "content") if has_summary else ("content", "summary")
    assert (reasoning[thought][0]["text"], reasoning[other]) == ("Hmm.", [])
    assert (events[2]["item"][thought], message["content"][0]["text"]) == ([], "Hello")
    for item, added, done in ((reasoning, events[2], events[8]), (message, events[9], events[15])):
        assert added["item"]["id"] == done["item"]["id"] == item["id"]
        assert done["item"] == item
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {reasoning["id"], message["id"]}


@WHERE
async def test_every_number_replays_the_rest(has_summary: bool) -> None:
    log = _log(has_summary=has_summary)
    whole = await events_of(log)
    for after in range(-1, len(whole)):
        assert await events_of(log, after) == whole[after + 1 :]
    with pytest.raises(RequestRefusedError, match="starting_after"):
        await events_of(log, len(whole))


@WHERE
@pytest.mark.parametrize("num_said", range(len(SAID) + 1))
async def test_the_next_owner_goes_on_with_the_same_numbers_and_ids(
    num_said: int, has_summary: bool
) -> None:
    """From what its predecessor has stored, after any delta."""
    whole = await events_of(_log(has_summary=has_summary))
    lost = ResponseLog(_header(has_summary=has_summary))
    for token_id, (output_index, kind, text) in enumerate(SAID[:num_said]):
        lost.append_delta(text, (token_id,), output_index=output_index, kind=kind)
    stored = [encode_delta(entry) for entry in lost.entries if isinstance(entry, DeltaEntry)]
    taken_over = ResponseLog(decode_header(encode_header(lost.header)))
    taken_over.entries += map(decode_delta, stored)
    taken_over.publish(num_said)
    _continued(taken_over, num_said)

    async def find_again() -> ResponseLog:
        return taken_over

    seen = Seen()
    task = asyncio.create_task(Subscriber(lost, find_again=find_again).write_to(seen, jsons))
    await asyncio.sleep(0)
    lost.fail(ResponseMovedError(lost.header.response_id))
    await task
    assert seen.events == whole


async def test_a_response_may_end_within_any_item() -> None:
    log = ResponseLog(header(output_format=WITH_THOUGHTS))
    assert response_object(log)["output"] == []
    log.append_delta("Hm", (1,), kind="reasoning")
    log.append(end(log, FinishReason.LENGTH))
    events = await events_of(log)
    assert [event["type"] for event in events] == [*TYPES[:5], *TYPES[6:9], "response.incomplete"]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    empty = ResponseLog(header(output_format=WITH_THOUGHTS))
    empty.append(end(empty, FinishReason.STOP))
    assert [event["type"] for event in await events_of(empty)] == [*TYPES[:2], TYPES[-1]]


def test_an_ended_log_is_stored() -> None:
    log = _log()
    assert decode_log(encode_log(log.header, log.entries)) == (log.header, log.entries)


def test_only_what_version_1_cannot_hold_is_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    version_1, version_2 = 1, 2  # the second byte: the first says how long the array is
    items, text = _log(), filled(["a", "b"])
    assert encode_header(items.header)[1] == version_2
    assert encode_header(text.header)[1] == version_1
    for log, versions in ((items, [2, 2, 2, 2]), (text, [1, 1])):
        deltas = [entry for entry in log.entries if isinstance(entry, DeltaEntry)]
        assert [encode_delta(entry)[1] for entry in deltas] == versions
    assert isinstance(items.entries[0], DeltaEntry)
    unknown = encode_delta(items.entries[0])
    monkeypatch.delitem(KINDS, "reasoning")  # type: ignore[arg-type]
    with pytest.raises(UnreadableEntryError):
        decode_delta(unknown)


def test_a_conversation_keeps_them() -> None:
    """A continuation goes on with the last item of what was cut off."""
    reasoning, message = response_object(_log())["output"]
    conversation = a_conversation()
    asked = ({"id": "msg_0", "type": "message", "role": "user", "content": [{"text": "Hi"}]},)
    cut = finished(a_turn(conversation, items=asked), "incomplete", output=(reasoning, message))
    rest = {**message, "id": "msg_3", "content": [{**message["content"][0], "text": ", you."}]}
    going_on = a_turn(conversation, cut, items=(), continues=True)
    last = finished(going_on, output=(rest, {**reasoning, "id": "rs_4"}))
    path = [unpack(node_of(turn), pack(turn).body, {}) for turn in (cut, last)]
    assert path == [
        dataclasses.replace(turn, items=tuple(turn.items), output=tuple(turn.output))
        for turn in (cut, last)
    ]
    kept = all_items(path)
    assert [item["id"] for item in kept] == ["msg_0", reasoning["id"], "msg_3", "rs_4"]
    assert messages_of(kept) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "Hmm.", "content": "Hello, you."},
        {"role": "assistant", "reasoning_content": "Hmm.", "content": ""},
    ]
    for output in ((message,), ()):
        assert pack(finished(going_on, output=output)).body[5] == 1  # read by older gateways
    assert pack(last).body[5] == pack(finished(going_on, output=(reasoning,))).body[5] == 2


@contextmanager
def _serving(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The address of a server that answers everything with these events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@WHERE
async def test_the_python_client_reads_them(has_summary: bool) -> None:
    events = await events_of(_log(has_summary=has_summary))
    with (
        _serving(events) as url,
        Client(url) as client,
        client.responses.stream(model="m", input="Hi") as stream,
    ):
        assert list(stream) == events
    assert stream.response is not None
    assert [item["type"] for item in stream.response["output"]] == ["reasoning", "message"]
    assert stream.text == output_text(stream.response) == "Hello"
    assert stream.reasoning == "Hmm."


@WHERE
@pytest.mark.node
async def test_the_page_finds_them(has_summary: bool) -> None:
    node = shutil.which("node") or pytest.skip("node is not installed")
    events = await events_of(_log(has_summary=has_summary))
    reasoning, message = output = events[-1]["response"]["output"]
    told = {"events": events, "outputs": [output, message, None, reasoning]}
    script = f"""
        import {{ Answer, textOf }} from "{BROWSER}/answer.js";
        import {{ outputOf }} from "{BROWSER}/turns.js";
        const {{ events, outputs }} = {json.dumps(told)};
        const answer = new Answer({{}});
        for (const event of events) answer.feed(event);
        const fetched = textOf(events.at(-1).response);
        const shown = outputs.map((output) => outputOf({{ output }}).map((item) => item.id));
        const thoughts = answer.blocks.map((block) => block.text).join();
        const said = [answer.text, fetched, thoughts];
        console.log(JSON.stringify([said, answer.lastSequenceNumber, shown]));
    """
    command = [node, "--input-type=module", "--eval", script]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    both = [reasoning["id"], message["id"]]
    shown = [both, [message["id"]], [], [reasoning["id"]]]
    assert json.loads(done.stdout) == [["Hello", "Hello", "Hmm."], len(events) - 1, shown]
