"""`penstock chat` against the real server: piped, and at a pseudo-terminal where keys are pressed.

The command itself is in `tests/system/test_clients.py`.
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.clients import AsyncClient, RetryPolicy
from penstock.clients.python.parameters import body_of
from penstock.clients.python.terminal_chat import LoopThread, TerminalChat, choose_model, ending
from penstock.clients.python.terminal_screen import Screen

from ..system.processes import END_S, NUM_CONTEXT_TOKENS, Served
from . import terminal as terminal_of_tests
from .cutting_proxy import CuttingProxy
from .terminal import ASKED, COLOURS, CTRL_C, CTRL_D, ENDLESS, LONG, TOLD, Piped, Terminal


class _HoldingProxy(CuttingProxy):
    """Keeps each request that steers until its event of `held` is set."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__(upstream_url, None)
        self.held: queue.Queue[threading.Event] = queue.Queue()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := client.recv(65_536):
                if b"/steer HTTP" in data:
                    may_go = threading.Event()
                    self.held.put(may_go)
                    may_go.wait(END_S)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)


@pytest.fixture
def terminal(demo_server: Served) -> Iterator[Terminal]:
    with Terminal(demo_server.base_url) as opened:
        yield opened


def test_turns_from_a_pipe(demo_server: Served) -> None:
    """The server remembers until `/new`."""
    done = Piped([TOLD, "", ASKED, "/new", ASKED, "/quit", ASKED], f"{demo_server.base_url}/v1/")
    assert (done.exit_code, done.complaints) == (0, "")
    first, second, third = done.output.splitlines()
    assert first
    assert "Orlan" in second
    assert "Orlan" not in third


@pytest.mark.parametrize("has_tools", [False, True])
def test_answers_are_sampled_as_the_server_says(
    demo_server: Served, monkeypatch: pytest.MonkeyPatch, has_tools: bool
) -> None:
    """By the model's own defaults, or those that suit most models."""
    [card] = httpx.get(f"{demo_server.base_url}/v1/models", timeout=END_S).json()["data"]
    assert card["chat_sampling"] == {"temperature": 0.2, "top_p": 0.9}
    asked: list[dict[str, Any]] = []

    def noted(params: Any, **more: Any) -> dict[str, Any]:
        asked.append(body_of(params, **more))
        return asked[-1]

    monkeypatch.setattr(terminal_of_tests, "body_of", noted)
    assert Piped([TOLD], demo_server.base_url, has_tools=has_tools).exit_code == 0
    assert asked
    for body in asked:
        assert (body["temperature"], body["top_p"], "min_p" in body) == (0.2, 0.9, False)


def test_messages_of_several_lines(
    demo_server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f'"""{TOLD}', "", 'Second"""', "How\\", "are you?", "/save chat.md"]
    done = Piped(lines, demo_server.base_url)
    assert done.exit_code == 0, done.complaints
    saved = (tmp_path / "chat.md").read_text()
    assert f"> {TOLD}\n>\n> Second\n\n" in saved
    assert "> How\n> are you?\n\n" in saved


def test_retry_branch_and_save(
    demo_server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["/retry", TOLD, ASKED, "/retry", "/branch 0", ASKED, "/branch", "/branch 3"]
    lines += ["/branch 9", "/branch x", "/save a.md", "/save a.md", "/stop", "/resume", "/nonsense"]
    done = Piped(lines, demo_server.base_url)
    assert done.exit_code == 0
    answers, outline = done.output.splitlines()[:4], done.output.splitlines()[4:]
    assert ["Orlan" in answer for answer in answers] == [True, True, True, False]
    assert outline == [
        f"   1  {TOLD}", f"   2  {ASKED}", f"   3  {ASKED} (after 1)", f"*  4  {ASKED} (after 0)",
    ]  # fmt: skip
    saved = (tmp_path / "a.md").read_text()
    assert saved == (
        f"# A conversation with demo\n\n> {TOLD}\n\n{answers[0]}\n\n> {ASKED}\n\n{answers[2]}\n"
    )
    complaints = [line.removeprefix("penstock chat: ") for line in done.complaints.splitlines()]
    assert complaints == [
        "nothing was asked yet",
        "there is no turn 9; there are 4",
        "'x' is not the number of a turn",
        "cannot write a.md: File exists",
        "no answer was lost",
        "no command /nonsense; /help lists them",
    ]


def test_an_answer_that_was_lost_for_good_is_resumed(
    demo_server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with CuttingProxy(demo_server.base_url, None, 5, 0) as proxy:

        def lines() -> Iterator[str]:
            yield LONG
            proxy.cut_behind(None)
            yield "/resume"
            yield "/save a.md"

        done = Piped(lines(), proxy.url, retries=RetryPolicy(max_resumes=1))
    (complaint,) = done.complaints.splitlines()
    assert complaint.endswith("; /resume goes on with the answer")
    first, rest = done.output.split("\n", 1)
    assert first
    saved = (tmp_path / "a.md").read_text()
    assert saved.rstrip() == f"# A conversation with demo\n\n> {LONG}\n\n{first}{rest}".rstrip()


def test_a_full_context(demo_server: Served) -> None:
    full = "word " * NUM_CONTEXT_TOKENS
    done = Piped([TOLD, full, "/new", full, TOLD], demo_server.base_url)
    assert done.output.count("Orlan") == 2
    first, second = done.complaints.splitlines()
    context = f"maximum context length is {NUM_CONTEXT_TOKENS} tokens"
    assert context in first
    assert first.endswith("; /new starts a new conversation")
    assert context in second
    assert not second.endswith("; /new starts a new conversation")
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("status", "reason", "num_tokens", "said"),
    [
        ("completed", None, 9, ""),
        ("cancelled", None, 9, "stopped"),
        ("incomplete", "max_output_tokens", 8, "cut short (length limit)"),
        ("incomplete", "max_output_tokens", 9, "cut short: the context of 9 tokens is full; /new"),
        ("incomplete", "grammar", 9, "cut short (grammar)"),
        ("incomplete", None, 9, "cut short (for no reason)"),
    ],
)
def test_how_an_answer_ends(status: str, reason: str | None, num_tokens: int, said: str) -> None:
    details = None if reason is None else {"reason": reason}
    usage = {"total_tokens": num_tokens}
    response: Any = {"status": status, "incomplete_details": details, "usage": usage}
    assert ending(response, 9).startswith(said)
    assert bool(ending(response, None)) == bool(said)


def test_no_server() -> None:
    with socket.socket() as holder:  # of a port, at which nobody listens
        holder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        done = Piped(["hi"], url)
    assert (done.exit_code, done.output) == (1, "")
    assert done.complaints == (
        f"penstock chat: cannot reach {url}: connection refused; is `penstock serve` running?\n"
    )


def test_a_connection_that_is_cut_again_and_again_does_not_show(demo_server: Served) -> None:
    whole = Piped([TOLD, ASKED], demo_server.base_url)
    with CuttingProxy(demo_server.base_url, None, 3) as proxy:  # the first one lists the models
        done = Piped([TOLD, ASKED], proxy.url)
        assert proxy.num_cut > 4
    assert (done.output.count("Orlan"), done.complaints) == (whole.output.count("Orlan"), "")


def test_in_a_terminal(terminal: Terminal, demo_server: Served) -> None:
    greeting = terminal.read_until("/help for help")
    assert f"demo at {demo_server.base_url}" in greeting
    terminal.say(f"{TOLD}\n{ASKED}")  # what is typed ahead is asked next
    answer = COLOURS.sub("", terminal.read_until(" tokens\x1b[0m"))
    assert "Orlan" in answer
    assert re.search(r"first token after [\d.]+ s · \d+ tokens$", answer)
    assert "Orlan" in COLOURS.sub("", terminal.read_until(" tokens\x1b[0m"))
    terminal.say("/help")
    terminal.read_until("/branch [N]")
    assert terminal.leave(CTRL_D) == 0


@pytest.mark.parametrize("stop", [CTRL_C, "/stop\n"])
def test_stopping_an_answer_and_going_on(terminal: Terminal, stop: str) -> None:
    terminal.ask(TOLD)
    terminal.say(ENDLESS)
    terminal.read_until("\x1b[2K")  # the answer is being drawn
    terminal.press(stop)
    assert "stopped · " in terminal.read_until(" tokens\x1b[0m")
    terminal.ask(ASKED)
    terminal.say("/branch")
    assert "*  3  " in COLOURS.sub("", terminal.read_until(ASKED))  # it came after the cut one
    assert terminal.leave(CTRL_C) == 0
    assert "left; /open finds this conversation again" in terminal.read_until("again")


@pytest.mark.exhaustive
def test_a_message_interrupts_the_answer(terminal: Terminal) -> None:
    terminal.say(ENDLESS)
    terminal.read_until("\x1b[2K")  # the answer is being drawn
    terminal.press(f"{TOLD}\n")
    terminal.read_until("interrupted")
    terminal.read_until("\x1b[2K")
    terminal.press(CTRL_C)
    assert "stopped · " in terminal.read_until(" tokens\x1b[0m")
    terminal.say("/branch")
    assert f"*  2  {TOLD}" in COLOURS.sub("", terminal.read_until(TOLD))
    assert terminal.leave(CTRL_C) == 0


@pytest.mark.exhaustive
def test_a_message_that_comes_too_late_is_the_next_one(demo_server: Served) -> None:
    """The server gets it when the answer has already ended for the one before."""
    with _HoldingProxy(demo_server.base_url) as proxy, Terminal(proxy.url) as terminal:
        terminal.say(ENDLESS)
        terminal.read_until("\x1b[2K")  # the answer is being drawn
        terminal.press(f"{TOLD}\n")
        first = proxy.held.get(timeout=END_S)
        terminal.press(f"{ASKED}\n")
        late = proxy.held.get(timeout=END_S)
        first.set()
        terminal.read_until("interrupted")
        terminal.read_until("\x1b[2K")
        late.set()
        terminal.press(CTRL_C)
        assert "stopped · " in terminal.read_until(" tokens\x1b[0m")
        terminal.say("/branch")
        outline = COLOURS.sub("", terminal.read_until(f"3  {ASKED}"))
        assert f"2  {TOLD}\r\n" in outline
        assert terminal.leave(CTRL_C) == 0


def test_a_message_that_nobody_answers_is_the_next_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "no room", "code": "successor_creation_failed"}
    told = [
        {"id": "steer_1", "status": "committed", "successor_id": "resp_2"},
        {"id": "steer_2", "status": "failed", "error": error},
    ]
    response: Any = {"id": "resp_1", "penstock": {"steers": told}}

    class Stream:
        async def steer(self, message: str) -> dict[str, str]:
            return {"id": message}

    with LoopThread() as loop:
        chat = TerminalChat(AsyncClient("http://127.0.0.1:1"), Screen(), loop)
        stream: Any = Stream()
        for message in ("steer_1", "steer_2"):
            loop.start(chat._send_steer(stream, message)).result(END_S)
        loop.start(chat._give_back(response)).result(END_S)
        assert chat._messages.read() == "steer_2"
    assert "not interrupted: no room" in capsys.readouterr().err
    assert [each.text for each in chat._steered] == ["steer_1"]


def test_a_connection_that_is_lost_in_the_middle(demo_server: Served) -> None:
    with CuttingProxy(demo_server.base_url, None) as proxy, Terminal(proxy.url) as terminal:
        terminal.say(LONG)
        terminal.read_until("\x1b[2K")
        proxy.cut_all()
        assert "stopped · " not in terminal.read_until(" tokens\x1b[0m")


def test_choosing_a_model() -> None:
    assert choose_model(["a", "b"], None) == "a"
    with pytest.raises(ValueError, match="offers: none"):
        choose_model([], None)
