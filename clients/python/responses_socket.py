"""One WebSocket in the Responses mode of a server, for one answer at a time.

What lives here: where the server's endpoints are, connecting, asking, and stopping.
What it does not know: the terminal, or what a conversation is.
"""

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.protocol import State

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_REFUSAL_BYTES = 64 * 1024
TIMEOUT_S = 10.0
LANE = "chat"
TERMINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")

Event = dict[str, Any]


class ClientError(Exception):
    """Something that a user can be told in one line."""


class ConnectionLostError(ClientError):
    """The connection ended in the middle of an answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: `http://host:port`, perhaps below a path, and the key it wants."""

    base_url: str
    api_key: str | None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> Self:
        """Accepts the address with or without `/v1`, and without `http://`."""
        url = base_url if "://" in base_url else f"http://{base_url}"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ClientError(f"{base_url!r} is not the address of a server (http://host:port)")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(urlunsplit((parts.scheme, parts.netloc, path, "", "")), api_key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, where no proxy belongs in between."""
        host = urlsplit(self.base_url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def list_models(self) -> list[str]:
        """The ids of the models that the server offers."""
        request = urllib.request.Request(  # noqa: S310 (`parse` admits http and https only)
            f"{self.base_url}/v1/models", headers=self.headers
        )
        proxies = [urllib.request.ProxyHandler({})] if self.is_loopback else []
        try:
            with urllib.request.build_opener(*proxies).open(request, timeout=TIMEOUT_S) as answer:
                return [model["id"] for model in json.load(answer)["data"]]
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error.read(MAX_REFUSAL_BYTES)) from None
        except OSError as error:  # URLError is one, and holds the socket's own error as `reason`
            raise self._unreachable(getattr(error, "reason", error)) from None
        except (ValueError, KeyError, TypeError):
            raise ClientError(f"{self.base_url} does not answer like a penstock server") from None

    async def open_socket(self) -> "ResponsesSocket":
        try:
            connection = await connect(
                f"ws{self.base_url.removeprefix('http')}/v1/responses",
                additional_headers=self.headers,
                compression=None,
                max_size=MAX_EVENT_BYTES,
                open_timeout=TIMEOUT_S,
                proxy=None if self.is_loopback else True,
            )
        except InvalidStatus as error:
            raise self._refusal(error.response.status_code, error.response.body) from None
        except (OSError, WebSocketException) as error:
            raise self._unreachable(error) from None
        return ResponsesSocket(connection)

    def _unreachable(self, reason: object) -> ClientError:
        why = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        if isinstance(reason, ConnectionRefusedError):
            why = "connection refused; is `penstock serve` running?"
        return ClientError(f"cannot reach {self.base_url}: {why}")

    def _refusal(self, status: int, body: bytes | bytearray | None) -> ClientError:
        if status == 401:
            hint = "it did not accept this API key" if self.api_key else "it asks for an API key"
            return ClientError(f"{self.base_url} refused (HTTP 401): {hint}")
        try:
            reason = json.loads(body or b"")["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return ClientError(f"{self.base_url} answered with HTTP status {status}")
        return ClientError(f"{self.base_url} refused (HTTP {status}): {reason}")


class ResponsesSocket:
    """An open connection. Answers come one after the other; `cancel` may be called meanwhile."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._response_id: str | None = None
        self._is_cancelling = False

    @property
    def is_open(self) -> bool:
        return self._connection.state is State.OPEN

    async def close(self) -> None:
        await self._connection.close()

    async def ask(
        self, model: str, text: str, *, previous_response_id: str | None
    ) -> AsyncIterator[Event]:
        """Yields the answer's events; the last is a terminal one or an `error`.

        Raises `ConnectionLostError` when the connection ends before that.
        """
        self._response_id, self._is_cancelling = None, False
        request: dict[str, Any] = {
            "type": "response.create",
            "model": model,
            "input": text,
            "stream_id": LANE,
            "penstock": {"events": ["preempted", "resumed"]},
        }
        if previous_response_id:
            request["previous_response_id"] = previous_response_id
        try:
            await self._connection.send(json.dumps(request))
            while True:
                event = json.loads(await self._connection.recv())
                if event["type"] == "response.created":
                    await self._note_start(event["response"]["id"])
                if event.get("stream_id") != LANE:
                    continue  # about the connection, or a cancel that came after the end
                yield event
                if event["type"] in TERMINAL_EVENTS or event["type"] == "error":
                    return
        except ConnectionClosed as error:
            raise ConnectionLostError(f"the connection to the server broke ({error})") from None

    async def cancel(self) -> None:
        """Asks the server to stop the answer under way; its terminal event then says so."""
        self._is_cancelling = True
        if self._response_id is not None:
            await self._send_cancel()

    async def _note_start(self, response_id: str) -> None:
        self._response_id = response_id
        if self._is_cancelling:
            await self._send_cancel()

    async def _send_cancel(self) -> None:
        message = {"type": "penstock.cancel", "response_id": self._response_id}
        await self._connection.send(json.dumps(message))
