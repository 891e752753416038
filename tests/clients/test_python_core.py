"""The client's core without a network: parsing, bookkeeping, and the rules for trying again."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clients.python import errors
from penstock.clients.python.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    ProtocolError,
    RateLimitError,
    RefusedError,
    ServerError,
    UnreachableError,
    refused,
)
from penstock.clients.python.resources.chat import Chat
from penstock.clients.python.retries import RetryPolicy
from penstock.clients.python.server import Server
from penstock.clients.python.sse import ServerSentEvent, SseParser
from penstock.clients.python.steps import Answer, Ask, Request, Sleep, Steps
from penstock.clients.python.track import Track

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
EVENTS = st.lists(
    st.builds(
        ServerSentEvent,
        event=LINES.map(str.strip).filter(bool),
        data=st.lists(LINES, min_size=1, max_size=3).map("\n".join),
    ),
    max_size=5,
)
EVEN = RetryPolicy(draw=lambda: 1.0)


def written(event: ServerSentEvent, end: str) -> str:
    data = "".join(f"data: {line}{end}" for line in event.data.split("\n"))
    return f": ping{end}{end}event: {event.event}{end}id: 7{end}{data}{end}"


@given(events=EVENTS, end=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data())
def test_events_come_out_however_the_bytes_are_cut(
    events: list[ServerSentEvent], end: str, data: st.DataObject
) -> None:
    """Also in the middle of a character, or of a line's end."""
    sent = "".join(written(event, end) for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    parser, found = SseParser(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found += parser.feed(sent[begin:stop])
    assert found == events


@given(events=EVENTS)
def test_events_come_out_byte_by_byte(events: list[ServerSentEvent]) -> None:
    sent = "".join(written(event, "\r\n") for event in events).encode()
    parser = SseParser()
    assert [e for n in range(len(sent)) for e in parser.feed(sent[n : n + 1])] == events


def test_a_block_that_was_cut_short_is_no_event() -> None:
    parser = SseParser()
    assert parser.feed(b"\xef\xbb\xbfdata:x\n\ndata: half") == [ServerSentEvent("message", "x")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"retry: 5\ndata\n\nevent: none\n\n") == [
        ServerSentEvent("message", "half\n")
    ]


@given(st.integers(2, 12), st.data())
def test_a_track_takes_each_event_once(num_events: int, data: st.DataObject) -> None:
    """Whatever is replayed after a break, as long as nothing is left out."""
    events = [{"type": "response.output_text.delta", "sequence_number": n} for n in
              range(num_events)]  # fmt: skip
    events[0] |= {"type": "response.created", "response": {"id": "resp_1"}}
    events[-1]["type"] = "response.completed"
    track, taken = Track(), []
    while len(taken) < num_events:
        begin = data.draw(st.integers(0, len(taken)))
        end = num_events - data.draw(st.integers(0, num_events - len(taken) - 1))
        taken += [event for event in events[begin:end] if track.take(event)]
    assert taken == events
    assert (track.response_id, track.is_ended) == ("resp_1", True)


def test_a_track_notices_what_is_missing() -> None:
    track = Track("resp_1", starting_after=4)
    assert track.take({"type": "penstock.queue", "position": 1})
    with pytest.raises(ProtocolError, match="event 6 came after event 4"):
        track.take({"type": "response.output_text.delta", "sequence_number": 6})
    assert track.take({"type": "response.completed", "sequence_number": 5, "response": {}})
    with pytest.raises(ProtocolError, match="after the terminal event"):
        track.take({"type": "response.output_text.delta", "sequence_number": 6})


def refusal(status: int, **headers: str) -> RefusedError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return refused(status, {"message": "no", "code": "c"}, headers=named)


@pytest.mark.parametrize(
    ("error", "is_repeatable", "wait_s"),
    [
        (refusal(429, retry_after="3"), False, 3.0),
        (refusal(503, retry_after="3", retry_after_ms="120"), False, 0.12),
        (refusal(429, retry_after="61"), True, None),
        (refusal(429, retry_after="Fri, 21 Nov 2026 07:28:00 GMT"), True, 0.25),
        (refusal(429, retry_after="-1"), True, 0.25),
        (refusal(429, retry_after="1", x_should_retry="false"), True, None),
        (refusal(409, x_should_retry="true"), True, 0.25),
        (refusal(409), True, None),
        (refusal(400), True, None),
        (refusal(500), True, 0.25),
        (refusal(500), False, None),
        (refused(503, {"penstock": {"estimated_wait_ms": 40}}), False, 0.04),
        (UnreachableError(), False, 0.25),
        (ConnectionLostError(), True, 0.25),
        (ConnectionLostError(), False, None),
        (ProtocolError(), True, None),
    ],
)
def test_when_to_try_again(error: PenstockError, is_repeatable: bool, wait_s: float | None) -> None:
    assert EVEN.wait_s(error, 1, is_repeatable=is_repeatable) == wait_s


def test_how_long_it_is_tried() -> None:
    lost = ConnectionLostError()
    waits = [EVEN.wait_s(lost, n, is_repeatable=True) for n in range(1, 4)]
    assert waits == [0.25, 0.5, None]
    waits = [EVEN.wait_s(lost, n, is_repeatable=False, is_resuming=True) for n in range(1, 11)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, None]
    jittered = RetryPolicy(draw=lambda: 0.0).wait_s(lost, 2, is_repeatable=True)
    assert jittered == 0.25


def drive(steps: Steps[Any], *outcomes: Answer | PenstockError) -> tuple[Any, list[Any]]:
    """What steps lead to when their requests have these outcomes, and what they did."""
    left, done = list(outcomes), []
    try:
        action = next(steps)
        while True:
            if isinstance(action, Sleep):
                done.append(action.seconds)
                action = steps.send(None)
                continue
            assert isinstance(action, Ask)
            done.append(action.request.method)
            outcome = left.pop(0)
            if isinstance(outcome, PenstockError):
                action = steps.throw(outcome)
            else:
                action = steps.send(outcome)
    except StopIteration as stop:
        assert not left
        return stop.value, done


def answer(status: int, told: object, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=status, headers=named, body=json.dumps(told).encode())


def server(**options: Any) -> Server:
    return Server.parse("host:1", retries=RetryPolicy(draw=lambda: 1.0, **options))


def request(**options: Any) -> Request:
    return server().request("POST", "/x", body={"a": 1}, **options)


def test_a_request_that_is_refused_for_now_is_sent_again() -> None:
    told: list[PenstockError] = []
    patient = server(on_wait=lambda error, _: told.append(error))
    value, done = drive(
        patient.call(request()),
        answer(429, {"error": {"message": "later"}}, retry_after_ms="70"),
        UnreachableError("nobody"),
        answer(200, {"ok": True}),
    )
    assert (value, done) == ({"ok": True}, ["POST", 0.07, "POST", 0.5, "POST"])
    assert [type(error) for error in told] == [RateLimitError, UnreachableError]


@pytest.mark.parametrize(
    ("params", "max_retries", "has_key"),
    [({}, 2, True), ({"n": 1}, 2, True), ({"n": 2}, 2, False), ({}, 0, False),
     ({"extra_body": {"use_beam_search": True}}, 2, False),
     ({"extra_body": {"prompt_logprobs": 0}}, 2, False)],
)  # fmt: skip
def test_a_chat_keeps_its_key_when_it_is_tried_again(
    params: dict[str, Any], max_retries: int, has_key: bool
) -> None:
    asked: list[str | None] = []

    class Unreachable:
        """Runs operations where nobody answers."""

        def run(self, steps: Steps[Any]) -> None:
            action = next(steps)
            while True:
                if isinstance(action, Sleep):
                    action = steps.send(None)
                else:
                    assert isinstance(action, Ask)
                    asked.append(action.request.headers.get("Idempotency-Key"))
                    action = steps.throw(UnreachableError("nobody"))

    chat: Any = Chat(cast("Any", Unreachable()), server(max_retries=max_retries))
    for _ in range(2):
        with pytest.raises(UnreachableError):
            chat.create(model="m", messages=[], **params)
    assert len(asked) == 2 * (max_retries + 1)
    first, second = asked[: max_retries + 1], asked[max_retries + 1 :]
    assert [len(set(first)), len(set(second))] == [1, 1]
    assert (first[0] is not None) == has_key
    assert (first[0] != second[0]) == has_key


@pytest.mark.parametrize(
    ("outcomes", "kind", "words"),
    [
        ([answer(400, {"error": {"message": "bad x", "param": "x"}})], InvalidRequestError, "bad"),
        ([answer(503, {})] * 3, OverloadedError, "HTTP status 503"),
        ([answer(418, [])], InvalidRequestError, "HTTP status 418"),
        ([ConnectionLostError("broke")], ConnectionLostError, "broke"),
        ([UnreachableError("nobody")] * 3, UnreachableError, "cannot reach http://host:1: nobody"),
        ([Answer(status=200, headers={}, body=b"<html>")], ProtocolError, "like a penstock"),
    ],
)
def test_what_is_raised_in_the_end(
    outcomes: list[Any], kind: type[PenstockError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        drive(server().call(request(is_repeatable=False)), *outcomes)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, errors.AuthenticationError), (403, errors.PermissionDeniedError),
     (404, errors.NotFoundError), (409, errors.ConflictError), (413, InvalidRequestError),
     (429, RateLimitError), (500, ServerError), (503, OverloadedError)],
)  # fmt: skip
def test_every_status_has_its_class(status: int, kind: type[RefusedError]) -> None:
    error = refusal(status)
    assert type(error) is kind
    assert (error.status, error.code, str(error)) == (status, "c", "no")


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    def names(kind: type, depth: int) -> list[tuple[int, str]]:
        below = [line for sub in kind.__subclasses__() for line in names(sub, depth + 1)]
        return [(depth, kind.__name__), *below]

    assert errors.__doc__
    drawn = [
        (line.index(line.lstrip("│├└─ ")) // 4 - 1, line.strip("│├└─ ").split()[0])
        for line in errors.__doc__.splitlines()
        if line.startswith("    ")
    ]
    assert sorted(drawn) == sorted(names(PenstockError, 0))


@pytest.mark.parametrize("url", ["ftp://host", "http://", "", "http://[", "http://h:port"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a server"):
        Server.parse(url)


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/below/", "https://h/below"),
    ],
)
def test_addresses(url: str, base_url: str) -> None:
    assert Server.parse(url).base_url == base_url


def test_a_key_does_not_show() -> None:
    assert "sk-secret" not in repr(Server.parse("h", api_key="sk-secret"))


def test_the_package_is_light_and_tells_what_it_has() -> None:
    """Serving the chat page must not load an HTTP client."""
    code = (
        "import sys, penstock.clients, penstock.clients.browser\n"
        "assert 'httpx' not in sys.modules\n"
        "from penstock.clients import AsyncClient, Client, PenstockError\n"
        "assert not hasattr(penstock.clients, 'nonsense')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_everything_public_is_typed_and_told() -> None:
    import penstock.clients.python as public

    for name in public.__all__:
        exported = getattr(public, name)
        assert inspect.getdoc(exported) or not inspect.isclass(exported), name


def test_headers_are_read_whatever_their_case() -> None:
    lower: Mapping[str, str] = {"retry-after": "2"}
    assert refused(429, None, headers=lower).retry_after_s == 2.0
