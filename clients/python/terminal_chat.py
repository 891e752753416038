"""`penstock chat`: a conversation with a server, in the terminal.

What lives here: the prompt, the commands, printing an answer as it comes, Ctrl-C.
What it does not know: how a server is spoken to (`responses_socket`).

Two threads: this one reads lines and waits, so that line editing and Ctrl-C work as everywhere;
an event loop in the other keeps the connection alive also while nobody types.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from .responses_socket import ClientError, ConnectionLostError, Endpoint, Event, ResponsesSocket

with contextlib.suppress(ImportError):  # line editing and history for `input`, where there is any
    import readline  # noqa: F401

T = TypeVar("T")

HELP = """\
/new    start a new conversation
/quit   leave (also Ctrl-D)
/help   this
Ctrl-C stops the answer under way; at the prompt it leaves."""

PAUSED = " [paused: the server is short of memory]"

# A model must not steer the terminal: control characters other than newline and tab are dropped.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def run(base_url: str, *, api_key: str | None = None, model: str | None = None) -> int:
    """Chats until the input ends; returns the exit code (1: no server, or a turn failed)."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    try:
        endpoint = Endpoint.parse(base_url, api_key)
        chosen = choose_model(endpoint.list_models(), model)
        with LoopThread() as loop:
            return TerminalChat(endpoint, chosen, loop).run()
    except ClientError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def choose_model(offered: list[str], wanted: str | None) -> str:
    if wanted is None and offered:
        return offered[0]
    if wanted is None or wanted not in offered:
        names = ", ".join(offered) or "none"
        raise ClientError(f"the server does not offer the model {wanted!r} (it offers: {names})")
    return wanted


def complain(message: str) -> None:
    print(f"penstock chat: {message}", file=sys.stderr, flush=True)


class LoopThread:
    """An event loop in a thread of its own."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-chat", daemon=True)
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

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is the main thread's
        self._loop.run_forever()


@dataclass(slots=True)
class Timing:
    """When the pieces of one answer came, in seconds of the monotonic clock."""

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


class TerminalChat:
    """The conversation, and the lines that go in and out."""

    def __init__(self, endpoint: Endpoint, model: str, loop: LoopThread) -> None:
        self._endpoint = endpoint
        self._model = model
        self._loop = loop
        self._socket: ResponsesSocket | None = None
        self._last_response_id: str | None = None
        self._num_failed = 0
        self._is_styled = sys.stdout.isatty()
        self._is_interactive = self._is_styled and sys.stdin.isatty()

    def run(self) -> int:
        if self._is_interactive:
            self._say(f"{self._model} at {self._endpoint.base_url} · /help for help")
        try:
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._obey(line):
                        break
                elif line:
                    self._take_turn(line)
        finally:
            self._hang_up()
        return 1 if self._num_failed and not self._is_interactive else 0

    def _read(self) -> str | None:
        """The next line; None at the end of input and after Ctrl-C at the prompt."""
        # \001 and \002 tell readline which characters take no room.
        prompt = "\n\001\033[1m\002› \001\033[0m\002" if self._is_interactive else ""
        try:
            return input(prompt).strip()
        except EOFError:
            if self._is_interactive:
                print()
            return None
        except KeyboardInterrupt:
            print()
            return None

    def _obey(self, command: str) -> bool:
        """Carries out a command; false when it is time to leave."""
        match command.split()[0]:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._last_response_id = None
                self._say("new conversation")
            case "/help":
                self._say(HELP)
            case unknown:
                complain(f"no command {unknown}; /help lists them")
        return True

    def _take_turn(self, text: str) -> None:
        turn = self._loop.start(self._turn(text))
        is_stopping = False
        while True:
            try:
                return turn.result()
            except KeyboardInterrupt:
                if is_stopping:  # the server does not answer the stop; leave without it
                    turn.cancel()
                    raise
                is_stopping = True
                if self._socket is not None:
                    self._loop.start(self._socket.cancel())
            except ClientError as error:
                if not self._is_interactive and not isinstance(error, ConnectionLostError):
                    raise
                self._fail(str(error))
                return None

    async def _turn(self, text: str) -> None:
        if self._socket is None or not self._socket.is_open:
            self._socket = await self._endpoint.open_socket()
        timing = Timing(time.monotonic())
        has_text = False
        events = self._socket.ask(self._model, text, previous_response_id=self._last_response_id)
        try:
            async for event in events:
                if event["type"] == "response.output_text.delta":
                    timing.note_piece()
                    has_text = True
                    print(CONTROL.sub("", event["delta"]), end="", flush=True)
                elif event["type"] in ("penstock.preempted", "penstock.resumed"):
                    self._show_pause(event["type"] == "penstock.preempted")
                    has_text = has_text or self._is_styled
        finally:
            if has_text:
                print(flush=True)
        self._conclude(event, timing)

    def _conclude(self, event: Event, timing: Timing) -> None:
        """Takes the last event of an answer."""
        if event["type"] == "error":
            self._note_refusal(event["error"])
            return
        response = event["response"]
        if event["type"] == "response.failed":
            self._fail((response.get("error") or {}).get("message") or "the answer failed")
            return
        self._last_response_id = response["id"]
        notes = []
        if response["status"] == "cancelled":
            notes = ["stopped"]
        elif event["type"] == "response.incomplete":
            notes = [f"cut short ({(response.get('incomplete_details') or {}).get('reason')})"]
        num_tokens = (response.get("usage") or {}).get("output_tokens", 0)
        self._say(" · ".join([*notes, timing.summary(num_tokens)]))

    def _note_refusal(self, error: dict[str, Any]) -> None:
        if error.get("code") == "previous_response_not_found":
            self._last_response_id = None
            self._fail("the server no longer has this conversation; ask again to start a new one")
            return
        message = error.get("message") or "the server refused without a reason"
        if error.get("code") == "context_length_exceeded" and self._last_response_id:
            message += "; /new starts a new conversation"
        self._fail(message)

    def _fail(self, message: str) -> None:
        self._num_failed += 1
        complain(CONTROL.sub("", message))

    def _say(self, message: str) -> None:
        """Prints a remark of ours, dim; nothing where the output is a file or a pipe."""
        if self._is_styled:
            print(f"\033[2m{message}\033[0m", flush=True)

    def _show_pause(self, is_paused: bool) -> None:
        """Says why nothing comes for a while, at the place where the text will go on."""
        if self._is_styled:
            erasure = "\b" * len(PAUSED) + "\033[K"
            print(f"\033[2m{PAUSED}\033[0m" if is_paused else erasure, end="", flush=True)

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._loop.start(self._socket.close()).result(timeout=2)
