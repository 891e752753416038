"""A stub of the server: the Responses WebSocket mode with answers that a test can order.

What lives here: the protocol as clients see it, in one thread, with the chat page at `/`. The
first word of a message chooses what happens (`slow`, `drop`, `fail`, …: see `Script`). Anything
else is answered from the conversation's memory, as far as "What is my name?" needs one.
What it does not know: models, engines, the real gateway.
"""

import asyncio
import itertools
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

MODEL = "stub-model"
PAGE = Path(__file__).parents[2] / "clients" / "browser"
POLICY = "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; style-src 'self'"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
HTML = "<script>document.title = 'owned'</script> <img src=x onerror=\"document.title='owned'\">"
MARKDOWN = (
    "Some **bold**, *italic* and `code`.\n\n1. one\n2. two\n   - nested\n\n"
    "```python\nprint('<b>')\n\nx = 1\n```\nThe end.\n\n[x](javascript:alert(1))"
)


@dataclass(slots=True)
class Turn:
    """One response: its question, the turns before it, and the way to stop it."""

    response_id: str
    history: list[str]
    stream_id: str | None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)


class RefusedError(Exception):
    """An error before the start; `args` are message and code."""


class DroppedError(Exception):
    """Close the socket in the middle of the answer."""


async def pieces_of(turn: Turn) -> AsyncIterator[str]:
    """The deltas of an answer; the message's first word is the order."""
    question = turn.history[-1]
    order = question.split()[0].lower()
    pause_s, text = 0.002, answer_to(turn.history)
    if order == "slow":
        pause_s, text = 0.03, "\n\n".join(f"Line {n} of a slow answer." for n in range(1, 100))
    elif order in ("html", "markdown"):
        text = HTML if order == "html" else MARKDOWN
    elif order == "long":
        text = "\n\n".join(f"Paragraph {n}. " + "Water flows. " * 12 for n in range(1, 40))
    elif order == "burst":
        pause_s, text = 0, " ".join(f"w{n}" for n in range(1_000)) + "\n" * 40 + "w999"
    elif order == "escape":
        text = "\x1b[31mred\x1b[0m \x9b5n\x07 \x1b]0;title\x07 end"
    elif order == "drop":
        text = "Half of an"
    for piece in re.findall(r"\s*\S{1,6}|\s+$", text):
        yield piece
        await asyncio.sleep(pause_s)
    if order == "drop":
        raise DroppedError


def answer_to(history: list[str]) -> str:
    if "what is my name" not in history[-1].lower():
        return f"You said: {history[-1]}"
    names = [m[1] for said in history if (m := re.search(r"[Mm]y name is (\w+)", said))]
    return f"Your name is {names[-1]}." if names else "I do not know your name."


class StubServer:
    """The server's state and its endpoints. Flags may be set from the test's thread."""

    def __init__(self, *, api_key: str | None = None, has_history: bool = True) -> None:
        self.api_key = api_key
        self.has_history = has_history
        self.is_down = False
        self.received: list[dict[str, Any]] = []
        self.base_url = ""
        self._turns: dict[str, Turn] = {}
        self._ids = itertools.count(1)

    def forget(self) -> None:
        """Loses every conversation, as a restart would."""
        self._turns.clear()

    def app(self) -> ASGIApp:
        page = StaticFiles(directory=PAGE, html=True)
        routes = [
            Route("/v1/models", self._models),
            WebSocketRoute("/v1/responses", self._responses),
            Mount("/", page),
        ]
        return with_policy(Starlette(routes=routes))

    async def _models(self, request: Request) -> Response:
        if self.is_down:
            return JSONResponse({"error": {"message": "down"}}, status_code=503)
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _responses(self, socket: WebSocket) -> None:
        offered = socket.scope["subprotocols"]
        bearer = socket.headers.get("authorization", "").removeprefix("Bearer ")
        keys = {bearer, *(name.removeprefix(KEY_SUBPROTOCOL) for name in offered)}
        if self.is_down or (self.api_key and self.api_key not in keys):
            await socket.close(1008)
            return
        await socket.accept(subprotocol=offered[0] if offered else None)
        tasks: set[asyncio.Task[None]] = set()
        lock = asyncio.Lock()
        try:
            while True:
                message = await socket.receive_json()
                self.received.append(message)
                if message["type"] == "penstock.cancel":
                    self._turns[message["response_id"]].cancelled.set()
                else:
                    tasks.add(asyncio.create_task(self._answer(socket, lock, message)))
        except WebSocketDisconnect:
            for task in tasks:
                task.cancel()

    async def _answer(self, socket: WebSocket, lock: asyncio.Lock, message: dict[str, Any]) -> None:
        async with lock:
            try:
                await self._stream(socket, message)
            except RefusedError as refusal:
                text, code = refusal.args
                error = {"message": text, "type": "invalid_request_error", "code": code}
                event = {"type": "error", "status": 400, "error": {**error, "param": None}}
                await socket.send_json({**event, "stream_id": message.get("stream_id")})
            except DroppedError:
                await socket.close(1011)

    async def _stream(self, socket: WebSocket, message: dict[str, Any]) -> None:
        turn = self._new_turn(message)
        order = turn.history[-1].split()[0].lower()

        async def send(kind: str, **fields: Any) -> None:
            event = {"type": kind, "sequence_number": next(turn.numbers), **fields}
            await socket.send_json(event | {"stream_id": turn.stream_id})

        def response(status: str, **fields: Any) -> dict[str, Any]:
            return {"id": turn.response_id, "status": status, "usage": None, **fields}

        await send("response.created", response=response("in_progress"))
        await send("response.in_progress", response=response("in_progress"))
        num_tokens = 0
        async for piece in pieces_of(turn):
            if turn.cancelled.is_set():
                break
            num_tokens += 1
            await send("response.output_text.delta", delta=piece)
            if order == "pause" and num_tokens == 2 and "penstock" in message:
                for kind in message["penstock"]["events"]:
                    event = {"type": f"penstock.{kind}", "response_id": turn.response_id}
                    await socket.send_json(event | {"stream_id": turn.stream_id})
                    await asyncio.sleep(0.3)
            if order in ("fail", "length") and num_tokens == 2:
                break
        usage = {"input_tokens": 7, "output_tokens": num_tokens}
        status, extra = terminal_of(turn, order)
        kind = "response.incomplete" if status == "cancelled" else f"response.{status}"
        await send(kind, response=response(status, **(extra | {"usage": usage})))

    def _new_turn(self, message: dict[str, Any]) -> Turn:
        previous = message.get("previous_response_id")
        if previous is not None and previous not in self._turns:
            raise RefusedError(
                f"Previous response {previous!r} not found.", "previous_response_not_found"
            )
        if message["input"].startswith("refuse"):
            raise RefusedError("The queue is full. <b>Come back</b> later.", "server_overloaded")
        if message["input"].startswith("full") and previous is not None:
            raise RefusedError("The prompt has 2092 tokens", "context_length_exceeded")
        before = self._turns[previous].history if previous and self.has_history else []
        turn = Turn(
            f"resp_{next(self._ids)}", [*before, message["input"]], message.get("stream_id")
        )
        self._turns[turn.response_id] = turn
        return turn


def terminal_of(turn: Turn, order: str) -> tuple[str, dict[str, Any]]:
    if turn.cancelled.is_set():
        return "cancelled", {}
    if order == "fail":
        error = {"message": "The engine went away.", "code": "engine_dead"}
        return "failed", {"error": error}
    if order == "length":
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {}


def with_policy(app: ASGIApp) -> ASGIApp:
    """Adds the Content-Security-Policy that the page must live under."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"]).mutablecopy()
                headers["content-security-policy"] = POLICY
                headers["cache-control"] = "no-cache"
                message["headers"] = headers.raw
            await send(message)

        await app(scope, receive, send_with_policy)

    return wrapped


@contextmanager
def running(stub: StubServer) -> Iterator[StubServer]:
    """Serves the stub on a free port in its own thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    stub.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(
            stub.app(), log_level="error", ws_per_message_deflate=False, lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
