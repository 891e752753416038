"""Replays a trace of agents and a person in virtual time: the real scheduler and block manager, and
a device that only says how long its steps take, or a real one.

    python -m tests.engine.scheduling.agent_replay TRACE [--part 0.25]
    python -m tests.engine.scheduling.agent_replay TRACE --model DIR --num-turns 4

With a model, a step takes the processor time that one thread took for it, so that what else the
machine does hardly counts.

A line of a trace is one turn: session, new_prompt_tokens, output_tokens, ends_in_tool_call,
pause_after_s, and, of a session's first turn, start_s. A turn's prompt is all that came before it,
and its new tokens. The pool holds a quarter of what all sessions need at their ends.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import Request, SamplingParams, Sequence
from penstock.engine.scheduling import Scheduler
from penstock.engine.startup import build_core
from penstock.load.engine import Setting

BLOCK_SIZE = 16
POOL_PART = 0.25
TENANT, PERSON = "one", "person"
RETURN_S = 10.0
# Of a step, as measured with a model of 0.4 billion weights in bf16 on one core with AMX.
STEP_S, ROW_S, PROMPT_TOKEN_S = 0.048, 0.006, 0.00085
ATTENTION_TOKENS = 1550  # a prompt token's cost doubles at this position


@dataclass
class Turn:
    session: str
    new_prompt_tokens: int
    output_tokens: int
    ends_in_tool_call: bool
    pause_after_s: float
    turn: int = 0
    start_s: float | None = None


@dataclass
class Session:
    turns: list[Turn]
    context: list[int] = field(default_factory=list)
    num_done: int = 0
    asked_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    ttfts: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    total_s: float
    num_computed: int
    ttfts: dict[str, list[float]]
    took_s: dict[str, float]

    def p99_ttft_s(self, session: str) -> float:
        ordered = sorted(self.ttfts[session])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def slowest(self, agents: Iterable[str]) -> float:
        """The slowest agent's time by the median's."""
        times = [self.took_s[name] for name in agents]
        return max(times) / statistics.median(times)


def read_trace(path: Path, *, num_turns: int | None = None) -> dict[str, list[Turn]]:
    """The turns by session, the first `num_turns` of each."""
    sessions: dict[str, list[Turn]] = {}
    for line in path.read_text().splitlines():
        turn = Turn(**json.loads(line))
        sessions.setdefault(turn.session, []).append(turn)
    return {name: turns[:num_turns] for name, turns in sessions.items()}


def num_needed(trace: dict[str, list[Turn]]) -> int:
    """Tokens of all sessions at their ends."""
    return sum(t.new_prompt_tokens + t.output_tokens for turns in trace.values() for t in turns)


class Device(Protocol):
    vocab_size: int

    def run(self, batch: Batch, live: Mapping[int, Sequence]) -> BatchResult:
        """The step's result, and how long it took.

        Args:
            live: the sequences, as they are after the step.
        """
        ...


class CostModel:
    """Says how long a step takes, and draws tokens that have not been drawn before."""

    vocab_size = 1 << 31

    def __init__(self) -> None:
        self._next_token = 1 << 30

    def run(self, batch: Batch, live: Mapping[int, Sequence]) -> BatchResult:
        token_ids: dict[int, tuple[int, ...]] = {}
        compute_s = STEP_S if batch.scheduled else 0.0
        for item in batch.scheduled:
            sequence = live[item.seq_id]
            compute_s += ROW_S
            if item.num_new_tokens > 1:
                middle = sequence.num_computed_tokens - item.num_new_tokens / 2
                cost_s = PROMPT_TOKEN_S * (1 + middle / ATTENTION_TOKENS)
                compute_s += item.num_new_tokens * cost_s
            if sequence.num_in_flight_tokens:
                token_ids[item.seq_id] = (self._next_token,)
                self._next_token += 1
        return BatchResult(step=batch.step, token_ids=token_ids, compute_s=compute_s)


class RealDevice:
    """A model on one thread; a step takes its processor time."""

    def __init__(self, model: str, options: str, *, num_blocks: int) -> None:
        pool = f"--num-blocks {num_blocks} --max-model-len {num_blocks * BLOCK_SIZE}"
        words = f"{options} {pool} --num-host-blocks 0 --block-size {BLOCK_SIZE}"
        self._core, info = build_core(Setting.parse(words).config(model, num_threads=1))
        self.vocab_size = info.vocab_size

    def run(self, batch: Batch, live: Mapping[int, Sequence]) -> BatchResult:
        began_s = time.process_time()
        result = self._core._executor.submit(batch).result()
        return msgspec.structs.replace(result, compute_s=time.process_time() - began_s)


class Replay:
    """One run of a trace.

    Args:
        knows_sessions: requests say their session and whether it is an agent's, and turns that end
            in a tool call are kept.
        device: default: a cost model.
    """

    def __init__(
        self,
        trace: dict[str, list[Turn]],
        *,
        pool_tokens: int,
        knows_sessions: bool = True,
        device: Device | None = None,
    ) -> None:
        self.now_s = 0.0
        self._device = device or CostModel()
        self.blocks = BlockManager(
            num_blocks=pool_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE, clock=lambda: self.now_s
        )
        self.scheduler = Scheduler(
            SchedulerConfig(),
            self.blocks,
            eos_token_ids=(),
            max_model_len=pool_tokens // BLOCK_SIZE * BLOCK_SIZE,
            clock=lambda: self.now_s,
        )
        self._knows_sessions = knows_sessions
        self._sessions: dict[str, Session] = {}
        self._due: list[tuple[float, str]] = []
        self._next_token = 0
        self.num_computed = 0
        for name, turns in trace.items():
            start_s = turns[0].start_s or 0.0
            self._sessions[name] = Session(turns, began_s=start_s)
            heapq.heappush(self._due, (start_s, name))

    def run(self) -> Outcome:
        self._measure()
        while self._due or self.scheduler.has_work():
            while self._due and self._due[0][0] <= self.now_s:
                self._ask(*heapq.heappop(self._due))
            batch = self.scheduler.schedule()
            if batch.scheduled or batch.left_seq_ids:
                self._step(batch)
            elif self._due:
                self.now_s = max(self._due[0][0], self.now_s)
            else:
                assert not self.scheduler.num_waiting, "somebody waits, and nobody is served"
        return Outcome(
            total_s=self.now_s,
            num_computed=self.num_computed,
            ttfts={name: each.ttfts for name, each in self._sessions.items()},
            took_s={name: each.ended_s - each.began_s for name, each in self._sessions.items()},
        )

    def _measure(self) -> None:
        """Have the scheduler know how fast prompts are computed, as after a server's first one."""
        params = SamplingParams(max_tokens=1)
        prompt = tuple(self._fresh(256))
        self.scheduler.add(
            Request(
                request_id="first", prompt_token_ids=prompt, sampling_params=params, tenant=TENANT
            )
        )
        self._step(self.scheduler.schedule())
        self.now_s, self.num_computed = 0.0, 0

    def _fresh(self, count: int) -> list[int]:
        first, self._next_token = self._next_token, self._next_token + count
        return [each % self._device.vocab_size for each in range(first, first + count)]

    def _ask(self, due_s: float, name: str) -> None:
        session = self._sessions[name]
        turn = session.turns[session.num_done]
        session.context += self._fresh(turn.new_prompt_tokens)
        session.asked_s = due_s
        settings: dict[str, Any] = {}
        if self._knows_sessions:
            before = session.turns[: session.num_done][-1:]
            settings = {"session": name, "is_agent": any(t.ends_in_tool_call for t in before)}
        self.scheduler.add(
            Request(
                request_id=f"{name}/{session.num_done}",
                prompt_token_ids=tuple(session.context),
                sampling_params=SamplingParams(
                    max_tokens=turn.output_tokens, min_tokens=turn.output_tokens
                ),
                arrival_s=due_s,
                tenant=TENANT,
                **settings,
            )
        )

    def _step(self, batch: Batch) -> None:
        result = self._device.run(batch, self.scheduler._running_set.live)
        self.now_s += result.compute_s
        prompts = [each.num_new_tokens for each in batch.scheduled if each.num_new_tokens > 1]
        self.num_computed += sum(prompts)
        for output in self.scheduler.update(batch, result):
            name, _, _ = output.request_id.partition("/")
            session = self._sessions.get(name)
            if session is None:
                continue
            turn = session.turns[session.num_done]
            if output.token_ids:
                if len(session.ttfts) == session.num_done:
                    session.ttfts.append(self.now_s - session.asked_s)
                session.context += output.token_ids
            if output.is_last:
                if self._knows_sessions and turn.ends_in_tool_call:
                    self.scheduler.hold(output.request_id, RETURN_S)
                session.num_done += 1
                session.ended_s = self.now_s
                if session.num_done < len(session.turns):
                    heapq.heappush(self._due, (self.now_s + turn.pause_after_s, name))


def report(
    trace: dict[str, list[Turn]], *, pool_tokens: int, knows_sessions: bool, device: Device
) -> str:
    settings: Any = {
        "pool_tokens": pool_tokens, "knows_sessions": knows_sessions, "device": device
    }  # fmt: skip
    outcome = Replay(trace, **settings).run()
    agents = [name for name in trace if name != PERSON]
    alone_s = Replay({PERSON: trace[PERSON]}, **settings).run().p99_ttft_s(PERSON)
    ttft_s = outcome.p99_ttft_s(PERSON)
    return (
        f"{outcome.total_s:6.0f} s, {outcome.num_computed:9,} tokens of prompts computed, "
        f"person's p99 TTFT {ttft_s:.2f} s ({ttft_s / alone_s:.2f} times alone), "
        f"slowest agent {outcome.slowest(agents):.2f} times the median"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("trace", type=Path)
    add("--part", type=float, default=POOL_PART, help="of the need, the pool")
    add("--num-turns", type=int, help="of each session, from its start; default: all")
    add("--model", help="a real device's; default: a cost model")
    add("--options", default="", help="of penstock serve, for the model")
    add("--sessions", choices=["with", "without"], nargs="+", default=["without", "with"])
    args = parser.parse_args()
    trace = read_trace(args.trace, num_turns=args.num_turns)
    pool_tokens = int(num_needed(trace) * args.part)
    device: Device = CostModel()
    if args.model:
        num_blocks = pool_tokens // BLOCK_SIZE
        device = RealDevice(args.model, args.options, num_blocks=num_blocks)
    for sessions in args.sessions:
        told = report(
            trace, pool_tokens=pool_tokens, knows_sessions=sessions == "with", device=device
        )
        print(f"{sessions} sessions: {told}", flush=True)


if __name__ == "__main__":
    main()
