"""A trace replayed through three ways to allocate KV memory, in the same bytes, without a model.

    max length             each sequence reserves the model's whole context, in one piece
    prompt + max_tokens    each reserves what it declared it may need, in one piece
    paged                  blocks as it grows: the engine's own scheduler and block manager

All three admit in order of arrival under the same budget of tokens per step, and every running
sequence gets one token a step. A reserving scheme never has to preempt; the paged one recomputes
whom it preempts. Where an output ends is known to the device alone: it samples EOS there.

Source: PagedAttention (Kwon et al., SOSP 2023), sections 3 and 6.2, figure 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling import Scheduler
from penstock.load.kv.trace import TracedRequest

_EOS, _WORD = 0, 1
_FIRST_PROMPT_TOKEN = 2

Trace = Sequence[TracedRequest]


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a replay counted, sampled while each step ran.

    Attributes:
        num_slots: tokens the pool holds.
        used: per step, slots that hold a token of a running sequence.
        allocated: per step, slots set aside for running sequences.
        running: per step, sequences running.
        num_before_preemption: sequences running when memory first forced one out.
        num_computed_tokens: the work done; what was dropped is computed again.
    """

    scheme: str
    num_slots: int
    used: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    num_finished: int = 0
    num_preemptions: int = 0
    num_before_preemption: int | None = None
    num_computed_tokens: int = 0

    def sample(self, *, used: int, allocated: int, running: int) -> None:
        self.used.append(used)
        self.allocated.append(allocated)
        self.running.append(running)

    @property
    def num_steps(self) -> int:
        return len(self.running)

    @property
    def waste(self) -> float:
        """Empty ÷ allocated slots of running sequences, summed over steps."""
        return 1.0 - sum(self.used) / sum(self.allocated)

    @property
    def utilisation(self) -> float:
        """Share of the pool that holds tokens, mean over steps."""
        return sum(self.used) / (self.num_slots * self.num_steps)

    @property
    def mean_running(self) -> float:
        return sum(self.running) / self.num_steps

    @property
    def num_held(self) -> int:
        """Sequences held at once before memory forced one out; without that, at most."""
        if self.num_before_preemption is not None:
            return self.num_before_preemption
        return max(self.running)


class ContiguousPool:
    """Token slots handed out in one piece each, from the first hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self._holes = [(0, num_slots)]  # (start, size), by start; never adjacent

    def allocate(self, size: int) -> int | None:
        """The start of a piece, or None if no hole is large enough."""
        for index, (start, hole) in enumerate(self._holes):
            if hole >= size:
                rest = [(start + size, hole - size)] if hole > size else []
                self._holes[index : index + 1] = rest
                return start
        return None

    def release(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (start, size)]):
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged


@dataclass(slots=True)
class _Reservation:
    """A running sequence of a contiguous scheme."""

    request: TracedRequest
    start: int
    size: int
    num_tokens: int
    num_computed: int = 0


class ContiguousScheme:
    """Reserves memory for a sequence's whole life before it starts.

    Args:
        reserve: slots a request sets aside.
        max_batched_tokens: tokens computed in one step.
    """

    def __init__(
        self, name: str, reserve: Callable[[TracedRequest], int], *, max_batched_tokens: int
    ) -> None:
        self.name = name
        self._reserve = reserve
        self._max_batched_tokens = max_batched_tokens

    def replay(self, trace: Trace, *, num_slots: int) -> Replay:
        """Run the trace to its end.

        Raises:
            ConfigError: one request alone reserves more than the pool.
        """
        if max(map(self._reserve, trace)) > num_slots:
            raise ConfigError(f"the pool of {num_slots} tokens cannot hold one request")
        replay = Replay(scheme=self.name, num_slots=num_slots)
        pool = ContiguousPool(num_slots)
        waiting: deque[TracedRequest] = deque()
        running: list[_Reservation] = []
        for arrived in _arrivals(trace, lambda: bool(waiting or running)):
            waiting.extend(arrived)
            self._admit(waiting, running, pool)
            replay.num_computed_tokens += self._compute(running)
            replay.sample(
                used=sum(row.num_computed for row in running),
                allocated=sum(row.size for row in running),
                running=len(running),
            )
            for row in running:
                row.num_tokens += row.num_computed == row.num_tokens  # its next token
            ended = [row for row in running if row.num_tokens == row.request.num_tokens]
            for row in ended:
                pool.release(row.start, row.size)
            running[:] = [row for row in running if row.num_tokens < row.request.num_tokens]
            replay.num_finished += len(ended)
        return replay

    def _admit(
        self, waiting: deque[TracedRequest], running: list[_Reservation], pool: ContiguousPool
    ) -> None:
        budget = self._max_batched_tokens
        budget -= sum(row.num_tokens - row.num_computed for row in running)
        while waiting and budget > 0:
            size = self._reserve(waiting[0])
            start = pool.allocate(size)
            if start is None:
                return
            request = waiting.popleft()
            running.append(_Reservation(request, start, size, request.num_prompt_tokens))
            budget -= request.num_prompt_tokens

    def _compute(self, running: list[_Reservation]) -> int:
        """Bring sequences forward, in order of admission; the tokens computed."""
        budget = self._max_batched_tokens
        for row in running:
            num_new = min(row.num_tokens - row.num_computed, budget)
            row.num_computed += num_new
            budget -= num_new
        return self._max_batched_tokens - budget


class PagedScheme:
    """The engine's scheduler and block manager, with a device that computes nothing.

    Args:
        max_tokens: declared by each request.
        max_model_len: tokens of prompt and output at most.
        max_batched_tokens: tokens computed in one step.
    """

    def __init__(
        self, *, block_size: int, max_tokens: int, max_model_len: int, max_batched_tokens: int
    ) -> None:
        self.name = f"paged, block {block_size}"
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._max_batched_tokens = max_batched_tokens

    def replay(self, trace: Trace, *, num_slots: int) -> Replay:
        """Run the trace to its end.

        Raises:
            ConfigError: the pool is smaller than one context.
        """
        num_blocks = num_slots // self._block_size
        replay = Replay(scheme=self.name, num_slots=num_blocks * self._block_size)
        # As many as there are may run, so that memory alone limits.
        scheduler = self._scheduler(num_blocks, max_num_seqs=len(trace))
        device = StandInDevice([request.num_output_tokens for request in trace])
        index = 0
        for arrived in _arrivals(trace, scheduler.has_work):
            for request in arrived:
                scheduler.add(self._request(index, request))
                index += 1
            num_running = scheduler.num_running
            batch = scheduler.schedule()
            if scheduler.counters.num_preemptions and replay.num_before_preemption is None:
                replay.num_before_preemption = num_running
            if batch.scheduled:
                allocated, empty = scheduler.slots()
                replay.sample(
                    used=allocated - empty, allocated=allocated, running=scheduler.num_running
                )
            outputs = scheduler.update(batch, device.run(batch))
            replay.num_computed_tokens += batch.num_tokens
            replay.num_finished += sum(output.is_last for output in outputs)
        replay.num_preemptions = scheduler.counters.num_preemptions
        return replay

    def _scheduler(self, num_blocks: int, *, max_num_seqs: int) -> Scheduler:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._max_batched_tokens,
            preemption="recompute",
        )
        blocks = BlockManager(
            num_blocks=num_blocks, block_size=self._block_size, enable_prefix_caching=False
        )
        return Scheduler(config, blocks, eos_token_ids=(_EOS,), max_model_len=self._max_model_len)

    def _request(self, index: int, request: TracedRequest) -> Request:
        return Request(
            request_id=str(index),
            # The prompt says to the stand-in device which request it is.
            prompt_token_ids=(_FIRST_PROMPT_TOKEN + index,) * request.num_prompt_tokens,
            sampling_params=SamplingParams(max_tokens=self._max_tokens),
            arrival_s=request.arrival,
        )


@dataclass(slots=True)
class _Row:
    num_tokens: int
    num_computed: int
    end: int  # num_tokens at which it has ended


class StandInDevice:
    """Samples a word for every sequence that is due a token, and EOS where its output ends.

    Args:
        output_lengths: of the trace's requests; the last token is EOS.
    """

    def __init__(self, output_lengths: Sequence[int]) -> None:
        self._output_lengths = output_lengths
        self._rows: dict[int, _Row] = {}

    def run(self, batch: Batch) -> BatchResult:
        for seq_id in batch.left_seq_ids:
            del self._rows[seq_id]
        sampled: dict[int, tuple[int, ...]] = {}
        for item in batch.scheduled:
            entry = item.entry
            if entry is not None:
                length = self._output_lengths[entry.token_ids[0] - _FIRST_PROMPT_TOKEN]
                self._rows[item.seq_id] = _Row(
                    num_tokens=len(entry.token_ids),
                    num_computed=entry.num_computed_tokens,
                    end=entry.num_prompt_tokens + length,
                )
            row = self._rows[item.seq_id]
            row.num_computed += item.num_new_tokens
            if row.num_computed == row.num_tokens:
                row.num_tokens += 1
                sampled[item.seq_id] = (_EOS if row.num_tokens == row.end else _WORD,)
        return BatchResult(step=batch.step, token_ids=sampled)


def _arrivals(trace: Trace, has_work: Callable[[], bool]) -> Iterator[list[TracedRequest]]:
    """Per step, who arrived since the last; idle steps are left out. Ends when all is done."""
    step, index = 0, 0
    while index < len(trace) or has_work():
        first = index
        while index < len(trace) and trace[index].arrival <= step:
            index += 1
        if index > first or has_work():
            yield list(trace[first:index])
        step += 1
