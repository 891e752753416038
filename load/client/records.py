"""What a measuring client is asked to do, and what it saw.

A `Dialogue` is the unit of a workload: one turn for most datasets, several for conversations. A
`Call` is one turn as it goes over the wire, and a `StreamRecord` what its client saw of it. Nothing
here knows a transport, a clock or a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a user says, and how long the answer is to be."""

    text: Prompt  # words, or token ids where the endpoint takes them (`/v1/completions`)
    max_tokens: int  # of the answer; exactly so many with `ignore_eos`
    ignore_eos: bool = True
    think_s: float = 0.0  # from the end of the last answer to this turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Turns that follow each other; each sees all before it.

    Attributes:
        at_s: when it starts, from the start of the run, where the dataset says so (a trace).
    """

    turns: tuple[Turn, ...]
    system: str = ""
    at_s: float | None = None


def single_turn(
    text: Prompt, max_tokens: int, *, system: str = "", at_s: float | None = None
) -> Dialogue:
    """A dialogue of one turn."""
    return Dialogue(turns=(Turn(text=text, max_tokens=max_tokens),), system=system, at_s=at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        messages: the history to send and the new turn, last; empty when `prompt_token_ids` is set.
        previous_response_id: of the answer that holds the history, which is then not sent again.
        extra: further fields of the body (sampling parameters).
    """

    model: str
    max_tokens: int
    ignore_eos: bool
    messages: tuple[Message, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    previous_response_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Fault(StrEnum):
    """What a client can see go wrong with one stream."""

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

    Attributes:
        dialogue, turn: which it was, from 0.
        scheduled_s: when the workload wanted it sent. Latencies count from here, so that a client
            that falls behind shows in them (no coordinated omission).
        event_times_s: arrival of each event that brought new text.
        event_tokens: tokens in each of these, where the server says how many; else empty.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them; -1: not said.
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
    detail: str = ""  # what a fault said, for people

    @property
    def is_clean(self) -> bool:
        return not self.faults

    def fault(self, fault: Fault, detail: str = "") -> None:
        """Note a fault, once of each kind; the first detail stays."""
        if fault not in self.faults:
            self.faults.append(fault)
        self.detail = self.detail or detail
