"""Sends dialogues through a transport at their times, and keeps what came back.

Knows when and in what order; not what is measured of it (`report`), nor how a request goes over
the wire (`client`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.load.client.records import Call, Dialogue, Message, StreamRecord, Turn
from penstock.load.client.transport import Transport
from penstock.load.garbage import frozen_garbage
from penstock.load.workloads.arrivals import Arrivals, ClosedLoop, OpenLoop

History: TypeAlias = Literal["full", "previous_response_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """All that a run's client saw.

    Attributes:
        records: of every request sent, by dialogue and turn.
        began_s, ended_s: of the run, in the records' clock.
        client_cpu_s: processor time of this process meanwhile.
        num_unsent: turns never sent, because an earlier one of their dialogue failed.
    """

    records: list[StreamRecord]
    began_s: float
    ended_s: float
    client_cpu_s: float
    num_unsent: int = 0

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
    on_end: Callable[[StreamRecord], None] | None = None,
) -> RunResult:
    """Hold every dialogue to its end.

    A first turn is scheduled at its offset (open loop), or when its place became free (closed
    loop, which has places from the start of the run). A later turn is scheduled `think_s` after
    the answer before it ended. A turn with a fault ends its dialogue.

    Args:
        history: send all messages again each turn, the server's answers among them, or name the
            answer before by its id.
        extra: further fields of every body.
        on_end: told of each record when it has ended.
    """
    speaker = _Speaker(transport, model, history, extra or {}, on_end or _ignore)
    with frozen_garbage():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if isinstance(arrivals, ClosedLoop):
            await _closed_loop(speaker, dialogues, arrivals, began_s)
        else:
            await _open_loop(speaker, dialogues, arrivals, began_s)
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    records = sorted(speaker.records, key=lambda record: (record.dialogue, record.turn))
    return RunResult(
        records=records,
        began_s=began_s,
        ended_s=ended_s,
        client_cpu_s=ended_cpu_s - began_cpu_s,
        num_unsent=sum(len(dialogue.turns) for dialogue in dialogues) - len(records),
    )


@dataclass(frozen=True, slots=True)
class _Speaker:
    """Holds dialogues: everything about them but when they start."""

    transport: Transport
    model: str
    history: History
    extra: Mapping[str, Any]
    on_end: Callable[[StreamRecord], None]
    records: list[StreamRecord] = field(default_factory=list)

    async def hold(self, index: int, dialogue: Dialogue, scheduled_s: float) -> float:
        """One dialogue from its first turn; when it was over."""
        said: tuple[Message, ...] = ()
        if dialogue.system:
            said = (Message(role="system", content=dialogue.system),)
        previous_id: str | None = None
        for number, turn in enumerate(dialogue.turns):
            record = StreamRecord(dialogue=index, turn=number, scheduled_s=scheduled_s)
            if turn.ignore_eos:
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
            scheduled_s = record.ended_s + dialogue.turns[number + 1].think_s
            await _sleep_until(scheduled_s)
        return record.ended_s

    def _call(self, turn: Turn, said: tuple[Message, ...], previous_id: str | None) -> Call:
        return Call(
            model=self.model,
            max_tokens=turn.max_tokens,
            ignore_eos=turn.ignore_eos,
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


def _ignore(_: StreamRecord) -> None:
    """For callers that need no word of each end."""
