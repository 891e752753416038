"""From a `Call` to the JSON body of each endpoint.

Streams are always asked for, with usage. What a call says in `extra` overrides anything here, and
None leaves a field out, for servers that refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server's address."""

    is_tls: bool
    host: str
    port: int
    netloc: str  # host and port as the Host header has them
    prefix: str  # the path that the API lies below, `/v1` not included

    @classmethod
    def parse(cls, base_url: str) -> Self:
        """Of `http://host:port`, with or without `/v1`. Raises ConfigError if it is no such
        address."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is no address of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{base_url!r} is no address of a server, such as http://host:port")
        is_tls = parts.scheme == "https"
        return cls(
            is_tls=is_tls,
            host=parts.hostname,
            port=port or (443 if is_tls else 80),
            netloc=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )


Endpoint: TypeAlias = Literal["completions", "chat", "responses"]

PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
# A running count of tokens in every chunk: chunks may hold several tokens, or half of one.
_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def body_of(endpoint: Endpoint, call: Call) -> dict[str, Any]:
    """The body. Raises ConfigError if the call has what the endpoint does not take."""
    if call.prompt_token_ids and endpoint != "completions":
        raise ConfigError(f"{PATHS[endpoint]} takes no token ids; {PATHS['completions']} does")
    if call.previous_response_id is not None and endpoint != "responses":
        raise ConfigError(f"previous_response_id is of {PATHS['responses']} alone")
    body: dict[str, Any] = {"model": call.model, "stream": True}
    if endpoint == "completions":
        # It has no roles: the text so far, and the model goes on.
        text = "".join(message.content for message in call.messages)
        body["prompt"] = call.prompt_token_ids or text
        body["max_tokens"] = call.max_tokens
        body["stream_options"] = _STREAM_OPTIONS
    elif endpoint == "chat":
        body["messages"] = _messages(call)
        body["max_tokens"] = call.max_tokens
        body["stream_options"] = _STREAM_OPTIONS
    else:
        body["input"] = _messages(call)
        body["max_output_tokens"] = call.max_tokens
        if call.previous_response_id is not None:
            body["previous_response_id"] = call.previous_response_id
    if call.ignore_eos:
        body["ignore_eos"] = True
    return {name: value for name, value in {**body, **call.extra}.items() if value is not None}


def _messages(call: Call) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in call.messages]
