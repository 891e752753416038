"""What all actors of a soak share: the server, ways to speak to it, and things to say.

Not known here: what actors do.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.address import Address
from penstock.load.client.bodies import Endpoint
from penstock.load.client.choose import TransportKind, open_transport
from penstock.load.client.records import Call, Message
from penstock.load.client.transport import Transport
from penstock.load.soak.journal import Journal
from penstock.load.toxic_proxy import ToxicProxy
from penstock.load.workloads.prompts import WORDS

# What actors call the four ways to stream.
TRANSPORTS: Mapping[str, tuple[TransportKind, Endpoint]] = {
    "completions": ("sse", "completions"),
    "chat": ("sse", "chat"),
    "responses": ("sse", "responses"),
    "websocket": ("websocket", "responses"),
}
# A silence this long is a fault. Much less than it takes a soak to notice by itself.
STALL_S = 60.0
_SLOW_BYTES_PER_S = 32_000
_PROMPT_WORDS = (3, 60)
_OUTPUT_TOKENS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """
    Attributes:
        authorization: a line of an HTTP head, or nothing.
        transports: the four ways to stream, by name.
        proxy: stands before the server for clients with a bad line; its way down is slow.
        http: for all that is no stream of a transport.
        max_model_len: the longest context, as the server says.
    """

    base_url: str
    address: Address
    authorization: str
    model: str
    max_model_len: int
    journal: Journal
    transports: Mapping[str, Transport]
    proxy: ToxicProxy
    http: aiohttp.ClientSession
    api_key: str | None

    def slow_transport(self, name: str) -> Transport:
        """One of the four over the slow line, for one stream. A server counts a connection as idle
        long before such a client has read all, and may close it when it is used again."""
        return _transport(name, f"http://127.0.0.1:{self.proxy.port}", self.api_key)

    def call(self, rng: random.Random, **values: Any) -> Call:
        """A turn of some words, with a length of its own."""
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
    """Ask the server for its model, and make ready to speak.

    Raises:
        ConfigError: it does not answer as an OpenAI-compatible server does.
    """
    address = Address.parse(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                base_url,
                headers=headers,
                # A connection kept for later may be closed by the server just when it is used.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=STALL_S),
            )
        )
        card = await _model_card(http)
        proxy = await stack.enter_async_context(ToxicProxy(address.host, address.port))
        proxy.downstream.rate_bytes_per_s = _SLOW_BYTES_PER_S
        yield Scene(
            base_url=base_url,
            address=address,
            authorization=f"Authorization: Bearer {api_key}\r\n" if api_key else "",
            model=card["id"],
            max_model_len=card.get("max_model_len") or 32_768,
            journal=journal,
            transports={
                name: await stack.enter_async_context(_transport(name, base_url, api_key))
                for name in TRANSPORTS
            },
            proxy=proxy,
            http=http,
            api_key=api_key,
        )


async def _model_card(http: aiohttp.ClientSession) -> dict[str, Any]:
    try:
        async with http.get("/v1/models") as response:
            card: dict[str, Any] = orjson.loads(await response.read())["data"][0]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"GET /v1/models names no model: {error!r}") from error
    return card


def _transport(name: str, base_url: str, api_key: str | None) -> Transport:
    kind, endpoint = TRANSPORTS[name]
    return open_transport(kind, endpoint, base_url, api_key=api_key, stall_s=STALL_S)
