"""Holds dialogues with a library in its own process, timed as a server's client times them.

The parent sends workloads and receives records, one line of JSON each; times are those of
`time.perf_counter()`, which all processes share. There is no HTTP, in the library's favour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, TextIO

# Turns of one dialogue: the tokens that come before each answer, and the answer's length.
Turns = Sequence[tuple[list[int], int]]


class Event(NamedTuple):
    """Tokens of one request."""

    at_s: float
    request_id: int
    token_ids: Sequence[int]
    is_last: bool


class Library(Protocol):
    """What is measured."""

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[Event]:
        """Work for a while; return the events."""
        ...


@dataclass(slots=True)
class _Place:
    """One of the dialogues in flight."""

    dialogue: int
    turns: Turns
    context: list[int] = field(default_factory=list)
    next_turn: int = 0


def hold(library: Library, dialogues: Sequence[Turns], concurrency: int) -> list[dict[str, Any]]:
    """Hold every dialogue to its end, `concurrency` at a time: the fields of `StreamRecord` that a
    library can fill."""
    waiting = iter(enumerate(dialogues))
    records: list[dict[str, Any]] = []
    running: dict[int, _Place] = {}

    def say(place: _Place, at_s: float) -> None:
        tokens, max_tokens = place.turns[place.next_turn]
        place.context += tokens
        request_id = len(records)
        records.append(
            {"dialogue": place.dialogue, "turn": place.next_turn, "scheduled_s": at_s,
             "prompt_tokens": len(place.context), "event_times_s": [], "event_tokens": []}
        )  # fmt: skip
        running[request_id] = place
        place.next_turn += 1
        library.submit(request_id, list(place.context), max_tokens)

    def fill(at_s: float) -> None:
        for index, turns in islice(waiting, concurrency - len(running)):
            say(_Place(index, turns), at_s)

    fill(time.perf_counter())
    while running:
        for event in library.step():
            place, record = running[event.request_id], records[event.request_id]
            record["ended_s"] = event.at_s
            if event.token_ids:
                record["event_times_s"].append(event.at_s)
                record["event_tokens"].append(len(event.token_ids))
                place.context += event.token_ids
            if not event.is_last:
                continue
            del running[event.request_id]
            free_s = time.perf_counter()
            if place.next_turn < len(place.turns):
                say(place, free_s)
            else:
                fill(free_s)
    return records


def serve(library: Library, answers: TextIO) -> None:
    """Report ready, then answer each line of standard input."""
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.perf_counter()
        records = hold(library, asked["dialogues"], asked["concurrency"])
        ended_s = time.perf_counter()
        _answer(answers, {"began_s": began_s, "ended_s": ended_s, "records": records})


def own_stdout() -> TextIO:
    """Standard output for our answers alone; libraries print to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
