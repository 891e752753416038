"""The terminal chat as tests use it: piped into, in this process, or at a pseudo-terminal.

Run as `python -m tests.clients.terminal URL [OPTION …]`, it is the chat in a terminal of its own.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from penstock.clients.python import responses_socket, terminal_chat
from penstock.clients.python.parameters import body_of
from penstock.clients.python.resources import responses

TOLD, ASKED = "Hi, my name is Orlan.", "What is my name?"
ENDLESS = "Tell me a story without end."  # its answer ends when it is stopped
LONG = "Tell me a long story about a lighthouse."
PROMPT = "› "
CTRL_C, CTRL_D = "\x03", "\x04"
COLOURS = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
_PATIENCE_S = 120.0
_MAX_TOKENS = 400


@contextlib.contextmanager
def plain_answers() -> Iterator[None]:
    """The chat asks for the likeliest answers, which end, but for `ENDLESS`."""

    def plain_body_of(params: Any, **asked: Any) -> dict[str, Any]:
        is_endless = asked["input"] == ENDLESS
        limit = {"ignore_eos": True} if is_endless else {"max_output_tokens": _MAX_TOKENS}
        return {**body_of(params, **asked), "temperature": 0, **limit}

    with (
        mock.patch.object(responses, "body_of", plain_body_of),
        mock.patch.object(responses_socket, "body_of", plain_body_of),
    ):
        yield


class Piped:
    """A chat in this process that has come to its end.

    Args:
        lines: what is piped into it; each is made when the chat asks for it.
        options: of `terminal_chat.run`.
    """

    def __init__(self, lines: Iterable[str], url: str, **options: Any) -> None:
        self._output, self._complaints = io.StringIO(), io.StringIO()
        with (
            plain_answers(),
            mock.patch.object(sys, "stdin", _Lines(lines)),
            contextlib.redirect_stdout(self._output),
            contextlib.redirect_stderr(self._complaints),
        ):
            self.exit_code = terminal_chat.run(url, **options)

    @property
    def output(self) -> str:
        return self._output.getvalue()

    @property
    def complaints(self) -> str:
        return self._complaints.getvalue()


class _Lines(io.TextIOBase):
    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    def readline(self, _size: int | None = -1, /) -> str:
        return f"{line}\n" if (line := next(self._lines, None)) is not None else ""


class Terminal:
    """A pseudo-terminal with the chat in it, in a process of its own.

    Args:
        options: `has_tools` and `thinks`, as far as they are wanted.
    """

    def __init__(self, url: str, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, *options],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, wanted: str) -> str:
        """Output up to and with the text `wanted`."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while wanted not in self._unread:
            left_s = max(0.0, deadline_s - time.monotonic())
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
        """Presses a key at the prompt; returns the chat's exit code.

        CPython's readline misses a signal that comes in the instant between printing the prompt and
        waiting for keys, until a line ends. So after Ctrl-C a line ends, which alone is a line
        without a message.
        """
        self.read_until(PROMPT)
        self.press(key + "\n" if key == CTRL_C else key)
        return self._process.wait(_PATIENCE_S)


if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C there becomes a signal here
    with plain_answers():
        wanted = dict.fromkeys(sys.argv[2:], True)
        sys.exit(terminal_chat.run(sys.argv[1], **wanted))  # type: ignore[arg-type]
