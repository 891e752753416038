"""`penstock chat` as a process against the real server: piped, and at a pseudo-terminal where keys
are pressed."""

from __future__ import annotations

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
from pathlib import Path

import pytest

from penstock.clients.python.terminal_chat import choose_model

from ..system.processes import Served
from .cutting_proxy import CuttingProxy
from .real_server import KEY

# Takes the terminal as its own first, so that Ctrl-C there becomes a signal here. What is to be
# stopped takes all of the context, or it might be over before that.
CHAT = """
import fcntl, os, sys, termios, penstock.clients
from penstock.clients.python import responses_socket
from penstock.clients.python.resources import responses
def body_of(params, **asked):
    return body(params, **asked) | {"temperature": 0, "ignore_eos": "without end" in asked["input"]}
body = responses_socket.body_of
responses_socket.body_of = responses.body_of = body_of
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from penstock.clients.python.terminal_chat import run
url, key, model = (argument or None for argument in sys.argv[1:])
sys.exit(run(url, api_key=key, model=model))
"""
WITH_RETRIES = "model=model, retries=penstock.clients.RetryPolicy({}))"
_PATIENCE_S = 120.0
PROMPT = "› "
CTRL_C, CTRL_D = "\x03", "\x04"
TOLD, ASKED = "Hi, my name is Orlan.", "What is my name?"
ENDLESS = "Tell me a story without end."
LONG = "Tell me a long story about a lighthouse."
COLOURS = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def command(url: str, key: str = "", model: str = "", **options: bool) -> list[str]:
    code = CHAT.replace("model=model", f"model=model, **{options!r}") if options else CHAT
    return [sys.executable, "-c", code, url, key, model]


def started(
    url: str, key: str = "", *, cwd: Path | None = None, options: str = ""
) -> subprocess.Popen[str]:
    """A chat at pipes.

    Args:
        options: of its `RetryPolicy`.
    """
    program, flag, code, *arguments = command(url, key)
    code = code.replace("model=model)", WITH_RETRIES.format(options))
    return subprocess.Popen(
        [program, flag, code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=cwd,
    )  # fmt: skip


def pipe(
    lines: str, url: str, key: str = "", model: str = "", *, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, key, model),
        input=lines,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        cwd=cwd,
    )


class Terminal:
    """A pseudo-terminal with the chat in it."""

    def __init__(self, url: str, **options: bool) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command(url, **options), stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, wanted: str, timeout_s: float = _PATIENCE_S) -> str:
        """Output up to and with the text `wanted`."""
        deadline = time.monotonic() + timeout_s
        while wanted not in self._unread:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._ours], [], [], left_s)
            assert ready, f"no {wanted!r} in {self._unread!r}"
            self._unread += self._decoder.decode(os.read(self._ours, 65_536))
        seen, _, self._unread = self._unread.partition(wanted)
        return seen + wanted

    def say(self, text: str) -> None:
        """Types a line at the prompt."""
        self.read_until(PROMPT)
        self.press(text + "\n")

    def ask(self, text: str) -> str:
        """What is printed until an answer's last line, without colours."""
        self.say(text)
        return COLOURS.sub("", self.read_until(" tokens\x1b[0m"))

    def leave(self, key: str) -> int:
        """Presses a key at the prompt until the chat ends; returns its exit code.

        Once may be too few: CPython's readline misses a signal that comes in the instant between
        printing the prompt and waiting for keys.
        """
        self.read_until(PROMPT)
        for _ in range(10):
            self.press(key)
            # It ends its line when it has heard; a second Ctrl-C would kill it on its way out.
            with contextlib.suppress(AssertionError):
                self.read_until("\n", timeout_s=5)
                return self._process.wait(_PATIENCE_S)
        raise AssertionError("the chat does not end")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(real_server: Served) -> Iterator[Terminal]:
    opened = Terminal(real_server.base_url)
    yield opened
    opened.close()


def test_turns_from_a_pipe(real_server: Served) -> None:
    """The server remembers until `/new`."""
    done = pipe(f"{TOLD}\n\n{ASKED}\n/new\n{ASKED}\n", real_server.base_url)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first
    assert "Orlan" in second
    assert "Orlan" not in third


def test_no_newline_at_the_end_and_quit(real_server: Served) -> None:
    assert "Orlan" in pipe(TOLD, real_server.base_url).stdout
    done = pipe(f"{TOLD}\n/quit\n{ASKED}\n", real_server.base_url + "/v1/")
    assert done.stdout.count("\n") == 1


def test_messages_of_several_lines(real_server: Served, tmp_path: Path) -> None:
    lines = f'"""{TOLD}\n\nSecond"""\nHow\\\nare you?\n/save chat.md\n'
    done = pipe(lines, real_server.base_url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = (tmp_path / "chat.md").read_text()
    assert f"> {TOLD}\n>\n> Second\n\n" in saved
    assert "> How\n> are you?\n\n" in saved


def test_retry_branch_and_save(real_server: Served, tmp_path: Path) -> None:
    lines = (
        f"/retry\n{TOLD}\n{ASKED}\n/retry\n/branch 0\n{ASKED}\n/branch\n/branch 3\n/branch 9\n"
        "/branch x\n/save a.md\n/save a.md\n/stop\n/resume\n/nonsense\n"
    )
    done = pipe(lines, real_server.base_url, cwd=tmp_path)
    assert done.returncode == 0
    answers, outline = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert ["Orlan" in answer for answer in answers] == [True, True, True, False]
    assert outline == [
        f"   1  {TOLD}", f"   2  {ASKED}", f"   3  {ASKED} (after 1)", f"*  4  {ASKED} (after 0)",
    ]  # fmt: skip
    saved = (tmp_path / "a.md").read_text()
    assert saved == (
        f"# A conversation with demo\n\n> {TOLD}\n\n{answers[0]}\n\n> {ASKED}\n\n{answers[2]}\n"
    )
    complaints = [line.removeprefix("penstock chat: ") for line in done.stderr.splitlines()]
    assert complaints == [
        "nothing was asked yet",
        "there is no turn 9; there are 4",
        "'x' is not the number of a turn",
        "cannot write a.md: File exists",
        "no answer was lost",
        "no command /nonsense; /help lists them",
    ]


def test_a_lost_conversation(real_server: Served, keyed_server: Served) -> None:
    """The server that answers in the end does not know what another one was told."""
    with CuttingProxy(real_server.base_url, None) as proxy, started(proxy.url, KEY) as chat:
        assert chat.stdin
        assert chat.stdout
        chat.stdin.write(f"{TOLD}\n/branch\n")
        chat.stdin.flush()
        assert "Orlan" in chat.stdout.readline()
        assert chat.stdout.readline().startswith("*  1")
        proxy.upstream_url = keyed_server.base_url
        proxy.cut_all()
        output, complaints = chat.communicate(f"{ASKED}\n{ASKED}\n", timeout=_PATIENCE_S)
    assert output.count("\n") == 1
    assert "Orlan" not in output
    assert "no longer has this conversation" in complaints


def test_an_answer_that_was_lost_for_good_is_resumed(real_server: Served, tmp_path: Path) -> None:
    with (
        CuttingProxy(real_server.base_url, None, 5, 0) as proxy,
        started(proxy.url, cwd=tmp_path, options="max_resumes=1") as chat,
    ):
        assert chat.stdin
        assert chat.stderr
        chat.stdin.write(f"{LONG}\n")
        chat.stdin.flush()
        assert chat.stderr.readline().endswith("; /resume goes on with the answer\n")
        proxy.cut_behind(None)
        output, complaints = chat.communicate("/resume\n/save a.md\n", timeout=_PATIENCE_S)
    assert complaints == ""
    first, rest = output.split("\n", 1)
    saved = (tmp_path / "a.md").read_text()
    assert first
    assert saved.rstrip() == f"# A conversation with demo\n\n> {LONG}\n\n{first}{rest}".rstrip()


def test_a_full_context(real_server: Served) -> None:
    full = "word " * 3000
    done = pipe(f"{TOLD}\n{full}\n/new\n{full}\n{TOLD}\n", real_server.base_url)
    assert done.stdout.count("Orlan") == 2
    first, second = done.stderr.splitlines()
    assert first.endswith("the model's context of 2048 tokens; /new starts a new conversation")
    assert second.endswith("the model's context of 2048 tokens")
    assert done.returncode == 1


def test_no_server() -> None:
    with socket.socket() as holder:  # of a port, at which nobody listens
        holder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        done = pipe("hi\n", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"penstock chat: cannot reach {url}: connection refused; is `penstock serve` running?\n"
    )


def test_key_and_model(keyed_server: Served) -> None:
    url = keyed_server.base_url
    assert "refused (HTTP 401)" in pipe("hi\n", url).stderr
    assert "refused (HTTP 401)" in pipe("hi\n", url, "sk-wrong").stderr
    assert "Orlan" in pipe(f"{TOLD}\n", url, KEY, "demo").stdout
    wrong = pipe("hi\n", url, KEY, "other")
    assert wrong.returncode == 1
    assert "does not offer the model 'other' (it offers: demo)" in wrong.stderr


def test_a_connection_that_is_cut_again_and_again_does_not_show(real_server: Served) -> None:
    whole = pipe(f"{TOLD}\n{ASKED}\n", real_server.base_url)
    with CuttingProxy(real_server.base_url, None, 3) as proxy:  # the first one lists the models
        done = pipe(f"{TOLD}\n{ASKED}\n", proxy.url)
        assert proxy.num_cut > 4
    assert (done.stdout.count("Orlan"), done.stderr) == (whole.stdout.count("Orlan"), "")


def test_in_a_terminal(terminal: Terminal, real_server: Served) -> None:
    greeting = terminal.read_until("/help for help")
    assert f"demo at {real_server.base_url}" in greeting
    answer = terminal.ask(TOLD)
    assert "Orlan" in answer
    assert re.search(r"first token after [\d.]+ s · \d+ tokens$", answer)
    assert "Orlan" in terminal.ask(ASKED)
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


def test_what_is_typed_ahead_is_asked_next(terminal: Terminal) -> None:
    terminal.say(TOLD + "\n" + ASKED)
    terminal.read_until(" tokens\x1b[0m")
    assert "Orlan" in COLOURS.sub("", terminal.read_until(" tokens\x1b[0m"))


def test_a_connection_that_is_lost_in_the_middle(real_server: Served) -> None:
    with CuttingProxy(real_server.base_url, None) as proxy:
        opened = Terminal(proxy.url)
        try:
            opened.say(LONG)
            opened.read_until("\x1b[2K")
            proxy.cut_all()
            assert "stopped · " not in opened.read_until(" tokens\x1b[0m")
        finally:
            opened.close()


def test_choosing_a_model() -> None:
    assert choose_model(["a", "b"], None) == "a"
    with pytest.raises(ValueError, match="offers: none"):
        choose_model([], None)
