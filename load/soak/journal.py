"""What happened in a soak, as its actors report it. All times are `time.perf_counter()`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self, TypeAlias

from penstock.load.client.records import Fault, StreamRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One stream that ran to its end, or was left by its client."""

    actor: str  # the kind of client
    began_s: float
    ended_s: float
    survives_kills: bool  # it had begun, and its client can resume it
    faults: tuple[Fault, ...]
    detail: str

    @classmethod
    def of(
        cls, record: StreamRecord, actor: str, *, ended_s: float, is_resumable: bool = False
    ) -> Self:
        return cls(
            actor=actor,
            began_s=record.scheduled_s,
            ended_s=ended_s,
            survives_kills=is_resumable and bool(record.response_id),
            faults=tuple(record.faults),
            detail=f"{record.detail}; {len(record.event_times_s)} events with text before",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A failure that is not a fault of a stream."""

    actor: str
    at_s: float
    detail: str


Point: TypeAlias = tuple[float, float]  # when, and how long


@dataclass(slots=True, kw_only=True)
class Probing:
    """What a separate process saw of the server meanwhile: when, and how long."""

    health: list[Point] = field(default_factory=list)  # from a question to its answer
    gaps: list[Point] = field(default_factory=list)  # of streams, from one event to the next
    lags: list[Point] = field(default_factory=list)  # how late the event loop of that process was
    streams: list[Outcome] = field(default_factory=list)


class Kind(StrEnum):
    """What an attack does to a server, one kind at a time."""

    CALM = "nothing"  # the traffic alone, to compare with
    LARGE_PROMPTS = "4 MB prompts"
    UNDRAINED_LOG = "undrained log"
    KILL = "kill"
    SILENCE = "silent handshakes"
    PIPELINE = "flood of pipelined requests"
    CONNECTIONS = "flood of connections"
    TRAILERS = "flood of trailers"
    PLAIN_TEXT = "250 KB of plain text"  # to compare the next four with
    TOOL_SCHEMAS = "tool schemas of 215 KB"
    RESPONSE_FORMATS = "response formats of 151 KB"
    DEEP_SCHEMAS = "anyOf 10 deep"
    TINY_MESSAGES = "4,096 tiny messages"
    GRAMMARS = "flood of grammars"
    STORE = "flood of stored items"
    IMAGE_HOST = "host that sends bytes one by one"
    IDLE_PEERS = "idle peers of an engine"
    FREEZE = "freeze"
    FREEZE_ENGINE = "freeze of the engine"
    FREEZE_REDIS = "freeze of Redis"

    @classmethod
    def freezes(cls) -> tuple[Kind, ...]:
        return cls.FREEZE, cls.FREEZE_ENGINE, cls.FREEZE_REDIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversity:
    """One application of an attack. What was killed or frozen is back when it ends."""

    kind: Kind
    began_s: float
    ended_s: float
    victim: str = ""  # the affected process, if it was one; all but an `engine` hold streams

    @property
    def is_outage(self) -> bool:
        return self.kind is Kind.KILL or self.kind in Kind.freezes()


@dataclass(slots=True)
class Journal:
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    adversities: list[Adversity] = field(default_factory=list)
    num_done: Counter[str] = field(default_factory=Counter)  # acts by the actor's name
    num_open: int = 0  # streams that a client waits for now

    @property
    def outages(self) -> list[Adversity]:
        """Kills and freezes."""
        return [each for each in self.adversities if each.is_outage]

    def of(self, kind: Kind) -> list[Adversity]:
        return [each for each in self.adversities if each.kind is kind]

    @contextlib.contextmanager
    def applying(self, kind: Kind, victim: str = "") -> Iterator[None]:
        """Note what is done in the block, unless it fails."""
        began_s = time.perf_counter()
        yield
        self.adversities.append(
            Adversity(kind=kind, victim=victim, began_s=began_s, ended_s=time.perf_counter())
        )

    @contextlib.contextmanager
    def stream(self, actor: str, *, is_resumable: bool = False) -> Iterator[StreamRecord]:
        """The record of a stream while it runs; its outcome is noted at its end, even if its
        client left."""
        record = StreamRecord(scheduled_s=time.perf_counter())
        self.num_open += 1
        try:
            yield record
        finally:
            self.num_open -= 1
            ended_s = time.perf_counter()
            self.outcomes.append(
                Outcome.of(record, actor, ended_s=ended_s, is_resumable=is_resumable)
            )

    def problem(self, actor: str, detail: str) -> None:
        self.problems.append(Problem(actor=actor, at_s=time.perf_counter(), detail=detail))
