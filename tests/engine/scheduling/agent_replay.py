"""Replays a trace of agents and a person in virtual time: the real scheduler and block manager, and
a device that only says how long its steps take.

    python -m tests.engine.scheduling.agent_replay TRACE [--part 0.25]

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling import Scheduler

BLOCK_SIZE = 16
POOL_PART = 0.25
TENANT, PERSON = "one", "person"
RETURN_S = 10.0
# Of a step, as measured with a model of half a billion weights on two cores.
STEP_S, ROW_S, PROMPT_TOKEN_S = 0.024, 0.001, 0.002
ATTENTION_TOKENS = 8192  # a prompt token's cost doubles at this position


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


def read_trace(path: Path) -> dict[str, list[Turn]]:
    sessions: dict[str, list[Turn]] = {}
    for line in path.read_text().splitlines():
        turn = Turn(**json.loads(line))
        sessions.setdefault(turn.session, []).append(turn)
    return sessions


def num_needed(trace: dict[str, list[Turn]]) -> int:
    """Tokens of all sessions at their ends."""
    return sum(t.new_prompt_tokens + t.output_tokens for turns in trace.values() for t in turns)


class Replay:
    """One run of a trace.

    Args:
        knows_sessions: requests say their session and whether it is an agent's, and turns that end
            in a tool call are kept.
    """

    def __init__(
        self,
        trace: dict[str, list[Turn]],
        *,
        pool_tokens: int,
        knows_sessions: bool = True,
    ) -> None:
        self.now_s = 0.0
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
            if batch.scheduled:
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
            Request(request_id="first", prompt_token_ids=prompt, sampling_params=params)
        )
        batch = self.scheduler.schedule()
        token_ids = {batch.scheduled[0].seq_id: (0,)}
        compute_s = STEP_S + ROW_S + 256 * PROMPT_TOKEN_S
        self.scheduler.update(
            batch, BatchResult(step=batch.step, token_ids=token_ids, compute_s=compute_s)
        )

    def _fresh(self, count: int) -> list[int]:
        first, self._next_token = self._next_token, self._next_token + count
        return list(range(first, first + count))

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
        live = self.scheduler._running_set.live
        token_ids: dict[int, tuple[int, ...]] = {}
        compute_s = STEP_S
        for item in batch.scheduled:
            sequence = live[item.seq_id]
            compute_s += ROW_S
            if item.num_new_tokens > 1:
                middle = sequence.num_computed_tokens - item.num_new_tokens / 2
                cost_s = PROMPT_TOKEN_S * (1 + middle / ATTENTION_TOKENS)
                compute_s += item.num_new_tokens * cost_s
                self.num_computed += item.num_new_tokens
            if sequence.num_in_flight_tokens:
                token_ids[item.seq_id] = tuple(self._fresh(1))
        self.now_s += compute_s
        result = BatchResult(step=batch.step, token_ids=token_ids, compute_s=compute_s)
        for output in self.scheduler.update(batch, result):
            name, _, _ = output.request_id.partition("/")
            session = self._sessions[name]
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


def report(trace: dict[str, list[Turn]], *, part: float, knows_sessions: bool) -> str:
    need = num_needed(trace)
    settings: Any = {"pool_tokens": int(need * part), "knows_sessions": knows_sessions}
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
    parser.add_argument("trace", type=Path)
    parser.add_argument("--part", type=float, default=POOL_PART, help="of the need, the pool")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    for knows_sessions in (False, True):
        print(
            f"{'with' if knows_sessions else 'without'} sessions:",
            report(trace, part=args.part, knows_sessions=knows_sessions),
        )


if __name__ == "__main__":
    main()
