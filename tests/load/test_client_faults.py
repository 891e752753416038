"""Every way in which a stream can go wrong, and what is noted of it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.load.client.records import Endpoint, Fault
from penstock.load.client.sse import SseTransport

from .manual_loop import ManualLoop, play, until
from .scripted_server import (
    CALL,
    CLOSE,
    DONE,
    FOREVER,
    Script,
    answer,
    chat,
    chunk,
    connected,
    cut,
    event,
    framed,
    head,
    record_from,
    record_of,
    response_stream,
    usage,
    whole,
)

_ERROR = event({"error": {"message": "out of luck", "code": 500}})
_GOOD = chat()
_NUMBERED = response_stream("one", " two")
_FAILED = response_stream("one", status="failed")
_NO_NUMBER = event({"type": "response.created", "response": {"id": "resp_1"}})
_FAULTY: dict[str, tuple[Endpoint, Script, list[Fault]]] = {
    "cut in an event": ("chat", cut(*_GOOD[:2], _GOOD[2][:20]), [Fault.CUT]),
    "cut before the head": ("chat", [CLOSE], [Fault.CUT]),
    "cut in the head": ("chat", [head()[:30], CLOSE], [Fault.CUT]),
    "cut between events": ("responses", cut(*_NUMBERED[:2]), [Fault.CUT]),
    "a whole body without its end": ("responses", whole(*_NUMBERED[:-1]), [Fault.CUT]),
    "no [DONE]": ("chat", whole(*_GOOD[:-1]), [Fault.CUT]),
    "no finish chunk": ("chat", whole(*_GOOD[:3], usage(3), DONE), [Fault.MALFORMED]),
    "data after [DONE]": ("chat", whole(*_GOOD, _GOOD[0]), [Fault.AFTER_END]),
    "two [DONE]": ("chat", whole(*_GOOD, DONE), [Fault.AFTER_END]),
    "data after the terminal event": (
        "responses",
        whole(*_NUMBERED, event({"type": "penstock.resumed"})),
        [Fault.AFTER_END],
    ),
    "two terminal events": ("responses", whole(*_NUMBERED, _NUMBERED[-1]), [Fault.AFTER_END]),
    "a gap": ("responses", whole(*_NUMBERED[:1], *_NUMBERED[2:]), [Fault.GAP, Fault.TEXT_DIFFERS]),
    "a repeat": (
        "responses",
        whole(*_NUMBERED[:2], *_NUMBERED[1:]),
        [Fault.REPEAT, Fault.TEXT_DIFFERS],
    ),
    "no number": ("responses", whole(_NO_NUMBER), [Fault.MALFORMED, Fault.CUT]),
    "other text at the end": (
        "responses",
        whole(*response_stream("one", stated="two")),
        [Fault.TEXT_DIFFERS],
    ),
    "fewer tokens than counted": (
        "chat",
        whole(chunk("one", count=1), chunk(finish="stop", count=2), usage(3), DONE),
        [Fault.LOST_TOKENS],
    ),
    "more tokens than counted": (
        "chat",
        whole(chunk("one", count=4), chunk(finish="stop", count=4), usage(3), DONE),
        [Fault.EXTRA_TOKENS],
    ),
    "fewer tokens than asked for": (
        "chat",
        whole(chunk("one", count=2), chunk(finish="stop", count=2), usage(2), DONE),
        [Fault.LOST_TOKENS],
    ),
    "fewer tokens than asked of responses": (
        "responses",
        whole(*response_stream("one", num_tokens=2)),
        [Fault.LOST_TOKENS],
    ),
    "more tokens than asked of responses": (
        "responses",
        whole(*response_stream("one", num_tokens=4)),
        [Fault.EXTRA_TOKENS],
    ),
    "more texts than tokens": ("chat", whole(_GOOD[0], *_GOOD), [Fault.EXTRA_TOKENS]),
    "a falling count": ("chat", whole(_GOOD[1], *_GOOD[0:1], *_GOOD[3:]), [Fault.MALFORMED]),
    "text after the finish chunk": (
        "chat",
        whole(*_GOOD[:2], _GOOD[3], chunk("x", count=3), *_GOOD[4:]),
        [Fault.AFTER_END],
    ),
    "an error in the stream": ("chat", whole(*_GOOD[:2], _ERROR, DONE), [Fault.FAILED]),
    "an error and no [DONE]": ("chat", whole(*_GOOD[:2], _ERROR), [Fault.FAILED, Fault.CUT]),
    "a failed response": ("responses", whole(*_FAILED), [Fault.FAILED]),
    "an error event": (
        "responses",
        whole(*_NUMBERED[:2], event({"type": "error", "message": "out of luck"})),
        [Fault.FAILED],
    ),
    "no JSON": ("chat", whole(_GOOD[0], b"data: {oops\n\n", *_GOOD[1:]), [Fault.MALFORMED]),
    "no UTF-8": ("chat", whole(b'data: {"a": "\xff"}\n\n', *_GOOD), [Fault.MALFORMED]),
    "no object": ("chat", whole(b"data: 7\n\n", *_GOOD), [Fault.MALFORMED]),
    "no choices": ("chat", whole(event({"id": "a"}), *_GOOD), [Fault.MALFORMED]),
    "[DONE] among responses": ("responses", whole(*_NUMBERED, DONE), [Fault.AFTER_END]),
    "not HTTP": ("chat", [b"SSH-2.0-OpenSSH\r\n", FOREVER], [Fault.MALFORMED]),
    "no stream": ("chat", answer("200 OK", "application/json", b'{"id": 1}'), [Fault.MALFORMED]),
    "a redirect": ("chat", answer("307 Go", "text/plain", b"elsewhere"), [Fault.MALFORMED]),
}  # fmt: skip


@pytest.mark.parametrize("name", _FAULTY)
async def test_a_fault_is_noted(name: str) -> None:
    endpoint, script, faults = _FAULTY[name]
    record = await record_from(script, endpoint)
    assert record.faults == faults, record.detail
    assert record.detail
    assert record.ended_s > 0


async def test_a_refusal_has_its_status_and_message() -> None:
    body = b'{"error": {"message": "too many", "code": "rate_limit"}}'
    record = await record_from(answer("429 Too Many Requests", "application/json", body))
    assert (record.faults, record.status, record.detail) == ([Fault.REFUSED], 429, "too many")
    html = b"<h1>Internal error</h1>"
    record = await record_from(answer("500 Internal Server Error", "text/html", html))
    assert (record.faults, record.status) == ([Fault.REFUSED], 500)
    assert "<h1>Internal error</h1>" in record.detail


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        base_url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        record = record_of()
        async with SseTransport(base_url, "chat") as transport:
            await transport.stream(CALL, record)
    assert record.faults == [Fault.UNREACHABLE]
    assert record.detail
    assert record.ended_s >= record.sent_s > 0


@pytest.mark.parametrize(
    "script",
    [
        [FOREVER],
        [head(), *[0.05, framed(b": ping\n\n")] * 1000],  # a comment is no event
        [head(), framed(_GOOD[0]), FOREVER],
        [head(), *map(framed, _GOOD), FOREVER],  # [DONE], and then the body has no end
        [head(), *map(framed, _GOOD), *[0.05, framed(_GOOD[0])] * 1000],
    ],
    ids=["no head", "comments", "after text", "no end of the body", "events without end"],
)
def test_silence_is_bounded(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(loop: ManualLoop) -> None:
        record = record_of()
        async with connected(script, stall_s=5.0) as (server, transport):
            streaming = asyncio.create_task(transport.stream(CALL, record))
            await until(lambda: server.bodies)
            while not streaming.done():
                loop.now_s += 0.01
                await asyncio.sleep(0)
            assert 5.0 <= loop.now_s - record.sent_s < 30
            await server.hung_up.wait()
        assert Fault.STALLED in record.faults

    play(monkeypatch, run)
