"""The actions of the core: a computation is a generator that yields actions, one at a time, and
receives the result of each. Its driver (`sync_io`, `async_io`) does the I/O.

    def steps() -> Steps[Answer]:
        answer = yield from ask(request)      # raises what went wrong
        yield Sleep(1.0)
        return answer

So every rule is written once, and tests drive it without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request over HTTP.

    Attributes:
        is_repeatable: whether sending it twice has the same effect as sending it once; if not, it
            is not sent again once it may have arrived.
        is_stream: the body of a successful answer is read in chunks.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    is_repeatable: bool = True
    is_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request.

    Attributes:
        headers: names in lower case.
        body: the whole body; empty if it is a stream.
        stream: must be read and closed; only if requested and the status is 200.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: Any = None


@dataclass(frozen=True, slots=True)
class Ask:
    """→ `Answer`. Raises UnreachableError, ConnectionLostError."""

    request: Request


@dataclass(frozen=True, slots=True)
class Dial:
    """→ an open WebSocket. Raises UnreachableError, RefusedError."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Read:
    """→ bytes of a stream (none at its end), or a message of a WebSocket. Raises
    ConnectionLostError."""

    source: Any


@dataclass(frozen=True, slots=True)
class Send:
    """→ None. Raises ConnectionLostError."""

    socket: Any
    text: str


@dataclass(frozen=True, slots=True)
class Close:
    """→ None, whatever happens."""

    source: Any


@dataclass(frozen=True, slots=True)
class Sleep:
    """→ None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Invoke:
    """→ what a tool returns. Raises whatever it raises."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Locked:
    """→ the result of `steps`, which run under the lock."""

    lock: Any
    steps: Steps[Any]


Action: TypeAlias = Ask | Dial | Read | Send | Close | Sleep | Invoke | Locked
Steps: TypeAlias = Generator[Action, Any, T]


def ask(request: Request) -> Steps[Answer]:
    answer: Answer = yield Ask(request)
    return answer


def read_bytes(stream: object) -> Steps[bytes]:
    data: bytes = yield Read(stream)
    return data


def read_text(socket: object) -> Steps[str]:
    text: str = yield Read(socket)
    return text
