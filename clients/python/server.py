"""The server's address, requests to it, and their retries."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from .errors import PenstockError, ProtocolError, RefusedError, UnreachableError, refused
from .retries import RetryPolicy
from .steps import Answer, Close, Dial, Request, Sleep, Steps, ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server: `http://host:port`, perhaps with a path, and the API key."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def parse(
        cls, base_url: str, *, api_key: str | None = None, retries: RetryPolicy | None = None
    ) -> Self:
        """Accepts the address with or without `/v1` and `http://`.

        Raises:
            ValueError: not an address, or the key is not valid in a header.
        """
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key may hold letters, digits and signs of ASCII only")
        url = base_url if "://" in base_url else f"http://{base_url}"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError(f"{base_url!r} is not the address of a server (http://host:port)")
        path = parts.path.rstrip("/").removesuffix("/v1")
        address = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        return cls(base_url=address, api_key=api_key, retries=retries or RetryPolicy())

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, where no proxy must be used."""
        host = urlsplit(self.base_url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str | int | None] | None = None,
        is_repeatable: bool = True,
    ) -> Request:
        """A request to a path below `/v1`; None values in the query are left out.

        Raises:
            ValueError: an id in the path is empty or `..`, or the body is not JSON.
        """
        if not {"", ".", ".."}.isdisjoint(path.split("/")[1:]):
            raise ValueError(f"an id is missing in {path!r}")
        given = {name: value for name, value in (query or {}).items() if value is not None}
        headers = self._headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        return Request(
            method=method,
            url=f"{self.base_url}/v1{quote(path)}{'?' + urlencode(given) if given else ''}",
            headers=headers,
            body=None if body is None else json_text(body).encode(),
            is_repeatable=is_repeatable,
        )

    def steer(self, response_id: str, value: object) -> Steps[Any]:
        """See `Responses.steer`."""
        request = self.request("POST", f"/responses/{response_id}/steer", body={"input": value})
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return (yield from self.call(replace(request, headers={**request.headers, **key})))

    def call(self, request: Request) -> Steps[Any]:
        """The answer's JSON object, with retries.

        Raises:
            PenstockError: the request failed.
        """
        answer = yield from self.carry_through(request)
        try:
            return json.loads(answer.body)
        except ValueError:
            raise ProtocolError(f"{self.base_url} does not answer like a penstock server") from None

    def carry_through(self, request: Request) -> Steps[Answer]:
        """A successful answer, with retries."""
        attempt = 0
        while True:
            try:
                return (yield from self.once(request))
            except PenstockError as error:
                attempt += 1
                wait_s = self.retries.wait_s(error, attempt, is_repeatable=request.is_repeatable)
                if wait_s is None:
                    raise
                self.retries.on_wait(error, wait_s)
                yield Sleep(wait_s)

    def once(self, request: Request) -> Steps[Answer]:
        """A successful answer, without retries. Raises: PenstockError."""
        try:
            answer = yield from ask(request)
        except UnreachableError as error:
            raise self._unreachable(error) from None
        if 200 <= answer.status < 300:
            return answer
        if answer.stream is not None:
            yield Close(answer.stream)
        raise refused(answer.status, error_in(answer.body), headers=answer.headers)

    def dial(self) -> Steps[Any]:
        """An open WebSocket in the Responses mode. Raises: UnreachableError, RefusedError."""
        url = f"ws{self.base_url.removeprefix('http')}/v1/responses"
        try:
            socket = yield Dial(url, self._headers())
        except UnreachableError as error:
            raise self._unreachable(error) from None
        return socket

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def _unreachable(self, error: UnreachableError) -> UnreachableError:
        return UnreachableError(f"cannot reach {self.base_url}: {error}")


def json_text(message: Mapping[str, Any]) -> str:
    """A message as JSON.

    Raises:
        ValueError: it holds NaN, infinity or a lone surrogate, which JSON cannot represent.
    """
    text = json.dumps(message, allow_nan=False, ensure_ascii=False)
    text.encode()
    return text


def error_in(body: bytes) -> object:
    """The object under `error` in the body of a refusal; None if there is none."""
    try:
        told = json.loads(body)
    except ValueError:
        return None
    return told.get("error") if isinstance(told, dict) else None


def error_of(event: Mapping[str, Any]) -> RefusedError:
    """The exception for an `error` event, in the form of a WebSocket or of an event stream."""
    return refused(event.get("status", 503), event.get("error", event))
