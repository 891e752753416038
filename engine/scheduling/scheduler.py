"""Iteration-level scheduling: which sequences compute how many tokens in the next step.

One counter, no phases: each step a sequence's `num_computed_tokens` catches up with `num_tokens`,
within a budget of tokens and sequences. Chunked prefill, prefix hits, decode and the return of a
preempted sequence are all the same operation. Running sequences come first, so decode never
starves; the rest of the budget goes to waiting sequences, in the order of `waiting_queue`. While
other tenants are active, a tenant gets neither the last slots (`tenant_slots`) nor all of a step
for its prompts (`prefill_budget`), and beside a tenant that has far fewer sequences or shorter
prompts only a part of each step (`heavy_tenants`).

Source: Orca (Yu et al., OSDI 2022) for iteration-level scheduling; Sarathi-Serve (Agrawal et al.,
OSDI 2024) for chunked prefill; the single counter is vLLM v1's.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

import msgspec

from penstock.engine.batch import Batch, BatchResult, ScheduledSequence, SequenceEntry
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError, InvalidRequestError, PromptTooLongError
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.request import (
    Notice,
    Request,
    RequestOutput,
    Sequence,
    SequenceStatus,
    num_blocks_needed,
)
from penstock.engine.scheduling.heavy_tenants import (
    MANY_TOKENS_PER_S,
    HeavyTenants,
    with_long_prompts,
)
from penstock.engine.scheduling.output_processor import (
    LiveRequest,
    OutputProcessor,
    StopRule,
)
from penstock.engine.scheduling.preemption import PreemptionCosts
from penstock.engine.scheduling.prefill_budget import prefill_budgets, step_budget
from penstock.engine.scheduling.running_set import RunningSet, SchedulerCounters
from penstock.engine.scheduling.sessions import SHORT_PROMPT_TOKENS, Sessions
from penstock.engine.scheduling.waiting_queue import QueueStats, ServiceOrder, WaitingQueue
from penstock.engine.speculative.policy.drafting import Drafting


class Scheduler:
    """Holds every live request and plans one batch at a time.

    Args:
        blocks: the KV blocks of both tiers.
        eos_token_ids: ids that end a text.
        max_model_len: maximum number of prompt and output tokens; the pool must hold as many.
        block_move_s: seconds to move a block between the tiers, as measured at start.
        num_verify_rows: tokens that a step computes in about the time of one: the room for drafts.
        pooling: what the model can do.
        num_microbatches: steps that stages of the model compute at once, each for other sequences
            (Huang et al., "GPipe", 2019): a sequence's next token is planned when the last is
            known. With 1 it is planned at once.
        clock: seconds, the clock of requests' `arrival_s`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        block_move_s: float = 0.0,
        num_verify_rows: int = 8,
        pooling: ModelPooling | None = None,
        has_bidirectional_images: bool = False,
        num_microbatches: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._pooling = pooling or ModelPooling()
        self.blocks, self._block_size = blocks, blocks.block_size
        self.counters = SchedulerCounters()
        self._config = config
        self._limits = RequestLimits(
            config=config,
            max_model_len=max_model_len,
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            pooling=self._pooling,
            has_bidirectional_images=has_bidirectional_images,
        )
        self._has_bidirectional_images = has_bidirectional_images
        self._stop_rule = StopRule(eos_token_ids=eos_token_ids, max_model_len=max_model_len)
        self._costs = PreemptionCosts(config.preemption, block_move_s=block_move_s)
        order = ServiceOrder(config.scheduling_policy, aging_s=config.priority_aging_s, clock=clock)
        self._sessions = Sessions(blocks, self._costs, clock)
        self._running_set = RunningSet(
            blocks,
            WaitingQueue(order),
            self._costs,
            self.counters,
            self._sessions,
            max_num_seqs=config.max_num_seqs,
            clock=clock,
        )
        self._requests: dict[str, LiveRequest] = {}
        self.drafting = Drafting(
            config,
            blocks,
            self._stop_rule.num_tokens_left,
            num_verify_rows=num_verify_rows,
        )
        self._output_processor = OutputProcessor(
            self._requests,
            self._running_set,
            self._stop_rule,
            self.counters,
            self.drafting,
        )
        self._heavy_tenants = HeavyTenants(num_verify_rows)
        self._notices: list[RequestOutput] = []
        self._planned: dict[int, ScheduledSequence] = {}  # the last step, by seq_id
        self._items: tuple[ScheduledSequence, ...] = ()  # the same
        self._spares_core = False  # the same step
        self._queue_stats = QueueStats(self._running_set.waiting, clock)

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running_set.running)

    @property
    def num_waiting(self) -> int:
        return len(self._running_set.waiting)

    @property
    def num_tokens_waiting(self) -> int:
        return self._running_set.waiting.num_tokens

    @property
    def queue_tokens_per_s(self) -> float:
        """Rate of prompt tokens leaving a non-empty queue; 0 if not measured yet."""
        return self._queue_stats.tokens_per_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of steps that compute prompts; 0 before the first."""
        return self._costs.prefill_tokens_per_s

    def slots(self) -> tuple[int, int]:
        """Token slots of the running sequences' blocks, and how many of them hold no token."""
        running = self._running_set.running.values()
        num_slots = sum(map(self.blocks.num_slots, running))
        return num_slots, num_slots - sum(each.num_computed_tokens for each in running)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_work(self) -> bool:
        """Whether a step would do anything, even if only to make the device forget sequences."""
        return bool(self._requests) or self._running_set.has_left

    def add(self, request: Request) -> None:
        """Add a request.

        Raises:
            InvalidRequestError: it can never be served; it was not added.
        """
        self.check(request)
        live = self._output_processor.start(request)
        if request.pooling is not None and self._pooling.needs_every_token:
            for sequence in live.sequences.values():
                sequence.needs_every_token = True
        self._queue_stats.add(request)
        self.counters.prompt_tokens += len(request.prompt_token_ids)

    def check(self, request: Request) -> None:
        """Raise `InvalidRequestError` if a request can never be served."""
        try:
            if request.request_id in self._requests:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use")
            self._limits.check(request)
        except InvalidRequestError:
            self.counters.num_refused += 1
            raise

    def abort(self, request_id: str, *, index: int | None = None) -> None:
        """Drop a request, or one of its samples; its blocks are free when this returns. Unknown
        ids, and samples that have ended, are ignored."""
        live = self._requests.get(request_id)
        if live is not None:
            live.abort(index)

    def hold(self, request_id: str, return_s: float) -> None:
        """Keep what a request left for a while, since its session is expected back within
        `return_s` seconds (`Sessions.hold`)."""
        self._sessions.hold(request_id, return_s)

    # -- the step ---------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step and count its tokens as computed. The plan may be empty."""
        if self._is_repeated():
            for sequence in self._running_set.running.values():
                self._advance(sequence, 1)
        else:
            self._planned = self._plan()
            self._items = tuple(self._planned.values())
        drafting = self.drafting
        has_room = bool(drafting.drafted) and len(self._items) < drafting.num_verify_rows
        if has_room:
            drafting.step += 1
            if drafting.step >= drafting.next_step and drafting.add_drafts(self._planned):
                self._items = tuple(self._planned.values())
        self.counters.num_steps += bool(self._items)
        return Batch(
            step=self.counters.num_steps,
            scheduled=self._items,
            left_seq_ids=self._running_set.take_left(),
            moves=self.blocks.take_moves(),
            wants_forced=has_room and drafting.step >= drafting.next_question,
            spares_core=self._spares_core,
        )

    def update(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """Process a step's result; the outputs for clients."""
        self._costs.observe(batch, result)
        drafting = self.drafting
        has_drafts = drafting.num_with_drafts or drafting.has_forced
        if has_drafts or result.num_masks or result.forced_token_ids:
            drafting.observe(batch, result)
        outputs: list[RequestOutput] = []
        if self._notices:
            outputs = [each for each in self._notices if each.request_id in self._requests]
            self._notices = []
        outputs += self._queue_stats.update()
        outputs += self._output_processor.process(batch, result)
        return outputs

    # -- planning ---------------------------------------------------------------------------

    def _is_repeated(self) -> bool:
        """Whether the next step is the last one again, as most are: one token for each of the same
        sequences, while nobody waits and nobody shares."""
        running_set = self._running_set
        running = running_set.running
        if (
            len(self._items) != len(running)
            or len(running_set.waiting)
            or self._num_microbatches > 1
            or self._spares_core
            or running_set.tenant_slots.are_several
        ):
            return False
        for item, sequence in zip(self._items, running.values(), strict=True):
            num_computed = sequence.num_computed_tokens
            is_same = item.seq_id == sequence.seq_id and item.num_new_tokens == 1
            if (
                not is_same
                or item.entry is not None
                or item.new_block_ids
                or len(sequence.token_ids) - num_computed != 1
                or sequence.num_in_flight_tokens
                or num_computed >= sequence.num_slots
                or not sequence.is_on_device
            ):
                return False
        return True

    def _plan(self) -> dict[int, ScheduledSequence]:
        scheduled: dict[int, ScheduledSequence] = {}
        self._spares_core = False
        tenant_slots = self._running_set.tenant_slots
        are_several = tenant_slots.are_several and self._num_microbatches == 1
        heavy = tenant_slots.heavy_tenants() if are_several else frozenset()
        while heavy and (victim := self._running_set.displace(heavy)) is not None:
            self._preempt(victim)
        decoding, in_prompt = self._by_phase()
        self._sessions.begin_step()
        if self._num_microbatches > 1:
            # What others in flight leave, but no more than their share: so they become alike.
            share = -(-len(decoding) // self._num_microbatches)
            decoding = [each for each in decoding if self._num_uncomputed(each) > 0][:share]
        is_awaiting = not are_several and self._sessions.awaits_turn()
        budget = step_budget(
            self._config,
            num_decoding=len(decoding),
            are_sessions=self._sessions.num_live > 0,
            is_awaiting=is_awaiting,
            are_several_tenants=are_several and not heavy,
            may_another_come=not are_several and tenant_slots.another_may_come(),
            num_microbatches=self._num_microbatches,
            prefill_tokens_per_s=self._costs.prefill_tokens_per_s,
        )
        if is_awaiting:
            budget = max(budget, self._budget_of_uncut(decoding, in_prompt))
        if heavy:
            self._fill_beside_light(scheduled, heavy, decoding, in_prompt, budget)
        elif are_several and self._config.enable_chunked_prefill:
            self._fill_beside_short(scheduled, decoding, in_prompt, budget)
        else:
            self._fill(scheduled, decoding, in_prompt, budget, {})
        if not scheduled:
            self._make_way(scheduled)
        return scheduled

    def _budget_of_uncut(self, decoding: list[Sequence], in_prompt: list[Sequence]) -> int:
        """Tokens of a step that is short but for a person's prompt."""
        head = self._running_set.waiting.peek() if self._running_set.num_free_slots > 0 else None
        num_uncut = self._sessions.num_uncut(in_prompt, head)
        is_short = num_uncut <= SHORT_PROMPT_TOKENS
        rate = self._costs.prefill_tokens_per_s
        most = step_budget(
            self._config,
            num_decoding=len(decoding),
            are_sessions=not is_short,  # another's may come
            num_microbatches=self._num_microbatches,
            # It was measured in short steps, in which each token takes longer.
            prefill_tokens_per_s=1.5 * rate if is_short else rate,
        )
        return min(most, len(decoding) + num_uncut)

    def _by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that decode, and those inside a prompt. They are scheduled in this
        order, since a fork may have been admitted after a long prompt."""
        decoding: list[Sequence] = []
        in_prompt: list[Sequence] = []
        for sequence in self._running_set.running.values():
            has_more = len(sequence.token_ids) - sequence.num_computed_tokens > 1
            (in_prompt if has_more else decoding).append(sequence)
        return decoding, in_prompt

    def _fill_beside_light(
        self,
        scheduled: dict[int, ScheduledSequence],
        heavy: Set[str],
        decoding: list[Sequence],
        in_prompt: list[Sequence],
        budget: int,
    ) -> None:
        """Schedule a step while some tenants have far more sequences than another."""
        waiting = self._running_set.waiting
        has_free_slot = self._running_set.num_free_slots > 0

        def of(sequences: list[Sequence], *, are_heavy: bool) -> list[Sequence]:
            return [each for each in sequences if (each.request.tenant in heavy) == are_heavy]

        prompts = of(in_prompt, are_heavy=False)
        heavy_decoding, heavy_prompts = (of(each, are_heavy=True) for each in (decoding, in_prompt))
        num_heavy_tokens = sum(map(self._num_uncomputed, heavy_decoding + heavy_prompts))
        if self._heavy_tenants.may_be_left_out(num_heavy_tokens):
            head = waiting.peek(heavy) if has_free_slot else None
            if prompts or (head is not None and head.request.tenant not in heavy):
                limits = dict.fromkeys(heavy, 0)
                self._fill(scheduled, of(decoding, are_heavy=False), prompts, budget, limits)
        self._heavy_tenants.note(left_out=bool(scheduled))
        if scheduled:
            num_tokens = sum(each.num_new_tokens for each in scheduled.values())
            self._heavy_tenants.note_light(num_tokens)
            return
        self._spares_core = self._costs.prefill_tokens_per_s > MANY_TOKENS_PER_S
        served, limits = self._heavy_tenants.share(
            heavy,
            (each for each in heavy_decoding if self._num_uncomputed(each) > 0),
            have_prompts=bool(heavy_prompts) or (has_free_slot and len(waiting) > 0),
            prefill_tokens_per_s=self._costs.prefill_tokens_per_s,
        )
        if not self._config.enable_chunked_prefill:
            limits = {}
        decoding = [each for each in decoding if each.request.tenant not in heavy or each in served]
        self._fill(scheduled, decoding, in_prompt, budget, limits)

    def _fill_beside_short(
        self,
        scheduled: dict[int, ScheduledSequence],
        decoding: list[Sequence],
        in_prompt: list[Sequence],
        budget: int,
    ) -> None:
        """Schedule a step while tenants have about as many sequences each; but one may have longer
        prompts than another. Agents' turns are left to their ranks."""
        demand = Counter(self._running_set.waiting.num_tokens_of)
        for sequence in in_prompt:
            demand[sequence.request.tenant] += self._num_uncomputed(sequence)
        by_weight = self._running_set.tenant_slots.by_weight(demand)
        have_ranks = any(each.patience_s for each in in_prompt)
        long = frozenset() if have_ranks else with_long_prompts(by_weight)
        num_long_tokens = sum(demand[tenant] for tenant in long)
        if long < by_weight.keys() and self._heavy_tenants.may_be_left_out(num_long_tokens):
            short = [each for each in in_prompt if each.request.tenant not in long]
            self._fill(scheduled, decoding, short, budget, dict.fromkeys(long, 0))
        self._heavy_tenants.note(left_out=bool(scheduled))
        if scheduled:
            return
        most = (budget - len(decoding)) // 2  # others' prompts have the rest
        limits = self._heavy_tenants.prompt_limits(
            long, most=most, prefill_tokens_per_s=self._costs.prefill_tokens_per_s
        )
        self._fill(scheduled, decoding, in_prompt, budget, limits)

    def _fill(
        self,
        scheduled: dict[int, ScheduledSequence],
        decoding: list[Sequence],
        in_prompt: list[Sequence],
        budget: int,
        tenant_limits: dict[str, int],
    ) -> None:
        """Schedule running sequences, then waiting ones, within a budget of tokens.

        Args:
            tenant_limits: maximum tokens of some tenants' prompts; those scheduled are deducted.
        """
        has_preempted = False
        limits = {}
        if in_prompt:
            left_out = {tenant for tenant, limit in tenant_limits.items() if limit <= 0}
            limits = self._prompt_limits(in_prompt, budget - len(decoding), left_out)
        outranked: list[Sequence] = []
        if in_prompt and not tenant_limits:
            in_prompt, outranked = self._by_rank(in_prompt)
        spare = self._config.max_num_batched_tokens - budget  # for images that are not cut
        if not self._has_bidirectional_images:
            budget, has_preempted = self._extend_decoding(decoding, scheduled, budget)
            decoding = []
        for sequence in decoding + in_prompt:
            num_new = min(self._num_uncomputed(sequence), budget)
            if limits:
                num_new = min(num_new, limits.get(sequence.seq_id, num_new))
            if tenant_limits and num_new > 1:
                num_new = min(num_new, tenant_limits.get(sequence.request.tenant, num_new))
            if self._has_bidirectional_images and num_new > 0:
                num_new = self._uncut(sequence, num_new, room=budget + spare)
            if num_new > 1 and self._sessions.leaves_out(sequence, num_new):
                continue
            if num_new > 0:
                is_kept, num_preempted = self._extend(sequence, num_new, scheduled)
                has_preempted |= num_preempted > 0
                budget -= num_new * is_kept
                if is_kept and num_new > 1:
                    self._sessions.note_prompt(sequence, num_new)
                if tenant_limits and num_new > 1 and sequence.request.tenant in tenant_limits:
                    tenant_limits[sequence.request.tenant] -= num_new
        # Only now, since a sequence scheduled above may have been preempted by a later one. Before
        # admission, so that sequences admitted to this step can share what it computes.
        running, advance = self._running_set.running, self._advance
        for seq_id, item in scheduled.items():
            advance(running[seq_id], item.num_new_tokens)
        if outranked:
            if not has_preempted:
                budget = self._admit(scheduled, budget, spare, before=outranked[0])
            budget = self._extend_outranked(outranked, scheduled, budget, limits)
        if len(self._running_set.waiting) and not has_preempted:
            # After a preemption, a new sequence would take the blocks that the victim gave up.
            self._admit(scheduled, budget, spare, tenant_limits)

    def _by_rank(self, in_prompt: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The prompts being computed, those of sessions by rank, and those of them that come after
        the sequence to be admitted next."""
        if not any(each.patience_s for each in in_prompt) or self._has_bidirectional_images:
            return in_prompt, []
        rank = self._running_set.waiting.order.rank
        in_prompt = sorted(in_prompt, key=rank)
        head = self._running_set.waiting.peek()
        if head is None or self._running_set.num_free_slots <= 0:
            return in_prompt, []
        num_before = bisect.bisect(in_prompt, rank(head), key=rank)
        return in_prompt[:num_before], in_prompt[num_before:]

    def _prompt_limits(
        self, in_prompt: list[Sequence], budget: int, left_out: Set[str]
    ) -> dict[int, int]:
        """Maximum tokens of the prompts being computed, by seq_id, where tenants compete for the
        budget; the next sequence to be admitted competes too, if its tenant is not left out."""
        missing = {sequence: self._num_uncomputed(sequence) for sequence in in_prompt}
        head = None
        if self._running_set.num_free_slots > 0:
            head = self._running_set.waiting.peek(left_out)
        num_entering = 0 if head is None else self._num_missing(head)
        return prefill_budgets(missing, budget, entering=head, num_entering=num_entering)

    def _num_uncomputed(self, sequence: Sequence) -> int:
        if sequence.status is not SequenceStatus.RUNNING:
            return 0  # preempted earlier in this step
        num_tokens = len(sequence.token_ids)
        if sequence.num_in_flight_tokens:
            num_tokens = sequence.num_tokens
            if (
                self._num_microbatches > 1
                or sequence.params.beam_search is not None  # the search decides what comes next
                or self._stop_rule.fills(sequence, num_tokens=num_tokens)  # it is the last
                or self.drafting.awaits(sequence)
            ):
                return 0
        return num_tokens - sequence.num_computed_tokens

    def _extend_decoding(
        self, decoding: list[Sequence], scheduled: dict[int, ScheduledSequence], budget: int
    ) -> tuple[int, bool]:
        """Schedule the next token of sequences that decode; the tokens left of the budget, and
        whether any sequence was preempted for them. Most steps have only such, perhaps hundreds, so
        the common case is written out."""
        has_preempted = False
        for sequence in decoding:
            if budget <= 0:
                break
            num_computed = sequence.num_computed_tokens
            is_plain = (
                len(sequence.token_ids) - num_computed == 1
                and not sequence.num_in_flight_tokens
                and num_computed < sequence.num_slots
                and sequence.is_on_device
                and sequence.status is SequenceStatus.RUNNING
            )
            if is_plain:
                seq_id = sequence.seq_id
                scheduled[seq_id] = ScheduledSequence(seq_id=seq_id, num_new_tokens=1)
                budget -= 1
            elif self._num_uncomputed(sequence) > 0:
                is_kept, num_preempted = self._extend(sequence, 1, scheduled)
                has_preempted |= num_preempted > 0
                budget -= is_kept
        return budget, has_preempted

    def _extend(
        self, sequence: Sequence, num_new: int, scheduled: dict[int, ScheduledSequence]
    ) -> tuple[bool, int]:
        """Schedule a running sequence's next tokens, preempting others while blocks are short;
        whether the sequence still runs, and how many were preempted."""
        num_tokens = sequence.num_computed_tokens + num_new
        num_preempted = 0
        while (new_block_ids := self.blocks.grow(sequence, num_tokens)) is None:
            victim = self._running_set.choose_victim()
            scheduled.pop(victim.seq_id, None)
            self._preempt(victim)
            num_preempted += 1
            if victim is sequence:
                return False, num_preempted
        self._schedule(sequence, num_new, new_block_ids, scheduled)
        return True, num_preempted

    def _extend_outranked(
        self,
        sequences: list[Sequence],
        scheduled: dict[int, ScheduledSequence],
        budget: int,
        limits: dict[int, int],
    ) -> int:
        """Schedule more of prompts that others were admitted before; the tokens left of the budget.
        Nobody is preempted for them: what is scheduled by now has been counted as computed."""
        for sequence in sequences:
            num_new = min(self._num_uncomputed(sequence), budget)
            num_new = min(num_new, limits.get(sequence.seq_id, num_new))
            num_tokens = sequence.num_computed_tokens + num_new
            if num_new <= 0 or self._sessions.leaves_out(sequence, num_new):
                continue
            new_block_ids = self.blocks.grow_if_free(sequence, num_tokens, num_spared=0)
            if new_block_ids is not None:
                self._sessions.note_prompt(sequence, num_new)
                self._schedule(sequence, num_new, new_block_ids, scheduled)
                self._advance(sequence, num_new)
                budget -= num_new
        return budget

    def _schedule(
        self,
        sequence: Sequence,
        num_new: int,
        new_block_ids: tuple[int, ...],
        scheduled: dict[int, ScheduledSequence],
    ) -> None:
        if sequence.is_on_device:
            scheduled[sequence.seq_id] = ScheduledSequence(
                seq_id=sequence.seq_id, num_new_tokens=num_new, new_block_ids=new_block_ids
            )
        else:
            scheduled[sequence.seq_id] = self._enter(sequence, num_new)

    def _uncut(self, sequence: Sequence, num_new: int, *, room: int) -> int:
        """How many tokens to compute, `num_new` or else, so that the step ends in no image whose
        tokens see all of it; 0: the image must wait for a step with more room."""
        begin = sequence.num_computed_tokens
        end = begin + num_new
        for image in sequence.request.images:
            stop = image.offset + image.num_tokens
            if image.offset < end < stop:
                if image.offset > begin:
                    return image.offset - begin
                return stop - begin if stop - begin <= room else 0
        return num_new

    def _admit(
        self,
        scheduled: dict[int, ScheduledSequence],
        budget: int,
        spare: int = 0,
        tenant_limits: dict[str, int] | None = None,
        *,
        before: Sequence | None = None,
    ) -> int:
        """Start waiting sequences, in the queue's order, while budget, slots and blocks last; the
        tokens left of the budget.

        Args:
            spare: tokens beyond the budget, for images that are not cut.
            tenant_limits: tokens that some tenants may compute; those scheduled are deducted.
            before: only sequences that come before this one.
        """
        tenant_limits = tenant_limits or {}
        passed: set[str] = set()  # tenants that have used up their share
        held = {tenant for tenant, limit in tenant_limits.items() if limit <= 0}
        rank = self._running_set.waiting.order.rank
        while budget > 0 and self._running_set.num_free_slots > 0:
            sequence = self._running_set.waiting.peek(passed | held)
            if sequence is None or sequence.num_in_flight_tokens:
                break  # its token in flight must arrive before it re-enters
            if not self._config.enable_chunked_prefill and budget < self._num_missing(sequence):
                break
            if before is not None and rank(sequence) > rank(before):
                break
            tenant = sequence.request.tenant
            live = self._requests[sequence.request.request_id]
            if not self._running_set.may_enter(sequence, live.num_forks, is_first=not passed):
                passed.add(tenant)
                continue
            if self._sessions.has_lost_blocks(sequence):
                self._running_set.waiting.push(sequence)
                continue
            if self._sessions.leaves_out(sequence, budget):
                break
            was_parked = sequence.status is SequenceStatus.PREEMPTED or live.is_parked
            if not self._running_set.admit(sequence, num_forks=live.num_forks):
                if not self._sessions.gives_way(sequence):
                    break
                held.add(tenant)  # those behind it give way too
                continue
            if was_parked:
                self._tell(sequence, Notice.RESUMED)
            num_new = min(self._num_missing(sequence), budget)
            if tenant in tenant_limits:
                num_new = min(num_new, max(1, tenant_limits[tenant]))
            if self._has_bidirectional_images:
                num_new = self._uncut(sequence, num_new, room=budget + spare)
            if not num_new:
                break  # it runs, and its image is computed in one of the next steps
            self._sessions.note_prompt(sequence, num_new)
            scheduled[sequence.seq_id] = self._enter(sequence, num_new)
            self._advance(sequence, num_new)
            budget -= num_new
            if tenant in tenant_limits:
                tenant_limits[tenant] -= num_new
                if tenant_limits[tenant] <= 0:
                    held.add(tenant)
        return budget

    def _make_way(self, scheduled: dict[int, ScheduledSequence]) -> None:
        """Resolve a deadlock: nothing can run, and no step in flight can change that. Sequences
        that hold blocks and wait for others (beams for their siblings) are preempted one by
        one."""
        budget = self._config.max_num_batched_tokens
        while (
            not scheduled
            and len(self._running_set.waiting)
            and self._running_set.running
            and not any(each.num_in_flight_tokens for each in self._running_set.live.values())
        ):
            self._preempt(self._running_set.choose_victim())
            self._admit(scheduled, budget)

    def _num_missing(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - sequence.num_computed_tokens

    def _enter(self, sequence: Sequence, num_new: int) -> ScheduledSequence:
        """A whole sequence, which the device does not know, or has forgotten."""
        sequence.is_on_device = True
        params = sequence.params
        entry = SequenceEntry(
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            index=sequence.index,
            params=params,
            parent_seq_id=sequence.parent_seq_id,
            num_logprobs=self._requests[sequence.request.request_id].num_logprobs,
            num_prompt_logprobs=params.prompt_logprobs if sequence.wants_prompt_logprobs else None,
            is_drafted=self.drafting.enter(sequence),
            pooling=sequence.request.pooling,
            adapter=None if (adapter := sequence.request.adapter) is None else adapter.digest,
            images=sequence.request.images,
        )
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            num_new_tokens=num_new,
            new_block_ids=self.blocks.block_ids(sequence),
            entry=entry,
        )

    def _advance(self, sequence: Sequence, num_new: int) -> None:
        num_computed = sequence.num_computed_tokens + num_new
        sequence.num_computed_tokens = num_computed
        num_known = len(sequence.token_ids)
        if num_computed == num_known + sequence.num_in_flight_tokens:
            sequence.num_in_flight_tokens += 1  # the step samples the one after
        num_full = min(num_computed, num_known) // self._block_size
        if num_full > sequence.num_committed_blocks or num_computed == sequence.num_prompt_tokens:
            self.blocks.commit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_computed_tokens -= sequence.num_draft_tokens  # they may be wrong
        sequence.num_draft_tokens = 0
        is_idle = sequence.num_computed_tokens == sequence.num_tokens
        self._running_set.preempt(sequence, is_idle=is_idle)
        self._tell(sequence, Notice.PREEMPTED)

    def _tell(self, sequence: Sequence, notice: Notice) -> None:
        live = self._requests[sequence.request.request_id]
        output = live.notice(sequence, notice)
        if output is not None:
            self._notices.append(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What this engine can serve: a request that could never finish is refused at once.

    Attributes:
        max_model_len: maximum number of prompt and output tokens; the pool must hold as many.
        pooling: what the model can do.
        has_bidirectional_images: a step computes all of an image's tokens, as these see each other.

    Raises:
        ConfigError: the limits contradict each other.
    """

    config: SchedulerConfig
    max_model_len: int
    num_blocks: int
    block_size: int
    pooling: ModelPooling
    has_bidirectional_images: bool

    def __post_init__(self) -> None:
        config = self.config
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens "
                f"({config.max_num_batched_tokens}) to be at least the context "
                f"({self.max_model_len})"
            )
        capacity = self.num_blocks * self.block_size
        if capacity < self.max_model_len:
            raise ConfigError(
                f"the KV cache holds {capacity} tokens, fewer than one context of "
                f"{self.max_model_len}"
            )

    def check(self, request: Request) -> None:
        """Raise `InvalidRequestError`, with the numbers, if a request can never be served."""
        params = request.sampling_params
        task = "generate" if request.pooling is None else request.pooling.task
        if task not in self.pooling.tasks:
            raise self.pooling.refusal()
        if request.pooling is not None and params.max_tokens:
            raise InvalidRequestError("must be 0 with pooling", param="max_tokens")
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens >= self.max_model_len + (params.max_tokens == 0):
            raise PromptTooLongError(
                f"your prompt resulted in {num_tokens} tokens, which leaves no room for output.",
                max_model_len=self.max_model_len,
                param="prompt",
            )
        if request.output_token_ids and len(request.output_token_ids) >= params.max_tokens:
            raise InvalidRequestError("the output already fills max_tokens", param="max_tokens")
        if request.priority != 0 and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                "priority needs a server started with --scheduling-policy priority",
                param="priority",
            )
        if not 1e-3 <= request.weight <= 1e3:
            raise InvalidRequestError("weight must be between 0.001 and 1000", param="weight")
        most = self.config.max_num_batched_tokens - self.config.max_num_seqs + 1
        if self.has_bidirectional_images and any(each.num_tokens > most for each in request.images):
            raise InvalidRequestError(
                f"an image of this model must fit into one step, beside "
                f"{self.config.max_num_seqs - 1} sequences (--max-num-batched-tokens, "
                f"--max-num-seqs): this one has more than {most} tokens",
                param="messages",
            )
        if params.num_branches > 1 or params.beam_search is not None:
            self._check_branches(request)

    def _check_branches(self, request: Request) -> None:
        params = request.sampling_params
        if request.output_token_ids:
            raise InvalidRequestError("only a single output can be continued", param="n")
        if params.num_branches > self.config.max_num_seqs:
            raise InvalidRequestError(
                f"{params.num_branches} sequences at once are more than the "
                f"{self.config.max_num_seqs} that can run here (--max-num-seqs)",
                param="n",
            )
        num_prompt = len(request.prompt_token_ids)
        room = self.max_model_len - num_prompt
        longest = msgspec.structs.replace(
            params, max_tokens=min(params.max_tokens, room), min_tokens=0
        )
        num_blocks = num_blocks_needed(longest, num_prompt, self.block_size)
        if num_blocks > self.num_blocks:
            raise InvalidRequestError(
                f"{params.num_branches} sequences of {num_prompt} prompt and up to "
                f"{longest.max_tokens} output tokens may need {num_blocks} KV blocks of "
                f"{self.block_size} tokens, and there are {self.num_blocks}",
                param="n",
            )
