"""What all actors of a soak share: the server, ways to speak to it, prompts, and how an answer that
is no proper refusal is noted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.records import PATHS, Address, Call, Endpoint, Fault, Message
from penstock.load.client.transport import Transport, TransportKind, Wire
from penstock.load.client.websocket import Lane, LaneSocket
from penstock.load.soak.journal import Journal
from penstock.load.workloads.datasets import WORDS

# The names of the four ways to stream.
TRANSPORTS: Mapping[str, tuple[TransportKind, Endpoint]] = {
    "completions": ("sse", "completions"),
    "chat": ("sse", "chat"),
    "responses": ("sse", "responses"),
    "websocket": ("websocket", "responses"),
}
# Silence that is a fault; far below the duration of a soak.
STALL_S = 60.0
_SOCKET_BUFFER_BYTES = 64 << 10  # small, so that a server notices a slow reader
_PROMPT_WORDS = (3, 60)
_OUTPUT_TOKENS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    base_url: str
    address: Address
    headers: Mapping[str, str]  # of its key
    model: str
    max_model_len: int  # the longest context, as the server says
    journal: Journal
    transports: Mapping[str, Transport]  # the four ways to stream, by name
    http: aiohttp.ClientSession  # for everything but the streams of a transport

    def call(self, rng: random.Random, **values: Any) -> Call:
        """A turn of some words, with a random length."""
        text = " ".join(rng.choices(WORDS, k=rng.randint(*_PROMPT_WORDS)))
        defaults: dict[str, Any] = {
            "model": self.model,
            "messages": (Message(role="user", content=text),),
            "max_tokens": rng.randint(*_OUTPUT_TOKENS),
            "ignore_eos": True,
            "extra": {"temperature": 0.8},
        }
        return Call(**{**defaults, **values})


@contextlib.asynccontextmanager
async def open_scene(
    base_url: str, journal: Journal, *, api_key: str | None
) -> AsyncIterator[Scene]:
    """Ask the server for its model, and open the transports. Raises ConfigError if it does not
    answer as an OpenAI-compatible server does."""
    address = Address.parse(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with contextlib.AsyncExitStack() as stack:
        # A server may close a kept connection just when it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        http = await stack.enter_async_context(_session(base_url, headers, connector))
        card = await _model_card(http)
        yield Scene(
            base_url=base_url,
            address=address,
            headers=headers,
            model=card["id"],
            max_model_len=card.get("max_model_len") or 32_768,
            journal=journal,
            transports={
                name: await stack.enter_async_context(
                    Wire(transport=kind, endpoint=endpoint, api_key=api_key, stall_s=STALL_S).open(
                        base_url
                    )
                )
                for name, (kind, endpoint) in TRANSPORTS.items()
            },
            http=http,
        )


async def _model_card(http: aiohttp.ClientSession) -> dict[str, Any]:
    try:
        async with http.get("/v1/models") as response:
            card: dict[str, Any] = orjson.loads(await response.read())["data"][0]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"GET /v1/models lists no model: {error!r}") from error
    return card


def slow_session(scene: Scene) -> aiohttp.ClientSession:
    """For reading slowly: the kernel holds little, so that a server notices."""

    def small(address: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(*address[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        return made

    return _session(scene.base_url, scene.headers, aiohttp.TCPConnector(socket_factory=small))


def _session(
    base_url: str, headers: Mapping[str, str], connector: aiohttp.TCPConnector
) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=STALL_S)
    return aiohttp.ClientSession(base_url, headers=headers, connector=connector, timeout=timeout)


# -- sockets and lanes of an actor's own ----------------------------------------------------------

# The possible ends of a stream that was cancelled, perhaps too late.
ENDS = ("cancelled", "max_output_tokens")


@contextlib.asynccontextmanager
async def open_socket(
    http: aiohttp.ClientSession, *, is_read: bool = True, bytes_per_s: float = math.inf
) -> AsyncIterator[LaneSocket]:
    """A socket. Raises aiohttp.ClientError if the server refuses it."""
    lanes = LaneSocket(bytes_per_s=bytes_per_s)
    await lanes.connect(http, PATHS["responses"])
    if is_read:
        lanes.read()
    try:
        yield lanes
    finally:
        await lanes.close()


@contextlib.contextmanager
def open_lane(
    scene: Scene, actor: str, call: Call, *, is_whole: bool = True, is_resumable: bool = False
) -> Iterator[Lane]:
    """The lane of a stream while it runs, which the journal notes.

    Args:
        is_whole: it must get all its tokens, since its client does not cancel it.
    """
    with scene.journal.stream(actor, is_resumable=is_resumable) as record:
        record.expected_tokens = call.max_tokens if is_whole else -1
        yield Lane(record)


def unended(lane: Lane) -> None:
    """Note in its record that a stream never came to its end."""
    if not lane.check.is_ended:
        lane.check.fail(Fault.CUT, "the socket ended before the stream", time.perf_counter())


@contextlib.asynccontextmanager
async def raw_connection(
    scene: Scene,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection for bytes, which is broken at the end of the block or by the server."""
    reader, writer = await asyncio.open_connection(scene.address.host, scene.address.port)
    try:
        with contextlib.suppress(ConnectionError):
            yield reader, writer
    finally:
        writer.transport.abort()


# -- refusals -------------------------------------------------------------------------------------

ANSWER_S = 45.0  # longer than a gateway is frozen
LARGE_BYTES = 6 << 20  # of a body that a server may refuse unread
ERROR_FIELDS = frozenset({"message", "type", "param", "code"})


async def post(
    scene: Scene,
    path: str,
    body: bytes,
    *,
    actor: str,
    what: str = "",
    statuses: Container[int] = range(400, 500),
    key: str | None = None,
) -> None:
    """Post, and note an answer that is neither 200, if that is one of the statuses, nor a proper
    refusal.

    Args:
        what: the request, for the note.
        key: of another tenant.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        async with asyncio.timeout(ANSWER_S):
            async with scene.http.post(path, data=io.BytesIO(body), headers=headers) as response:
                said = await response.read()
    except TimeoutError:
        scene.journal.problem(actor, f"{what}: no answer within {ANSWER_S:g} s")
        return
    except (aiohttp.ClientError, OSError) as error:
        # A server may close the connection before it has read all of a body that is too large.
        if len(body) < LARGE_BYTES:
            scene.journal.problem(actor, f"{what}: the connection broke: {error!r}")
        return
    is_right = response.status == 200 or _is_error(said)
    if not (response.status in statuses and is_right):
        scene.journal.problem(actor, f"{what}: answered {response.status} {said[:200]!r}")


def _is_error(body: bytes) -> bool:
    try:
        return set(orjson.loads(body)["error"]) >= ERROR_FIELDS
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
