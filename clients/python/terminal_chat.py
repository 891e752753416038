"""`penstock chat`: a conversation with a server, in the terminal: turns, commands and Ctrl-C.

`client` talks to the server, `terminal_screen` prints.

Two threads: this one reads lines and waits, so that line editing and Ctrl-C work as usual; an event
loop in the other one keeps the connection alive between messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from .client import AsyncClient
from .errors import (
    AuthenticationError,
    ConnectionLostError,
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
from .terminal_conversations import Listed, Running, StoredConversation, recent, search
from .terminal_screen import Input, Screen, Timing, clean, quiet_keys
from .terminal_tools import local_tools
from .tools import Tool
from .track import steers_of, successor_of
from .transcript import Transcript, Turn

HELP = """\
TEXT           while an answer comes: interrupts it, and is answered
/stop          stop the answer under way (also Ctrl-C)
/retry         answer the last question again
/resume        continue an answer after all reconnection attempts failed
/branch [N]    continue from turn N (0: from the beginning); without N, list the turns
/image PATH    send an image with the next message
/save [FILE]   write the conversation to FILE as Markdown
/open          list the conversations of this server, those of the page included
/open N        go on with number N of the list
/open WORDS    list the conversations that have these words
/new           start a new conversation
/quit          leave (also Ctrl-D)
/help          this
A message of several lines: end a line with \\, or put it between \"\"\" and \"\"\"."""

_POLL_S = 0.05
_NUM_SHOWN = 5  # turns of a conversation that is opened
_MAX_LOST = 3  # requests whose connection broke, before one is given up
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
        self._stored = StoredConversation(self._client)
        self._listed: list[Listed] = []  # by the last `/open`
        self._settings: Mapping[str, Any] = {}  # of the page, for the opened conversation
        # The last question, its parent and its images.
        self._asked: tuple[str, Turn | None, tuple[str, ...]] | None = None
        self._images: tuple[str, ...] = ()  # data URLs, for the next question
        self._stream: EventStream[AsyncRunner] | None = None
        self._is_stopped = False  # the current answer
        self._text = ""  # of the current answer, even if its connection was lost
        self._steered: list[_Steered] = []  # what became of them is not known yet
        self._num_failed = 0
        self._is_interactive = screen.is_styled and sys.stdin.isatty()
        self._messages = Input(is_interactive=self._is_interactive)

    def run(self, model: str | None) -> int:
        """Chats until the input ends; returns the exit code."""
        try:
            self._model = choose_model(self._offered(), model)
            with quiet_keys(is_interactive=self._is_interactive):
                self._chat()
        finally:
            self._hang_up()
        return 1 if self._num_failed and not self._is_interactive else 0

    def _chat(self) -> None:
        if self._is_interactive:
            self._screen.say(f"{self._model} at {self._client.base_url} · /help for help")
        while (message := self._messages.read()) is not None:
            if message.startswith("/"):
                if not self._obey(message):
                    break
            elif message:
                self._ask(message, after=self._transcript.head)
        if self._is_interactive:
            is_kept = self._stored.conversation_id is not None
            self._screen.say("left; /open finds this conversation again" if is_kept else "left")

    def _offered(self) -> list[str]:
        try:
            models = self._loop.start(self._client.models.list()).result()
        except AuthenticationError as error:
            raise ValueError(f"{self._client.base_url} refused (HTTP 401): {error}") from None
        self._models = {each["id"]: each for each in models["data"]}
        return list(self._models)

    @property
    def _context_len(self) -> int | None:
        return self._models[self._asked_of_model()["model"]].get("max_model_len")

    def _obey(self, line: str) -> bool:
        """Carries out a command; false when it is time to leave."""
        command, _, argument = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._begin_anew()
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
            case "/open":
                self._open(argument.strip())
            case "/save":
                self._save(argument.strip())
            case "/help":
                self._screen.say(HELP)
            case unknown:
                self._screen.complain(f"no command {unknown}; /help lists them")
        return True

    def _begin_anew(self) -> None:
        self._transcript, self._asked, self._stream = Transcript(), None, None
        self._stored, self._settings = StoredConversation(self._client), {}

    def _open(self, wanted: str) -> None:
        try:
            if wanted.isdecimal() and not self._listed:
                self._listed, _ = self._loop.start(recent(self._client)).result()
            if wanted.isdecimal() and 0 < int(wanted) <= len(self._listed):
                self._open_one(self._listed[int(wanted) - 1])
            elif wanted:
                self._list(self._loop.start(search(self._client, wanted)).result())
            else:
                listed, has_more = self._loop.start(recent(self._client)).result()
                self._list(listed)
                if has_more:
                    self._screen.say("there are older ones; /open WORDS finds them")
        except PenstockError as error:
            self._screen.complain(str(error))

    def _list(self, listed: list[Listed]) -> None:
        self._listed = listed
        for number, each in enumerate(listed, 1):
            self._screen.show(each.line(number))
        self._screen.say("/open N goes on with number N" if listed else "no conversations found")

    def _open_one(self, one: Listed) -> None:
        stored = StoredConversation(self._client)
        opened = self._loop.start(stored.open(one.conversation_id)).result()
        self._begin_anew()
        self._stored, self._transcript = stored, opened.transcript
        self._settings = opened.parameters
        self._screen.say(opened.title)
        path = self._transcript.path()
        if len(path) > _NUM_SHOWN:
            self._screen.say(f"({len(path) - _NUM_SHOWN} earlier turns; /save writes all)")
        for turn in path[-_NUM_SHOWN:]:
            self._show_turn(turn.question, turn.answer)
        if path:
            last = path[-1]
            self._asked = (last.question, last.parent, ())
        if opened.running is not None:
            self._follow(opened.running)

    def _show_turn(self, question: str, answer: str = "") -> None:
        for line in question.splitlines():
            self._screen.show(f"› {line}")
        shown = self._screen.answer()
        shown.write(answer)
        shown.end()

    def _follow(self, running: Running) -> None:
        """The rest of an answer that was asked for elsewhere."""
        self._show_turn(running.question)
        self._asked, self._text = (running.question, running.parent, ()), ""
        self._take_turn(running.response_id)

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

    async def _place(self, question: str, after: Turn | None) -> dict[str, Any]:
        """Where the next turn belongs. What is piped in is kept in no conversation, unless one was
        opened."""
        if self._stored.conversation_id is None and not self._is_interactive:
            return {"previous_response_id": None if after is None else after.response_id}
        if await self._stored.go_to(after, question=question):
            self._tell("this conversation went on elsewhere; this is a branch of it")
        return {"conversation": self._stored.conversation_id}

    def _resume(self) -> None:
        stream = self._stream
        if stream is None or stream.response_id is None or stream.response is not None:
            self._screen.complain("no answer was lost")
            return
        self._take_turn()

    def _take_turn(self, followed: str | None = None) -> None:
        """An answer, to its end or until it is stopped; `followed`: that response's, which runs."""
        self._is_stopped = False
        turn = self._loop.start(self._turn(followed))
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
        self._is_stopped = True  # for a stream that is about to begin
        if self._stream is not None:
            self._loop.start(self._stream.cancel())

    async def _turn(self, followed: str | None) -> None:
        timing = Timing(time.monotonic())
        self._answer = self._screen.answer()
        self._calls = {}
        is_new = self._stream is None
        try:
            if is_new and self._tools and followed is None:
                await self._run_tools(timing)
            else:
                await self._read_answer(timing, followed)
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

    async def _read_answer(self, timing: Timing, followed: str | None) -> None:
        """A turn of a conversation is not sent twice. If its connection broke before an answer, the
        conversation tells whether it has arrived."""
        for num_lost in range(_MAX_LOST):
            try:
                self._stream = stream = await self._begin(followed)
                stream.on_wait = self._note_wait
                if self._is_stopped:
                    await stream.cancel()
                async for event in stream:
                    await self._show(event, timing)
                return
            except ConnectionLostError as error:
                has_begun = self._stream is not None and self._stream.response_id is not None
                is_kept = self._stored.conversation_id is not None
                if has_begun or not is_kept or num_lost == _MAX_LOST - 1:
                    raise
                self._note_wait(error, 0)
                assert self._asked is not None
                after, known = self._asked[1], self._transcript.response_ids
                followed = await self._stored.response_after(after, known)

    async def _run_tools(self, timing: Timing) -> None:
        assert self._asked is not None
        question, after, images = self._asked
        place = await self._place(question, after)
        run = self._client.responses.run_tools(
            input=_input_of(question, images),
            tools=self._tools,
            penstock={"events": ["preempted", "resumed", "queue"]},
            reasoning=self._reasoning,
            **self._asked_of_model(),
            **place,
        )
        self._stream = run.stream
        run.stream.on_wait = self._note_wait
        if self._is_stopped:
            await run.stream.cancel()
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

    async def _begin(self, followed: str | None) -> EventStream[AsyncRunner]:
        """The stream of a new answer, of one that runs, or of the rest of an interrupted one."""
        lost = self._stream
        if followed is not None:
            return await self._socket.follow(followed)
        if lost is not None and lost.response_id is not None:
            return await self._socket.follow(lost.response_id, starting_after=lost.last_number)
        assert self._asked is not None
        question, after, images = self._asked
        place = await self._place(question, after)
        return await self._socket.create(
            input=_input_of(question, images),
            penstock={"events": ["preempted", "resumed", "queue"]},
            reasoning=self._reasoning,
            **self._asked_of_model(),
            **place,
        )

    def _asked_of_model(self) -> dict[str, Any]:
        """Model and sampling, and what the page was told of the conversation that was opened."""
        settings = dict(self._settings)
        model = settings.pop("model", self._model)
        model = model if model in self._models else self._model
        sampling = self._models[model].get("chat_sampling", {})
        return {"model": model, "extra_body": {**sampling, **settings}}

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
        if isinstance(error, RefusedError) and not self._transcript.response_ids:
            with contextlib.suppress(PenstockError):
                self._loop.start(self._stored.forget_if_empty()).result()
        if code in ("previous_response_not_found", "conversation_not_found"):
            self._begin_anew()
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
