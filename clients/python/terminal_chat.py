"""`penstock chat`: a conversation with a server, in the terminal: turns, commands and Ctrl-C.

`client` talks to the server, `terminal_screen` prints.

Two threads: this one reads lines and waits, so that line editing and Ctrl-C work as usual; an event
loop in the other one keeps the connection alive between messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from .client import AsyncClient
from .errors import (
    AuthenticationError,
    PenstockError,
    RefusedError,
    TransportError,
    UnreachableError,
    raise_if_failed,
)
from .event_stream import EventStream
from .events import ResponseEvent
from .images import data_url
from .objects import Model, Response
from .operation import AsyncRunner
from .parameters import Messages
from .retries import RetryPolicy
from .terminal_screen import Screen, Timing, clean
from .terminal_tools import local_tools
from .tools import Tool
from .track import steers_of, successor_of
from .transcript import Transcript, Turn

with contextlib.suppress(ImportError):  # line editing and history for `input`, if available
    import readline  # noqa: F401

HELP = """\
TEXT           while an answer comes: interrupts it, and is answered
/stop          stop the answer under way (also Ctrl-C)
/retry         answer the last question again
/resume        continue an answer after all reconnection attempts failed
/branch [N]    continue from turn N (0: from the beginning); without N, list the turns
/image PATH    send an image with the next message
/save [FILE]   write the conversation to FILE as Markdown
/new           start a new conversation
/quit          leave (also Ctrl-D)
/help          this
A message of several lines: end a line with \\, or put it between \"\"\" and \"\"\"."""

_QUOTES = '"""'
# \001 and \002 tell readline which characters have no width.
_PROMPT = "\n\001\033[1m\002› \001\033[0m\002"
_MORE = "\001\033[2m\002… \001\033[0m\002"
_POLL_S = 0.05
_MAX_LINE_CHARS = 300  # of a thought, or what a tool gets and returns
_NOTICES = {
    "penstock.preempted": "[paused: the server is short of memory]",
    "penstock.resumed": "",
}


def run(
    base_url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    retries: RetryPolicy | None = None,
    has_tools: bool = False,
    thinks: bool = False,
) -> int:
    """Chats until the input ends; returns the exit code (1: no server, or a turn failed).

    Args:
        has_tools: the model may call the tools of `terminal_tools`.
        thinks: it is asked to think before it answers.
    """
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    screen = Screen()
    try:
        with LoopThread() as loop:
            client = AsyncClient(base_url, api_key=api_key, retries=retries)
            tools = local_tools() if has_tools else []
            return TerminalChat(client, screen, loop, tools=tools, thinks=thinks).run(model)
    except (PenstockError, ValueError) as error:
        screen.complain(str(error))
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def choose_model(offered: list[str], wanted: str | None) -> str:
    if wanted is None and offered:
        return offered[0]
    if wanted is None or wanted not in offered:
        names = ", ".join(offered) or "none"
        raise ValueError(f"the server does not offer the model {wanted!r} (it offers: {names})")
    return wanted


def ending(response: Response, context_len: int | None) -> str:
    """How an answer ended that did not end by itself; empty if it did.

    Args:
        context_len: of the model, in tokens; None if the server does not say.
    """
    if response["status"] == "cancelled":
        return "stopped"
    if response["status"] != "incomplete":
        return ""
    details, usage = response["incomplete_details"], response["usage"]
    reason = details["reason"] if details else "for no reason"
    if reason != "max_output_tokens":
        return f"cut short ({reason})"
    if usage and context_len is not None and usage["total_tokens"] >= context_len:
        full = f"the context of {context_len} tokens is full"
        return f"cut short: {full}; /new starts a new conversation"
    return "cut short (length limit)"


@dataclass(eq=False)
class _Steered:
    """A message for which the answer under way is to end.

    Attributes:
        steer_id: None until the server has it.
        is_told: that the server has it, or not.
    """

    text: str
    steer_id: str | None = None
    is_told: asyncio.Event = field(default_factory=asyncio.Event)


class TerminalChat:
    """The conversation."""

    def __init__(
        self,
        client: AsyncClient,
        screen: Screen,
        loop: LoopThread,
        *,
        tools: Sequence[Tool] = (),
        thinks: bool = False,
    ) -> None:
        self._tools = tools
        # Said either way: left to themselves, some models think.
        self._reasoning = {"effort": "low" if thinks else "none"}
        self._calls: dict[str, str] = {}  # arguments of the current turn's, by `call_id`
        self._client = client
        self._socket = self._client.connect()
        self._screen = screen
        self._loop = loop
        self._model = ""
        self._models: dict[str, Model] = {}  # by id
        self._transcript = Transcript()
        # The last question, its parent and its images.
        self._asked: tuple[str, Turn | None, tuple[str, ...]] | None = None
        self._images: tuple[str, ...] = ()  # data URLs, for the next question
        self._stream: EventStream[AsyncRunner] | None = None
        self._text = ""  # of the current answer, even if its connection was lost
        self._steered: list[_Steered] = []  # what became of them is not known yet
        self._num_failed = 0
        self._is_interactive = screen.is_styled and sys.stdin.isatty()
        self._messages = _Input(is_interactive=self._is_interactive)

    def run(self, model: str | None) -> int:
        """Chats until the input ends; returns the exit code."""
        try:
            self._model = choose_model(self._offered(), model)
            if self._is_interactive:
                self._screen.say(f"{self._model} at {self._client.base_url} · /help for help")
            while (message := self._messages.read()) is not None:
                if message.startswith("/"):
                    if not self._obey(message):
                        break
                elif message:
                    self._ask(message, after=self._transcript.head)
        finally:
            self._hang_up()
        return 1 if self._num_failed and not self._is_interactive else 0

    def _offered(self) -> list[str]:
        try:
            models = self._loop.start(self._client.models.list()).result()
        except AuthenticationError as error:
            raise ValueError(f"{self._client.base_url} refused (HTTP 401): {error}") from None
        self._models = {each["id"]: each for each in models["data"]}
        return list(self._models)

    @property
    def _context_len(self) -> int | None:
        return self._models[self._model].get("max_model_len")

    @property
    def _sampling(self) -> Mapping[str, Any]:
        return self._models[self._model].get("chat_sampling", {})

    def _obey(self, line: str) -> bool:
        """Carries out a command; false when it is time to leave."""
        command, _, argument = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._transcript, self._asked = Transcript(), None
                self._screen.say("new conversation")
            case "/stop":
                self._screen.say("no answer is under way")
            case "/retry":
                self._retry()
            case "/resume":
                self._resume()
            case "/branch":
                self._branch(argument.strip())
            case "/image":
                self._attach(argument.strip())
            case "/save":
                self._save(argument.strip())
            case "/help":
                self._screen.say(HELP)
            case unknown:
                self._screen.complain(f"no command {unknown}; /help lists them")
        return True

    def _retry(self) -> None:
        if self._asked is None:
            self._screen.complain("nothing was asked yet")
            return
        question, after, self._images = self._asked
        self._ask(question, after=after)

    def _branch(self, number: str) -> None:
        if not number:
            for line in self._transcript.outline():
                self._screen.show(line)
            return
        try:
            self._transcript.go_to(int(number))
        except ValueError as error:
            told = str(error) if number.isdecimal() else f"{number!r} is not the number of a turn"
            self._screen.complain(told)
            return
        self._screen.say(f"the next message comes after turn {number}")

    def _save(self, name: str) -> None:
        path = Path(name or time.strftime("chat-%Y-%m-%d-%H%M%S.md")).expanduser()
        try:
            self._transcript.save(path, model=self._model)
        except OSError as error:
            self._screen.complain(f"cannot write {path}: {error.strerror}")
            return
        self._screen.say(f"saved to {path}")

    def _attach(self, path: str) -> None:
        """Send an image with the next message."""
        try:
            self._images += (data_url(path),)
        except (OSError, ValueError) as error:
            self._screen.complain(f"cannot send {path or 'an image without a path'}: {error}")
            return
        self._screen.say(f"the next message has {len(self._images)} image(s)")

    def _ask(self, question: str, *, after: Turn | None) -> None:
        self._asked = (question, after, self._images)
        self._images, self._stream, self._text = (), None, ""
        self._take_turn()

    def _resume(self) -> None:
        stream = self._stream
        if stream is None or stream.response_id is None or stream.response is not None:
            self._screen.complain("no answer was lost")
            return
        self._take_turn()

    def _take_turn(self) -> None:
        """An answer, to its end or until it is stopped."""
        turn = self._loop.start(self._turn())
        is_stopping = False
        while True:
            try:
                self._wait(turn)
                return
            except KeyboardInterrupt:
                if is_stopping:  # a second Ctrl-C: do not wait for the server
                    turn.cancel()
                    raise
                is_stopping = True
                self._stop()
            except PenstockError as error:
                if isinstance(error, UnreachableError) and not self._is_interactive:
                    raise
                self._fail(error)
                return

    def _wait(self, turn: Future[None]) -> None:
        while self._is_interactive and not turn.done():
            line = self._messages.poll(_POLL_S)
            if line == "/stop":
                self._stop()
            elif line:
                self._steer(line)
        turn.result()

    def _steer(self, message: str) -> None:
        """Interrupts the answer under way; if it has just ended, the message is the next one."""
        if self._stream is None:
            self._messages.keep(message)
            return
        self._loop.start(self._send_steer(self._stream, message))

    async def _send_steer(self, stream: EventStream[AsyncRunner], message: str) -> None:
        steered = _Steered(message)
        self._steered.append(steered)
        try:
            steered.steer_id = (await stream.steer(message))["id"]
        except PenstockError as error:
            self._messages.keep(message)
            self._steered.remove(steered)
            if not (isinstance(error, RefusedError) and error.status == 409):
                self._answer.note(f"[not interrupted: {error}]")
        finally:
            steered.is_told.set()

    async def _take_steered(self, ids: Collection[str]) -> list[_Steered]:
        """Those with these ids. The end of an answer may come before the replies that tell them;
        those to other messages may come later."""
        while True:
            taken = [each for each in self._steered if each.steer_id in ids]
            untold = [each for each in self._steered if not each.is_told.is_set()]
            if len(taken) == len(ids) or not untold:
                break
            await untold[0].is_told.wait()
        for each in taken:
            self._steered.remove(each)
        return taken

    async def _give_back(self, response: Response) -> None:
        """What nobody answers is the next message."""
        errors = {
            each["id"]: each["error"]["message"]
            for each in steers_of(response)
            if each["status"] == "failed"
        }
        for each in await self._take_steered(errors):
            assert each.steer_id is not None
            self._messages.keep(each.text)
            self._screen.complain(f"not interrupted: {errors[each.steer_id]}")

    def _stop(self) -> None:
        if self._stream is not None:
            self._loop.start(self._stream.cancel())

    async def _turn(self) -> None:
        timing = Timing(time.monotonic())
        self._answer = self._screen.answer()
        self._calls = {}
        is_new = self._stream is None
        try:
            if is_new and self._tools:
                await self._run_tools(timing)
            else:
                self._stream = stream = await self._begin()
                stream.on_wait = self._note_wait
                async for event in stream:
                    await self._show(event, timing)
        finally:
            self._answer.end()
        assert self._stream is not None
        try:
            self._conclude(self._stream, timing)
        finally:
            if self._stream.response is not None:
                await self._give_back(self._stream.response)
            for each in list(self._steered):
                await each.is_told.wait()  # the next message, if this answer did not end for it

    async def _run_tools(self, timing: Timing) -> None:
        assert self._asked is not None
        question, after, images = self._asked
        run = self._client.responses.run_tools(
            model=self._model,
            input=_input_of(question, images),
            tools=self._tools,
            previous_response_id=None if after is None else after.response_id,
            penstock={"events": ["preempted", "resumed", "queue"]},
            reasoning=self._reasoning,
            extra_body=self._sampling,
        )
        self._stream = run.stream
        run.stream.on_wait = self._note_wait
        async for event in run:
            if self._stream is not run.stream:
                self._stream, run.stream.on_wait = run.stream, self._note_wait
            await self._show(event, timing)

    def _note_wait(self, error: PenstockError, _: float) -> None:
        self._answer.note(f"[{error}; reconnecting]")

    def _tell(self, line: str) -> None:
        """A line between parts of the answer."""
        self._answer.end()
        self._screen.say(line)
        self._answer = self._screen.answer()

    async def _begin(self) -> EventStream[AsyncRunner]:
        """The stream of a new answer, or of the rest of an interrupted one."""
        lost = self._stream
        if lost is not None and lost.response_id is not None:
            return await self._socket.follow(lost.response_id, starting_after=lost.last_number)
        assert self._asked is not None
        question, after, images = self._asked
        return await self._socket.create(
            model=self._model,
            input=_input_of(question, images),
            previous_response_id=None if after is None else after.response_id,
            penstock={"events": ["preempted", "resumed", "queue"]},
            reasoning=self._reasoning,
            extra_body=self._sampling,
        )

    async def _show(self, event: ResponseEvent, timing: Timing) -> None:
        if event["type"] == "response.output_text.delta":
            timing.note_piece()
            self._text += event["delta"]
            self._answer.write(event["delta"])
        elif event["type"] == "response.reasoning_text.delta":
            timing.note_piece()
            self._answer.note("[thinking]")
        elif event["type"] == "response.reasoning_text.done":
            self._tell(f"thought: {_on_one_line(event['text'])}")
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            if item["type"] == "function_call":
                self._calls[item["call_id"]] = item["arguments"]
        elif event["type"] == "penstock.tool_output":
            arguments = _on_one_line(self._calls.get(event["call_id"], ""))
            self._tell(f"{event['name']} {arguments} → {_on_one_line(event['output'])}")
        elif event["type"] == "penstock.queue":
            self._answer.note(f"[waiting: {event['position']} before this one]")
        elif event["type"] in ("response.incomplete", "response.completed"):
            if successor_of(event) is not None:
                await self._go_on(event["response"])
        elif event["type"] in _NOTICES:
            self._answer.note(_NOTICES[event["type"]])

    async def _go_on(self, response: Response) -> None:
        """The answer was interrupted, and what comes answers the messages that did."""
        self._tell("interrupted")
        if self._asked is None:
            return
        question, after, _ = self._asked
        self._transcript.add(question, self._text, response_id=response["id"], parent=after)
        committed = [each["id"] for each in steers_of(response) if each["status"] == "committed"]
        messages = [each.text for each in await self._take_steered(committed)]
        self._asked = ("\n".join(messages), self._transcript.head, ())
        self._text = ""
        await self._give_back(response)

    def _conclude(self, stream: EventStream[AsyncRunner], timing: Timing) -> None:
        response = stream.response
        if response is None or self._asked is None:
            return
        raise_if_failed(response)
        question, after, _ = self._asked
        self._transcript.add(question, self._text, response_id=response["id"], parent=after)
        note = ending(response, self._context_len)
        num_tokens = response["usage"]["output_tokens"] if response["usage"] else 0
        self._screen.say(" · ".join(filter(None, (note, timing.summary(num_tokens)))))

    def _fail(self, error: PenstockError) -> None:
        self._num_failed += 1
        message, goes_on = str(error), self._transcript.head is not None
        code = error.code if isinstance(error, RefusedError) else None
        if code == "previous_response_not_found":
            self._transcript = Transcript()
            message = "the server no longer has this conversation; ask again to start a new one"
        elif code == "context_length_exceeded" and goes_on:
            message += "; /new starts a new conversation"
        elif isinstance(error, TransportError) and self._is_resumable:
            message += "; /resume goes on with the answer"
        self._screen.complain(message)

    @property
    def _is_resumable(self) -> bool:
        return self._stream is not None and self._stream.response_id is not None

    def _hang_up(self) -> None:
        for farewell in (self._socket.close, self._client.close):
            with contextlib.suppress(Exception):
                self._loop.start(farewell()).result(timeout=3)


def _input_of(question: str, images: Sequence[str]) -> str | Messages:
    if not images:
        return question
    parts = [{"type": "input_image", "image_url": url} for url in images]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": question}]}]


def _on_one_line(text: str) -> str:
    """The beginning of a text, clean for the terminal."""
    line = " ".join(clean(text).split())
    return line if len(line) <= _MAX_LINE_CHARS else line[:_MAX_LINE_CHARS] + "…"


T = TypeVar("T")


class LoopThread:
    """A context with an event loop in another thread, so that the main thread can wait for keys."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="penstock-chat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run_loop(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the main thread handles Ctrl-C
        self._loop.run_forever()


class _Input:
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
