"""Sends dialogues through a transport at their times, and keeps the records.

`--request-rate` and `--burstiness` mean the same as in `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from penstock.load.client.records import Call, Dialogue, Message, StreamRecord, Turn
from penstock.load.client.transport import History, Transport
from penstock.load.machine import frozen_garbage


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of dialogues in flight; the next starts when one ends.

    A slow server then gets fewer requests, so queueing does not show as it would to independent
    users.
    """

    max_concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Each dialogue starts at its own time, whatever happens to the others.

    `max_concurrency` limits the dialogues in flight. One that waits for it still counts its
    latency from its offset, where `vllm bench serve` forgets the wait.
    """

    offsets_s: tuple[float, ...]  # one for each dialogue, ascending
    max_concurrency: int | None = None


Arrivals: TypeAlias = ClosedLoop | OpenLoop


def gamma_offsets(
    num: int, *, rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """Arrivals at a constant rate with gamma-distributed gaps around 1 ÷ rate.

    The gaps are scaled so that the last arrival comes at exactly num ÷ rate: all seeds then
    offer the same load. `rate` is per second, infinite for all at once. `burstiness` is the
    shape of the gamma distribution: 1 is a Poisson process, less is burstier, more is more even,
    infinite is equal gaps.
    """
    if math.isinf(rate) or math.isinf(burstiness):
        return tuple((number + 1) / rate for number in range(num))
    gaps_s = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), num)
    return tuple(np.cumsum(gaps_s * (num / rate / gaps_s.sum())).tolist())


# -- the driver ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run's client saw."""

    records: list[StreamRecord]  # of every request sent, by dialogue and turn
    began_s: float
    ended_s: float
    client_cpu_s: float  # processor time of this process meanwhile
    num_unsent: int = 0  # turns never sent, because an earlier one of their dialogue failed

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


async def run(
    transport: Transport,
    dialogues: Sequence[Dialogue],
    *,
    arrivals: Arrivals,
    model: str,
    history: History = "full",
    extra: Mapping[str, Any] | None = None,
    ignore_eos: bool = True,
    on_end: Callable[[StreamRecord], None] | None = None,
    records: list[StreamRecord] | None = None,
) -> RunResult:
    """Hold every dialogue to its end.

    A first turn is scheduled at its offset (open loop), or when a place became free (closed
    loop, whose places are free from the start). A later turn is scheduled at the end of the
    answer before it. A turn with a fault ends its dialogue. `history` is either sent again in
    full each turn, answers included, or named by the id of the last answer. `records` gets the
    record of each request when it is sent.
    """
    on_end, records = on_end or (lambda _: None), [] if records is None else records
    speaker = _Speaker(transport, model, history, extra or {}, ignore_eos, on_end, records)
    with frozen_garbage():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if isinstance(arrivals, ClosedLoop):
            await _closed_loop(speaker, dialogues, arrivals, began_s)
        else:
            await _open_loop(speaker, dialogues, arrivals, began_s)
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    return RunResult(
        records=sorted(records, key=lambda record: (record.dialogue, record.turn)),
        began_s=began_s,
        ended_s=ended_s,
        client_cpu_s=ended_cpu_s - began_cpu_s,
        num_unsent=sum(len(dialogue.turns) for dialogue in dialogues) - len(records),
    )


@dataclass(frozen=True, slots=True)
class _Speaker:
    """Holds dialogues: everything about them except when they start."""

    transport: Transport
    model: str
    history: History
    extra: Mapping[str, Any]
    ignore_eos: bool
    on_end: Callable[[StreamRecord], None]
    records: list[StreamRecord]

    async def hold(self, index: int, dialogue: Dialogue, scheduled_s: float) -> float:
        """Hold one dialogue; return when it was over."""
        said: tuple[Message, ...] = ()
        if dialogue.system:
            said = (Message(role="system", content=dialogue.system),)
        previous_id: str | None = None
        for number, turn in enumerate(dialogue.turns):
            record = StreamRecord(dialogue=index, turn=number, scheduled_s=scheduled_s)
            if self.ignore_eos:
                record.expected_tokens = turn.max_tokens
            self.records.append(record)
            if isinstance(turn.text, str):
                said = (*said, Message(role="user", content=turn.text))
            call = self._call(turn, said, previous_id)
            record.sent_s = time.perf_counter()
            await self.transport.stream(call, record)
            self.on_end(record)
            if not record.is_clean or number + 1 == len(dialogue.turns):
                break
            if self.history == "full":
                said = (*said, Message(role="assistant", content=record.text))
            else:
                said, previous_id = (), record.response_id
            scheduled_s = record.ended_s
        return record.ended_s

    def _call(self, turn: Turn, said: tuple[Message, ...], previous_id: str | None) -> Call:
        return Call(
            model=self.model,
            max_tokens=turn.max_tokens,
            ignore_eos=self.ignore_eos,
            messages=said,
            prompt_token_ids=() if isinstance(turn.text, str) else turn.text,
            previous_response_id=previous_id,
            extra=self.extra,
        )


async def _closed_loop(
    speaker: _Speaker, dialogues: Sequence[Dialogue], arrivals: ClosedLoop, began_s: float
) -> None:
    waiting = iter(enumerate(dialogues))

    async def place() -> None:
        free_s = began_s
        for index, dialogue in waiting:  # shared: each dialogue goes to the first free place
            free_s = await speaker.hold(index, dialogue, free_s)

    async with asyncio.TaskGroup() as places:
        for _ in range(min(arrivals.max_concurrency, len(dialogues))):
            places.create_task(place())


async def _open_loop(
    speaker: _Speaker, dialogues: Sequence[Dialogue], arrivals: OpenLoop, began_s: float
) -> None:
    limit = arrivals.max_concurrency
    gate = asyncio.Semaphore(limit) if limit else nullcontext()

    async def start(index: int, dialogue: Dialogue, scheduled_s: float) -> None:
        async with gate:
            await speaker.hold(index, dialogue, scheduled_s)

    starts = zip(dialogues, arrivals.offsets_s, strict=True)
    async with asyncio.TaskGroup() as tasks:
        for index, (dialogue, offset_s) in enumerate(starts):
            await _sleep_until(began_s + offset_s)
            tasks.create_task(start(index, dialogue, began_s + offset_s))


async def _sleep_until(due_s: float) -> None:
    while True:  # event loops round their timers to a millisecond, down as well as up
        delay_s = due_s - time.perf_counter()
        if delay_s <= 0:
            return
        await asyncio.sleep(delay_s)
