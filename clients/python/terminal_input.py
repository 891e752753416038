"""Reads messages, typed or piped, of one line or several, and lines typed during an answer.

one line \\              a backslash at the end continues the message on the next line
\"\"\"several
lines\"\"\"                from three quotes to three quotes
(pasted text)           as pasted, if the terminal supports it
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections import deque

with contextlib.suppress(ImportError):  # line editing and history for `input`, if available
    import readline  # noqa: F401

_QUOTES = '"""'
# \001 and \002 tell readline which characters have no width.
_PROMPT = "\n\001\033[1m\002› \001\033[0m\002"
_MORE = "\001\033[2m\002… \001\033[0m\002"


class Messages:
    """Reads messages.

    Args:
        is_interactive: input comes from a terminal.
    """

    def __init__(self, *, is_interactive: bool) -> None:
        self._is_interactive = is_interactive
        self._ahead: deque[str] = deque()

    def read(self) -> str | None:
        """The next message, stripped; None at the end of input and after Ctrl-C at the prompt."""
        try:
            return self._message(self._line(_PROMPT)).strip()
        except EOFError:
            if self._is_interactive:
                print()
            return None
        except KeyboardInterrupt:
            print()
            return None

    def poll(self, timeout_s: float) -> str | None:
        """Check for input during an answer: returns "/stop" if that was typed, else None; other
        lines are kept for `read`."""
        try:
            if not select.select([sys.stdin], [], [], timeout_s)[0]:
                return None
            line = os.read(sys.stdin.fileno(), 65_536).decode(errors="replace")
        except OSError:  # the terminal was closed
            return None
        if line.strip() == "/stop":
            return "/stop"
        self._ahead += line.splitlines()
        return None

    def _message(self, first: str) -> str:
        lines = [first]
        if first.lstrip().startswith(_QUOTES):
            lines = [first.lstrip().removeprefix(_QUOTES)]
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(self._line(_MORE))
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line(_MORE))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._ahead:
            return self._ahead.popleft()
        return input(prompt if self._is_interactive else "")
