"""`penstock chat` as a process: piped, and at a pseudo-terminal where keys are pressed.

`PENSTOCK_TEST_URL` adds a run of the main flow against the server at that address.
"""

import codecs
import contextlib
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.clients.python.responses_socket import ClientError, Endpoint
from penstock.clients.python.terminal_chat import Timing, choose_model

from .stub_server import MODEL, StubServer, running

# Takes the terminal as its own first, so that Ctrl-C there becomes a signal here.
CHAT = """
import fcntl, os, sys, termios
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from penstock.clients.python.terminal_chat import run
url, key, model = (argument or None for argument in sys.argv[1:])
sys.exit(run(url, api_key=key, model=model))
"""
PROMPT = "› "
CTRL_C, CTRL_D = "\x03", "\x04"


def command(url: str, key: str = "", model: str = "") -> list[str]:
    return [sys.executable, "-c", CHAT, url, key, model]


def pipe(lines: str, url: str, key: str = "", model: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, key, model), input=lines, capture_output=True, text=True, timeout=60
    )


class Terminal:
    """A pseudo-terminal with the chat in it."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command(url), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, wanted: str, timeout_s: float = 60.0) -> str:
        """Output up to and with the text `wanted`."""
        deadline = time.monotonic() + timeout_s
        while wanted not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"no {wanted!r} in {self._unread!r}"
            self._unread += self._decoder.decode(os.read(self._ours, 65_536))
        seen, _, self._unread = self._unread.partition(wanted)
        return seen + wanted

    def ask(self, text: str) -> str:
        """Types a line at the prompt; returns what is printed until its last line."""
        self.read_until(PROMPT)
        self.press(text + "\n")
        return self.read_until(" tokens\x1b[0m")

    def leave(self, key: str) -> int:
        """Presses a key at the prompt until the chat ends; returns its exit code.

        Once may be too few: CPython's readline misses a signal that comes in the instant between
        printing the prompt and waiting for keys.
        """
        self.read_until(PROMPT)
        for _ in range(10):
            self.press(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(3)
        raise AssertionError("the chat does not end")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(stub: StubServer) -> Iterator[Terminal]:
    opened = Terminal(stub.base_url)
    yield opened
    opened.close()


@pytest.fixture(params=["stub", *filter(None, [os.environ.get("PENSTOCK_TEST_URL")])])
def any_server(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "stub":
        yield request.param
        return
    with running(StubServer()) as stub:
        yield stub.base_url


def test_main_flow(any_server: str) -> None:
    """Turns from a pipe; the server remembers until `/new`."""
    told, ask = "My name is Ada.", "What is my name?"
    done = pipe(f"{told}\n\n{ask}\n/new\n{ask}\n", any_server)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first
    assert "Ada" in second
    assert "Ada" not in third


def test_no_newline_at_the_end_and_quit(stub: StubServer) -> None:
    assert pipe("hello", stub.base_url).stdout == "You said: hello\n"
    assert pipe("one\n/quit\ntwo\n", stub.base_url + "/v1/").stdout == "You said: one\n"


def test_unicode_comes_through_and_control_characters_do_not(stub: StubServer) -> None:
    done = pipe("Zoë 👋🏽 日本\nescape\n", stub.base_url)
    assert done.stdout.splitlines() == ["You said: Zoë 👋🏽 日本", "[31mred[0m 5n ]0;title end"]


@pytest.mark.parametrize(
    ("order", "output", "complaint"),
    [
        ("fail", "You said:", "The engine went away."),
        ("refuse", "", "The queue is full."),
        ("drop", "Half of an", "the connection to the server broke"),
        ("/nonsense", "", "no command /nonsense"),
    ],
)
def test_a_failed_turn_is_told_and_the_next_goes_on(
    stub: StubServer, order: str, output: str, complaint: str
) -> None:
    done = pipe(f"{order}\nhi\n", stub.base_url)
    assert done.stdout == (f"{output}\n" if output else "") + "You said: hi\n"
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == (0 if order.startswith("/") else 1)


def test_a_lost_conversation(stub: StubServer) -> None:
    chat = subprocess.Popen(
        command(stub.base_url), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with chat:
        assert chat.stdin
        assert chat.stdout
        chat.stdin.write("one\n")
        chat.stdin.flush()
        assert chat.stdout.readline() == "You said: one\n"
        time.sleep(0.2)  # the terminal event follows the last text
        stub.forget()
        output, complaints = chat.communicate("two\nthree\n", timeout=30)
    assert output == "You said: three\n"
    assert "no longer has this conversation" in complaints


def test_a_full_context(stub: StubServer) -> None:
    done = pipe("one\nfull\n/new\nfull\n", stub.base_url)
    assert done.stdout == "You said: one\nYou said: full\n"
    assert done.stderr == (
        "penstock chat: The prompt has 2092 tokens; /new starts a new conversation\n"
    )


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    done = pipe("hi\n", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"penstock chat: cannot reach {url}: connection refused; is `penstock serve` running?\n"
    )


def test_key_and_model(keyed_stub: StubServer) -> None:
    url = keyed_stub.base_url
    assert "asks for an API key" in pipe("hi\n", url).stderr
    assert "did not accept this API key" in pipe("hi\n", url, "sk-wrong").stderr
    assert pipe("hi\n", url, "sk-right", MODEL).stdout == "You said: hi\n"
    wrong = pipe("hi\n", url, "sk-right", "other")
    assert wrong.returncode == 1
    assert "does not offer the model 'other' (it offers: stub-model)" in wrong.stderr


def test_in_a_terminal(terminal: Terminal, stub: StubServer) -> None:
    greeting = terminal.read_until("/help for help")
    assert f"{MODEL} at {stub.base_url}" in greeting
    answer = terminal.ask("My name is Ada.")
    assert "You said: My name is Ada." in answer
    assert re.search(r"\x1b\[2m[\d.]+ tokens/s · first token after [\d.]+ s · \d+", answer)

    terminal.read_until(PROMPT)
    terminal.press("slow one\n")
    terminal.read_until("Line 2 of")
    terminal.press(CTRL_C)
    assert "stopped · " in terminal.read_until(" tokens\x1b[0m")
    assert stub.received[-1] == {"type": "penstock.cancel", "response_id": "resp_2"}

    assert "Your name is Ada." in terminal.ask("What is my name?")
    assert terminal.leave(CTRL_C) == 0


def test_a_pause_is_told_and_taken_back(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.press("pause please\n")
    note = " [paused: the server is short of memory]"
    assert terminal.read_until(note).endswith(f"You said:\x1b[2m{note}")
    assert "\x1b[K pause please" in terminal.read_until(" tokens\x1b[0m")


def test_ctrl_d_leaves_and_an_idle_connection_is_reopened(
    terminal: Terminal, stub: StubServer
) -> None:
    terminal.read_until(PROMPT)
    terminal.press("drop\n")
    terminal.read_until("broke")
    assert "You said: hi" in terminal.ask("hi")
    assert terminal.leave(CTRL_D) == 0


@pytest.mark.parametrize("url", ["ftp://host", "http://", "", "http://[", "http://h:port"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ClientError, match="not the address of a server"):
        Endpoint.parse(url, None)


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/below/", "https://h/below"),
    ],
)
def test_addresses(url: str, base_url: str) -> None:
    assert Endpoint.parse(url, None).base_url == base_url


def test_timing_and_choice() -> None:
    assert Timing(0.0).summary(0) == "0 tokens"
    assert Timing(1.0, 1.5, 3.5).summary(21) == (
        "10.0 tokens/s · first token after 0.50 s · 21 tokens"
    )
    assert choose_model(["a", "b"], None) == "a"
    with pytest.raises(ClientError, match="offers: none"):
        choose_model([], None)
