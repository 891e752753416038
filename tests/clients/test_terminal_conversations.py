"""The conversations of `penstock chat` on the server: kept, listed, found and opened again."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.clients import Client
from penstock.clients.python.terminal_conversations import Listed, read_tree, title_of

from ..system.processes import Served
from .cutting_proxy import CuttingProxy
from .terminal import ASKED, COLOURS, CTRL_C, ENDLESS, LONG, TOLD, Piped, Terminal


@pytest.fixture
def client(demo_server: Served) -> Iterator[Client]:
    """The server has no conversation, before and after."""
    with Client(demo_server.base_url) as opened:
        _forget_all(opened)
        yield opened
        _forget_all(opened)


def _forget_all(client: Client) -> None:
    while listed := client.conversations.list(limit=100)["data"]:
        for one in listed:
            client.conversations.delete(one["id"])


def _message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _turn(name: str, parent: str | None, items: list[Any], output: Any, **more: Any) -> Any:
    told = {"turn": name, "parent": parent, "items": items, "output": output, "created_at": 0}
    return {"response_id": name, "status": "completed", **told, **more}


def test_a_tree_is_read_as_turns() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    returned = {"type": "function_call_output", "call_id": "c", "output": "3"}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    seen = _message("user", "Two")
    seen["content"].insert(0, picture)
    turns = [
        _turn("r1", None, [_message("user", "One")], [_message("assistant", "Adding."), call]),
        _turn("r2", "r1", [returned], _message("assistant", "It is 3.")),
        _turn("r3", "r2", [seen], None, status="failed"),
        _turn("r4", "r2", [seen], _message("assistant", "A cat."), status="cancelled"),
        _turn("r5", "r4", [_message("user", "Three")], None, status="in_progress"),
        _turn("r6", None, [_message("user", "Other")], _message("assistant", "Yes.")),
    ]
    tree: Any = {"head": "r4", "running": "r5", "data": turns}
    transcript, running = read_tree(tree)
    assert [(turn.question, turn.answer, turn.response_id) for turn in transcript.path()] == [
        ("One", "Adding.\n\nIt is 3.", "r2"),
        ("[image]\nTwo", "A cat.", "r4"),
    ]
    assert list(transcript.outline())[2] == "   3  Other (after 0)"
    assert running is not None
    assert (running.question, running.parent, running.response_id) == (
        "Three", transcript.head, "r5",
    )  # fmt: skip


def test_a_line_of_the_list() -> None:
    untitled: Any = {"id": "c", "created_at": 0, "used_at": 0, "metadata": {}}
    assert title_of(untitled).startswith("Conversation of 19")
    line = Listed("c", "Ships", 0, "a\n  lighthouse").line(7)
    assert line.startswith("  7  19")
    assert line.endswith("  Ships\n     a lighthouse")


def test_a_conversation_of_the_page_goes_on_in_the_terminal(
    demo_server: Served, client: Client
) -> None:
    """With what it was told to ask for, at the turn that it shows."""
    chosen = {"model": "gone", "instructions": "Be kind.", "top_p": "0.5"}
    settings = json.dumps({**chosen, "further": '{"truncation": "auto"}'})
    one = client.conversations.create(
        items=[_message("user", TOLD), _message("assistant", "Nice to meet you, Orlan!")],  # type: ignore[list-item]
        metadata={"title": "Names", "settings_0": settings[:20], "settings_1": settings[20:]},
    )
    client.conversations.create(metadata={"title": "Empty"})
    lines = ["/open", "/open 9 none", "/open orlan meet", "/open 1", ASKED, "/retry", "/branch"]
    done = Piped(lines, demo_server.base_url)
    assert (done.exit_code, done.complaints) == (0, "")
    said = done.output.splitlines()
    assert {line[23:] for line in said[:2]} == {"Names", "Empty"}
    assert said[2].endswith("Names")
    assert "Orlan" in said[3]
    assert said[4:6] == [f"› {TOLD}", "Nice to meet you, Orlan!"]
    assert ["Orlan" in line for line in said[6:8]] == [True, True]
    assert said[8:] == [f"   1  {TOLD}", f"   2  {ASKED}", f"*  3  {ASKED} (after 1)"]
    first, *answers = client.conversations.tree(one["id"])["data"]
    assert [turn["parent"] for turn in answers] == [first["turn"]] * 2
    asked: Any = client.responses.retrieve(answers[0]["turn"])
    assert (asked["instructions"], asked["top_p"], asked["model"]) == ("Be kind.", 0.5, "demo")
    assert asked["truncation"] == "auto"


def test_a_pipe_leaves_no_conversation(demo_server: Served, client: Client) -> None:
    assert Piped([TOLD, "/open"], demo_server.base_url).exit_code == 0
    assert client.conversations.list()["data"] == []


def test_a_conversation_that_goes_on_elsewhere_or_is_deleted(
    demo_server: Served, client: Client
) -> None:
    one = client.conversations.create(items=[{"role": "user", "content": TOLD}])["id"]

    def lines() -> Iterator[str]:
        yield "/open 1"
        client.conversations.items.create(one, items=[{"role": "user", "content": "Elsewhere"}])
        yield ASKED
        client.conversations.delete(one)
        yield ASKED
        yield "/open 1"
        yield TOLD

    done = Piped(lines(), demo_server.base_url)
    gone, unknown = done.complaints.splitlines()
    assert gone.endswith("no longer has this conversation; ask again to start a new one")
    assert one in unknown
    assert done.output.count("Orlan") == 3


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_question_whose_connection_breaks_is_asked_once(
    demo_server: Served, client: Client, has_arrived: bool
) -> None:
    """Whether it arrived is looked up in the conversation."""
    one = client.conversations.create(items=[{"role": "user", "content": TOLD}])["id"]
    with _SwallowingProxy(demo_server.base_url, passes=has_arrived) as proxy:
        done = Piped(["/open 1", ASKED], proxy.url)
        assert proxy.num_swallowed == 1
    assert (done.exit_code, done.complaints) == (0, "")
    assert "Orlan" in done.output.splitlines()[-1]
    assert len(client.conversations.tree(one)["data"]) == 2


class _SwallowingProxy(CuttingProxy):
    """Ends the first WebSocket at its first message, which it passes on or not."""

    def __init__(self, upstream_url: str, *, passes: bool) -> None:
        super().__init__(upstream_url, None)
        self.num_swallowed = 0
        self._passes = passes

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        is_socket = False
        with contextlib.suppress(OSError):  # closed
            while data := client.recv(65_536):
                if is_socket and not self.num_swallowed:
                    self.num_swallowed += 1
                    client.shutdown(socket.SHUT_RDWR)
                    if self._passes:
                        server.sendall(data)
                        return  # the answer will end it
                    break
                is_socket = is_socket or b"upgrade: websocket" in data.lower()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)


def test_an_answer_that_runs_is_followed(demo_server: Served, client: Client) -> None:
    one = client.conversations.create()["id"]
    with client.responses.stream(
        model="demo", input=LONG, conversation=one, temperature=0, max_output_tokens=200
    ) as stream:
        next(stream)
        done = Piped(["/open 1", "/branch"], demo_server.base_url)
        text = stream.final() and stream.text
    question, *answer, last = done.output.splitlines()
    assert question == f"› {LONG}"
    assert "".join(answer).split() == "".join(text.splitlines()).split()
    assert last == f"*  1  {LONG}"


def test_in_a_terminal_a_conversation_is_kept(demo_server: Served, client: Client) -> None:
    """Under its first words, with the answer that Ctrl-C stopped; nothing writes ^C into it."""
    with Terminal(demo_server.base_url) as terminal:
        terminal.say(ENDLESS)
        terminal.read_until("\x1b[2K")  # the answer is being drawn
        terminal.press(CTRL_C)
        stopped = terminal.read_until(" tokens\x1b[0m")
        assert "stopped · " in stopped
        assert "^C" not in stopped
        assert terminal.leave(CTRL_C) == 0
        terminal.read_until("left; /open finds this conversation again")
    [one] = client.conversations.list()["data"]
    assert one["metadata"] == {"title": ENDLESS}
    [turn] = client.conversations.tree(one["id"], items="path")["data"]
    output: Any = turn["output"]
    assert output["content"][0]["text"]
    with Terminal(demo_server.base_url) as terminal:
        terminal.say("/open")
        assert "  1  20" in COLOURS.sub("", terminal.read_until(ENDLESS))
        terminal.say("/open 1")
        terminal.read_until(output["content"][0]["text"][:8])
        assert terminal.leave(CTRL_C) == 0
