"""Prints streaming answers, notes and errors, and reads messages.

On a terminal an answer is rendered as Markdown. Complete blocks are printed once; only the last one
is redrawn while it grows, so that a long answer scrolls like any text. A file or a pipe gets plain
text.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

with contextlib.suppress(ImportError):  # line editing and history for `input`, if available
    import readline  # noqa: F401
with contextlib.suppress(ImportError):  # Windows
    import termios

# A model must not steer the terminal: control characters other than newline and tab are dropped.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Nor make a text look like another one. These are shown by their numbers: bidirectional controls,
# characters of no width, tags; half characters, which no terminal can be sent, as U+FFFD.
_HIDDEN = re.compile(
    "[\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
_BLACK_FLAG = "\U0001f3f4"
_TAG = re.compile("[\U000e0020-\U000e007f]")
# Scripts that write without spaces mark the ends of words by U+200B.
_SPACELESS = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff]")
# Their letters never join, so a joiner between them is there to hide.
_JOINLESS = ("LATIN", "GREEK", "CYRILLIC", "FULLWIDTH LATIN")
_QUOTES = '"""'
# \001 and \002 tell readline which characters have no width.
_PROMPT = "\n\001\033[1m\002› \001\033[0m\002"
_MORE = "\001\033[2m\002… \001\033[0m\002"
_FENCE = re.compile(r" {0,3}(```|~~~)")


class Cleaner:
    """Makes text that comes in pieces safe to print, whatever a model, a server or a file's name
    puts into it. Joiners and tags stay where writing needs them."""

    def __init__(self) -> None:
        self._before = ""  # the character before this piece
        self._is_in_flag = False

    def feed(self, text: str) -> str:
        text = _CONTROL.sub("", text)
        shown = _HIDDEN.sub(self._show, text)
        if text:
            self._is_in_flag = self._ends_in_flag(text, len(text))
            self._before = text[-1]
        return shown

    def _show(self, match: re.Match[str]) -> str:
        character, start = match[0], match.start()
        before = match.string[start - 1] if start else self._before
        if "\ud800" <= character <= "\udfff":
            return "\ufffd"
        if character == "\u200b" and _SPACELESS.match(before):
            return character
        if character in "\u180e\u200c\u200d" and _joins(before):
            return character
        if _TAG.match(character) and self._ends_in_flag(match.string, start):
            return character
        return f"<U+{ord(character):04X}>"

    def _ends_in_flag(self, text: str, end: int) -> bool:
        while end and _TAG.match(text[end - 1]):
            end -= 1
        return text[end - 1] == _BLACK_FLAG if end else self._is_in_flag


def _joins(character: str) -> bool:
    """Whether a joiner makes sense after this character: a mark, an emoji, or a letter of a script
    that joins."""
    category = unicodedata.category(character) if character else "Cn"
    if category.startswith("L"):
        return not unicodedata.name(character, "LATIN").startswith(_JOINLESS)
    return category.startswith("M") or category == "So" or "\U0001f3fb" <= character <= "\U0001f3ff"


def clean(text: str) -> str:
    return Cleaner().feed(text)


def parse(text: str) -> Markdown:
    """Markdown to print: links with their destinations, and clean where entities were."""
    markdown = Markdown(text, hyperlinks=False)
    for token in markdown.parsed:
        for part in (token, *(token.children or ())):
            part.content = clean(part.content)
            part.attrs = {name: _clean_value(value) for name, value in part.attrs.items()}
    return markdown


def _clean_value(value: str | int | float) -> str | int | float:
    return clean(value) if isinstance(value, str) else value


@dataclass(slots=True)
class Timing:
    """When the pieces of one answer arrived, in seconds of the monotonic clock."""

    sent_s: float
    first_s: float | None = None
    last_s: float = 0.0

    def note_piece(self) -> None:
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s

    def summary(self, num_tokens: int) -> str:
        if self.first_s is None:
            return f"{num_tokens} tokens"
        parts = [f"first token after {self.first_s - self.sent_s:.2f} s", f"{num_tokens} tokens"]
        elapsed_s = self.last_s - self.first_s
        if num_tokens > 1 and elapsed_s > 0.005:
            parts.insert(0, f"{(num_tokens - 1) / elapsed_s:.1f} tokens/s")
        return " · ".join(parts)


class Screen:
    """Prints to the terminal, or to a file or pipe."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
        self.is_styled = self.console.is_terminal and not self.console.is_dumb_terminal

    def answer(self) -> Answer:
        """A printer for the next answer."""
        return MarkdownAnswer(self.console) if self.is_styled else Answer()

    def say(self, message: str) -> None:
        """Print a note, dimmed; nothing if the output is a file or a pipe."""
        if self.is_styled:
            self.console.print(clean(message), style="dim")

    def show(self, line: str) -> None:
        self.console.print(clean(line))

    def complain(self, message: str) -> None:
        print(f"penstock chat: {clean(message)}", file=sys.stderr, flush=True)


class Answer:
    """Prints an answer as plain text."""

    def __init__(self) -> None:
        self._has_text = False
        self._cleaner = Cleaner()

    def write(self, text: str) -> None:
        self._has_text = True
        print(self._cleaner.feed(text), end="", flush=True)

    def note(self, remark: str) -> None:
        """Show why no text arrives; removed by the next text, or an empty remark."""

    def end(self) -> None:
        if self._has_text:
            print(flush=True)


class MarkdownAnswer(Answer):
    """Prints an answer as Markdown, redrawn while it grows."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._tail = ""  # the incomplete blocks
        self._remark = ""
        self._has_block = False
        self._live: Live | None = None

    def write(self, text: str) -> None:
        piece = self._cleaner.feed(text)
        self._tail += piece
        self._remark = ""
        if "\n" in piece:
            done, self._tail = split_blocks(self._tail)
            if done:
                self._stop()
                self._print(done)
        self._draw()

    def note(self, remark: str) -> None:
        self._remark = clean(remark)
        self._draw()

    def end(self) -> None:
        self._stop()
        if self._tail.strip():
            self._print(self._tail)

    def _print(self, text: str) -> None:
        if self._has_block:
            self._console.print()
        self._has_block = True
        self._console.print(parse(text))

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=lambda: _LastLines(self._tail, self._remark, self._has_block),
                refresh_per_second=15,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class _LastLines:
    """The last lines of some Markdown that fit on the screen, and a remark below."""

    def __init__(self, text: str, remark: str, has_block_above: bool) -> None:
        self._text = text
        self._remark = remark
        self._has_block_above = has_block_above

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(parse(self._text), options) if self._text.strip() else []
        if lines and self._has_block_above:
            lines.insert(0, [])
        for line in lines[-max(1, options.size.height - 2) :]:
            yield from _line(line)
        if self._remark:
            style = console.get_style("dim")
            yield from _line([Segment(self._remark, style)])


def _line(segments: Iterable[Segment]) -> RenderResult:
    yield from segments
    yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown into complete blocks and the rest, at the last blank line outside a fenced
    block."""
    is_fenced, end, position = False, 0, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if _FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced and not line.strip() and line.endswith("\n"):
            end = position
    done = text[:end]
    return (done, text[end:]) if done.strip() else ("", text)


@contextlib.contextmanager
def quiet_keys(*, is_interactive: bool) -> Iterator[None]:
    """Keeps the terminal from writing ^C into an answer, whose redrawing counts its lines."""
    if not is_interactive or "termios" not in globals():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    changed = [*before]
    changed[3] &= ~termios.ECHOCTL
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class Input:
    """Reads messages, typed or piped, of one line or several, and lines typed during an answer.

    one line \\              a backslash at the end continues the message on the next line
    \"\"\"several
    lines\"\"\"                from three quotes to three quotes
    (pasted text)           as pasted, if the terminal supports it

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
        """Check for input during an answer: returns "/stop" if that was typed, or a message; other
        commands, and messages of which there may be more lines, are kept for `read`."""
        try:
            if not select.select([sys.stdin], [], [], timeout_s)[0]:
                return None
            line = os.read(sys.stdin.fileno(), 65_536).decode(errors="replace")
        except OSError:  # the terminal was closed
            return None
        said = line.strip()
        is_whole = not (said.startswith(("/", _QUOTES)) or said.endswith("\\")) and not self._ahead
        if said == "/stop" or is_whole:
            return said
        self._ahead += line.splitlines()
        return None

    def keep(self, message: str) -> None:
        """A message that `read` returns next."""
        self._ahead += message.splitlines()

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
