"""What a measuring client is asked to do, and what it saw.

A `Dialogue` is the unit of a workload: one turn in most datasets, several in conversations. A
`Call` is one turn as sent, and a `StreamRecord` is what its client saw of it. `body_of` makes
the JSON body of a call: always a stream with usage; `extra` overrides every field, and None
drops one for servers that refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from penstock.engine.errors import ConfigError

Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a user says, and how long the answer shall be."""

    text: Prompt  # words, or token ids where the endpoint takes them (`/v1/completions`)
    max_tokens: int  # of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Successive turns; each sees all before it."""

    turns: tuple[Turn, ...]
    system: str = ""


def single_turn(text: Prompt, max_tokens: int, *, system: str = "") -> Dialogue:
    """A dialogue of one turn."""
    return Dialogue(turns=(Turn(text=text, max_tokens=max_tokens),), system=system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    `messages` is the history to send, with the new turn last; it is empty if `prompt_token_ids`
    is set. `previous_response_id` names the answer whose history is not sent again. `extra` has
    further fields of the body (sampling parameters).
    """

    model: str
    max_tokens: int
    ignore_eos: bool
    messages: tuple[Message, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    previous_response_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Fault(StrEnum):
    """What a client can see go wrong in one stream."""

    UNREACHABLE = "unreachable"  # no connection
    REFUSED = "refused"  # an error before the stream began: a status of 400 or more
    FAILED = "failed"  # an error event in the stream
    CUT = "cut"  # the connection ended without a terminal event
    STALLED = "stalled"  # silent for longer than the bound
    MALFORMED = "malformed"  # not the format promised
    AFTER_END = "after_end"  # events after the terminal one
    GAP = "gap"  # a sequence number left out
    REPEAT = "repeat"  # a sequence number that had come before
    LOST_TOKENS = "lost_tokens"  # fewer tokens seen than the server counts, or than asked for
    EXTRA_TOKENS = "extra_tokens"  # more
    TEXT_DIFFERS = "text_differs"  # the deltas are not the text the terminal event states


@dataclass(slots=True, kw_only=True)
class StreamRecord:
    """One request as its client saw it. Times are seconds of `time.perf_counter()`.

    Latencies count from `scheduled_s`, when the workload wanted it sent, so that a client that
    falls behind shows in them (no coordinated omission). `event_times_s` are the arrivals of
    events with new text, and `event_tokens` the tokens in each of them, empty where the server
    does not say. Token counts are the server's; -1 means unknown.
    """

    dialogue: int = 0
    turn: int = 0
    scheduled_s: float
    sent_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    ended_s: float = 0.0  # the terminal event, or the fault
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    expected_tokens: int = -1  # what the request must give (`ignore_eos`); -1: not known
    finish_reason: str = ""  # the server's word, `""` if none came
    response_id: str = ""
    text: str = ""
    status: int = 0
    faults: list[Fault] = field(default_factory=list)
    detail: str = ""  # the details of a fault

    @property
    def is_clean(self) -> bool:
        return not self.faults

    def fault(self, fault: Fault, detail: str = "") -> None:
        """Note a fault, each kind once; the first detail is kept."""
        if fault not in self.faults:
            self.faults.append(fault)
        self.detail = self.detail or detail


# -- requests ------------------------------------------------------------------------------------


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
        """Parse `http://host:port`, with or without `/v1`. Raises ConfigError if it is invalid."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is not a server address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{base_url!r} is not a server address such as http://host:port")
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
# A token count in every chunk, since chunks may hold several tokens, or half of one.
_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def body_of(endpoint: Endpoint, call: Call) -> dict[str, Any]:
    """The body of a call. Raises ConfigError if the endpoint cannot take it."""
    if call.prompt_token_ids and endpoint != "completions":
        raise ConfigError(f"{PATHS[endpoint]} takes no token ids; {PATHS['completions']} does")
    if call.previous_response_id is not None and endpoint != "responses":
        raise ConfigError(f"previous_response_id works only with {PATHS['responses']}")
    body: dict[str, Any] = {"model": call.model, "stream": True}
    messages = [{"role": each.role, "content": each.content} for each in call.messages]
    if endpoint == "responses":
        body |= {"input": messages, "max_output_tokens": call.max_tokens}
        body["previous_response_id"] = call.previous_response_id
    else:
        body |= {"max_tokens": call.max_tokens, "stream_options": _STREAM_OPTIONS}
    if endpoint == "chat":
        body["messages"] = messages
    elif endpoint == "completions":  # it has no roles: the model continues the text
        text = "".join(message.content for message in call.messages)
        body["prompt"] = call.prompt_token_ids or text
    if call.ignore_eos:
        body["ignore_eos"] = True
    return {name: value for name, value in {**body, **call.extra}.items() if value is not None}
