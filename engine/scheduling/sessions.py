"""Sessions whose next turn is expected: what is kept for them, and who goes first within a tenant.

**Holds.** A turn that ended in a tool call is usually followed by the next one within seconds: the
same prompt, and some tokens more. Keeping its blocks is worth what computing them again would cost,
times the chance that its session comes back, which falls exponentially. A hold lasts until that
product is a twentieth of a block's cheapest computation; the hold that ends first is the first to
be evicted (`EvictionOrder`). Long prefixes cost more, and blocks that the host tier has too only
have to be loaded. Beside agents, a tenant's persons are kept as well: they come back more slowly,
and their blocks are evicted last. What an agent leaves with its answer is not kept.

**Order.** Holds alone help little where sessions do not fit: each would take the blocks of the next
one. So within a tenant persons go first, then agents whose blocks are there, then those whose
blocks are gone. Beside agents, persons who were here before also pass sessions that begin, up to
`_PERSON_LEAD_S`: these may be agents' too. A step in which a person's prompt ends computes nothing
of agents' prompts, which would make it longer. An agent leaves persons' blocks alone, and one whose
blocks are gone those of other agents, except once in a while: taking them may use one part in
`_SPACING + 1` of the time. Nothing is pinned: whoever has waited for its patience, or finds nothing
running, takes what it needs, and a running sequence always does.

**Short steps.** Whoever comes waits for the step under way, which may take longer than a person's
prompt. All steps short would cost a tenth of the time, so they are short only while somebody is
likely to come: a person beside agents, from a part of the usual pause on, or, while several
sessions are here, a new one soon after another (`awaits_turn`). A person's prompt is not cut for
that (`num_uncut`).

Source: of the trade, InferCept (Abhyankar et al., ICML 2024) and Continuum (Li et al., 2025), which
keep the KV of agents for limited times.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TypeVar

from penstock.engine.blocks import BlockManager
from penstock.engine.blocks.prefix_cache import CachedBlock, Hold
from penstock.engine.request import Request, Sequence
from penstock.engine.scheduling.preemption import PreemptionCosts
from penstock.engine.scheduling.waiting_queue import is_returning

_PART_LEFT = 0.05  # of sessions, that are not back after the time in which they are expected
_LEAST_WORTH = 0.05  # of computing a block of a prompt's start; less is not worth a hold
_ATTENTION_TOKENS = 8192  # about where a token costs twice as much as at the start
_PERSON_RETURN_S = 60.0  # in which a person is expected, while agents of its tenant are active
_AGENTS_S = 60.0  # for which a tenant's agents count as active after a turn
_MAX_RETURN_S = 60.0  # learned from a session's own returns
# A sequence goes before those of its tenant that came earlier by less than the difference.
_WARM_PATIENCE_S, _COLD_PATIENCE_S = 60.0, 600.0
_PERSON_LEAD_S = 120.0  # of persons who were here before, beside agents
_NEW_PATIENCE = 5.0  # times what a session's first prompt takes to compute
_WAITING_S = 30.0  # how much longer a hold lasts at least once its session waits
_SPACING = 2.0  # times what an agent's prompt cost that took others' blocks, until the next may
_ONE_SPARED_OF = 16  # blocks; left by agents to what runs and to persons
_MAX_ENDED, _MAX_AWAY, _MAX_SESSIONS, _MAX_TENANTS = 256, 256, 4096, 1024
# When a person is likely to come, by the usual pause, and where that is not known.
_FROM_PAUSE, _UNTIL_PAUSE, _FIRST_PAUSE_S = 1 / 3, 3.0, 20.0
_BEGINNING_S = 5.0  # after a session's first turn, in which others are likely to begin
SHORT_PROMPT_TOKENS = 512  # a message; agents begin with thousands of tokens


@dataclass(slots=True)
class _Session:
    ended_s: float = 0.0  # its last turn
    gap_s: float | None = None  # how soon the next ones came
    is_persons: bool = False  # it came back after an answer


@dataclass(slots=True)
class _Tenant:
    agents_s: float = -math.inf  # when a turn last ended in a tool call
    next_take_s: float = -math.inf  # from when an agent may take the blocks kept for others


class Sessions:
    """Holds what sessions left, ranks their turns, and admits agents'.

    Args:
        costs: tell how fast prompts are computed, and blocks are moved.
        clock: seconds, the clock of requests' `arrival_s`.

    Attributes:
        num_live: sequences with a session that wait, run or are parked.
    """

    def __init__(
        self, blocks: BlockManager, costs: PreemptionCosts, clock: Callable[[], float]
    ) -> None:
        self.num_live = 0
        self._blocks = blocks
        self._costs = costs
        self._clock = clock
        # What the last turns left, by request, and the hold on it, if there is one.
        self._ended: OrderedDict[str, tuple[Request, list[CachedBlock], Hold | None]] = (
            OrderedDict()
        )
        self._known: OrderedDict[str, _Session] = OrderedDict()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._num_agents = Counter[str]()  # live ones, by tenant
        # Tenants with a person's prompt that ends in this step, and whether there may be any.
        self._hurried: set[str] = set()
        self._may_leave_out = self._has_left_out = False
        # Persons beside agents, until their next prompt is computed: from when and until when each
        # is likely to come.
        self._away: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._began_s = -math.inf  # a session's first turn

    def enter(self, request: Request) -> None:
        """Count a sequence that lives from now on."""
        self.num_live += bool(request.session)
        if request.is_agent:
            self._num_agents[request.tenant] += 1

    def leave(self, request: Request) -> None:
        """Count one that does not any more."""
        self.num_live -= bool(request.session)
        if request.is_agent:
            self._num_agents[request.tenant] -= 1
            if not self._num_agents[request.tenant]:
                del self._num_agents[request.tenant]

    def _has_agents(self, tenant: str) -> bool:
        """Whether agents of a tenant are active."""
        if self._num_agents[tenant]:
            return True
        known = self._tenants.get(tenant)
        return known is not None and self._clock() < known.agents_s + _AGENTS_S

    # -- holds ------------------------------------------------------------------------------

    def end(self, request: Request, contents: list[CachedBlock]) -> None:
        """A turn has ended and left these contents. Whether in a tool call, `hold` says later."""
        known = self._known.get(request.session) or _Session()
        known.ended_s = self._clock()
        self._away.pop(request.session, None)
        _put(self._known, request.session, known, _MAX_SESSIONS)
        hold = None
        # Nobody waits for what an agent answered at its end, until somebody has come back to it.
        if (known.is_persons or not request.is_agent) and self._has_agents(request.tenant):
            hold = self._hold(request, contents, return_s=_PERSON_RETURN_S, is_persons=True)
            from_s, until_s = 0.0, _FIRST_PAUSE_S
            if known.gap_s is not None:
                from_s = _FROM_PAUSE * known.gap_s
                until_s = min(_UNTIL_PAUSE * known.gap_s, _MAX_RETURN_S)
            likely = known.ended_s + from_s, known.ended_s + until_s
            _put(self._away, request.session, likely, _MAX_AWAY)
        _put(self._ended, request.request_id, (request, contents, hold), _MAX_ENDED)

    def hold(self, request_id: str, return_s: float) -> None:
        """A turn ended in a tool call; nothing happens if that was too long ago, or it had no
        session.

        Args:
            return_s: within which 95 % of such sessions come back; of one that is known to take
                longer, what it took counts.
        """
        ended = self._ended.pop(request_id, None)
        if ended is None:
            return
        request, contents, hold = ended
        self._away.pop(request.session, None)
        if hold is not None:
            self._blocks.end_hold(hold)
        self._tenant(request.tenant).agents_s = self._clock()
        known = self._known.get(request.session)
        if known is not None and known.gap_s is not None:
            return_s = max(return_s, min(known.gap_s * -math.log(_PART_LEFT), _MAX_RETURN_S))
        self._hold(request, contents, return_s=return_s, is_persons=False)

    def _hold(
        self, request: Request, contents: Ordered[CachedBlock], *, return_s: float, is_persons: bool
    ) -> Hold | None:
        worth = self._worth(contents)
        if worth <= _LEAST_WORTH:
            return None
        return self._blocks.hold(
            contents,
            tenant=request.tenant,
            is_persons=is_persons,
            duration_s=return_s * math.log(worth / _LEAST_WORTH) / -math.log(_PART_LEFT),
        )

    def _worth(self, contents: Ordered[CachedBlock]) -> float:
        """What a block costs on average if it is evicted, by what computing one at a prompt's
        start costs."""
        if not contents:
            return 0.0
        size = self._blocks.block_size
        compute = 1.0 + len(contents) * size / 2 / _ATTENTION_TOKENS
        rate, move_s = self._costs.prefill_tokens_per_s, self._costs.block_move_s
        load = min(compute, move_s * rate / size) if rate else compute
        num_saved = sum(block.host_id is not None for block in contents)
        return compute + (load - compute) * num_saved / len(contents)

    # -- who goes first ---------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A session's turn begins to wait."""
        request = sequence.request
        known = self._known.get(request.session)
        if known is not None:
            gap_s = max(0.0, request.arrival_s - known.ended_s)
            known.gap_s = gap_s if known.gap_s is None else (known.gap_s + gap_s) / 2
            known.is_persons |= not request.is_agent
        else:
            self._began_s = self._clock()
        if self._away.pop(request.session, None) is not None and not request.is_agent:
            self._away[request.session] = (-math.inf, math.inf)  # until its prompt is computed
        sequence.patience_s = self._patience_s(sequence)

    def has_lost_blocks(self, sequence: Sequence) -> bool:
        """Whether an agent's blocks were evicted while it waited: it has a new rank then."""
        if sequence.patience_s != _WARM_PATIENCE_S or not sequence.request.is_agent:
            return False
        if is_returning(sequence):
            return False
        sequence.patience_s = self._patience_s(sequence)
        return sequence.patience_s == _COLD_PATIENCE_S

    def _patience_s(self, sequence: Sequence) -> float:
        rate = self._costs.prefill_tokens_per_s
        if not rate:
            return 0.0
        num_cached = self._blocks.num_cached(sequence, hold_s=_WAITING_S)
        num_missing = len(sequence.token_ids) - num_cached
        if sequence.request.is_agent:
            return _WARM_PATIENCE_S if num_cached >= num_missing else _COLD_PATIENCE_S
        # A short prompt goes before a long one that would delay it. Of a session's first turn
        # nobody knows who asks: it yields to persons who were here before.
        if sequence.request.session not in self._known:
            return min(_NEW_PATIENCE * num_missing / rate, _WARM_PATIENCE_S)
        lead_s = _PERSON_LEAD_S if self._has_agents(sequence.request.tenant) else 0.0
        return min(num_missing / rate, _WARM_PATIENCE_S) - lead_s

    # -- the step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is planned from here on."""
        self._may_leave_out, self._has_left_out = not self._has_left_out, False
        self._hurried.clear()

    def awaits_turn(self) -> bool:
        """Whether the step should be short, as somebody is likely to come who goes first."""
        if self.num_live < 2 and not self._num_agents:
            return False
        now_s = self._clock()
        if self.num_live > 1 and now_s < self._began_s + _BEGINNING_S:
            return True
        if not self._num_agents:
            return False
        for session, (from_s, until_s) in tuple(self._away.items()):
            if now_s >= until_s:
                del self._away[session]
            elif now_s >= from_s:
                return True
        return False

    def num_uncut(self, in_prompt: Ordered[Sequence], head: Sequence | None) -> int:
        """Tokens of a prompt that a short step computes nevertheless: a person's who was here
        before, or a short one of whom nobody knows whose it is; 0: there is none.

        Args:
            head: comes next of those that wait.
        """
        num_tokens = 0
        for sequence in in_prompt if head is None else (*in_prompt, head):
            if sequence.request.is_agent:
                continue
            missing = size = len(sequence.token_ids) - sequence.num_computed_tokens
            if sequence is head and not is_returning(sequence):
                missing = size = size - self._blocks.num_cached(sequence, hold_s=0.0)
            elif sequence.request.session not in self._known:
                size = len(sequence.token_ids)
            if size <= SHORT_PROMPT_TOKENS or sequence.request.session in self._known:
                num_tokens = max(num_tokens, missing)
        return num_tokens

    def note_prompt(self, sequence: Sequence, num_new: int) -> None:
        """The step computes so many tokens of a prompt; so a person's may end in it."""
        request = sequence.request
        if request.is_agent or not request.session:
            return
        if len(sequence.token_ids) - sequence.num_computed_tokens <= num_new:
            self._away.pop(request.session, None)
            if self._may_leave_out:
                self._hurried.add(request.tenant)

    def leaves_out(self, sequence: Sequence, num_new: int) -> bool:
        """Whether the step should not compute so many tokens of a prompt, as a person's prompt ends
        in it, whose tenant's others would only make it longer. Those that end in it as well come
        along, except agents'. Of two steps, at most one leaves something out."""
        request = sequence.request
        if not request.session or request.tenant not in self._hurried:
            return False
        num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
        if num_missing <= num_new and not request.is_agent:
            return False
        self._has_left_out = True
        return True

    # -- admission --------------------------------------------------------------------------

    def gives_way(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence leaves alone what is kept for others, while others run. One
        that has run before does not: nobody is passed over for it."""
        request = sequence.request
        if not request.is_agent or is_returning(sequence):
            return False
        return self._clock() < request.arrival_s + sequence.patience_s

    def admit(self, sequence: Sequence, *, num_spared: int) -> int | None:
        """`BlockManager.admit` of a sequence that gives way."""
        blocks = self._blocks
        num_spared += blocks.num_blocks // _ONE_SPARED_OF
        is_cold = sequence.patience_s == _COLD_PATIENCE_S
        num_computed = blocks.admit(
            sequence, num_spared=num_spared, spares_persons=True, spares_agents=is_cold
        )
        tenant = self._tenant(sequence.request.tenant)
        if num_computed is not None or not is_cold or self._clock() < tenant.next_take_s:
            return num_computed
        num_computed = blocks.admit(sequence, num_spared=num_spared, spares_persons=True)
        if num_computed is not None:
            num_missing = len(sequence.token_ids) - num_computed
            cost_s = num_missing / self._costs.prefill_tokens_per_s
            tenant.next_take_s = self._clock() + (1.0 + _SPACING) * cost_s
        return num_computed

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name) or _Tenant()
        _put(self._tenants, name, tenant, _MAX_TENANTS)
        return tenant


_Value = TypeVar("_Value")


def _put(known: OrderedDict[str, _Value], key: str, value: _Value, most: int) -> None:
    """Set the newest entry; the oldest one is forgotten if there are more than `most`."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
