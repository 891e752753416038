"""Requests and sequences: what is asked for, and one branch of tokens answering it.

Lives here: `SamplingParams`, `Request`, `Sequence` and the legal moves of its status.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_BRANCHES = 128  # of one request: n, best_of or beams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Deterministic search for likely outputs, as `transformers` defines it.

    Attributes:
        width: beams kept at every step.
        length_penalty: a hypothesis scores its summed log-probability ÷ length ** this.
        early_stopping: True ends at `width` finished hypotheses; False when the best running
            beam could not beat the worst of them at its present length; "never" when it could
            not at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _check(1 <= self.width <= MAX_BRANCHES, "width", f"must be between 1 and {MAX_BRANCHES}")
        _check(-10.0 <= self.length_penalty <= 10.0, "length_penalty", "must be in [-10, 10]")
        _check(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            'must be true, false or "never"',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen and when they end. Names and meanings follow vLLM.

    Attributes:
        temperature: 0 is greedy (argmax); otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many most likely tokens; 0 (or -1) keeps all.
        min_p: drop tokens less likely than `min_p` × the likeliest, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL paper, §4.1).
        presence_penalty, frequency_penalty: OpenAI's, over output tokens, in [-2, 2].
        logit_bias: token id → added to its logit.
        seed: 64-bit; a draw depends on (seed, sequence index, token position) alone.
        max_tokens: output tokens at most; 0 only computes the prompt.
        min_tokens: EOS and stop tokens are masked until this many were produced.
        ignore_eos: EOS does not end the sequence.
        stop_token_ids: extra ids that end the sequence, like EOS.
        logprobs: None, or how many most likely alternatives to report beside the chosen token.
        prompt_logprobs: the same for every prompt token after the first.
        n: outputs wanted; they share the prompt's KV blocks (of a beam search: hypotheses).
        best_of: outputs computed, of which whoever collects them keeps the n likeliest.
        beam_search: search instead of sampling; everything that shapes a draw must be neutral.
        stop, include_stop_str_in_output, skip_special_tokens: read by `engine.text` alone,
            where ids become text; they never reach the engine core. A lone string is one stop.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        _check(self.top_k >= -1, "top_k", "must be -1 (off), 0 (off) or positive")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        _check(
            0.01 <= self.repetition_penalty <= 100.0,
            "repetition_penalty",
            "must be between 0.01 and 100",
        )
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be in [-2, 2]")
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be in [-2, 2]")
        _check(
            all(math.isfinite(bias) for bias in self.logit_bias.values()),
            "logit_bias",
            "values must be finite",
        )
        _check(0 <= self.seed < 1 << 64, "seed", "must be a 64-bit unsigned integer")
        _check(self.max_tokens >= 0, "max_tokens", "must not be negative")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be between 0 and max_tokens",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(
                count is None or 0 <= count <= MAX_LOGPROBS,
                name,
                f"must be between 0 and {MAX_LOGPROBS}",
            )
        self._check_branches()
        object.__setattr__(self, "stop", _several(self.stop))

    def _check_branches(self) -> None:
        _check(1 <= self.n <= MAX_BRANCHES, "n", f"must be between 1 and {MAX_BRANCHES}")
        _check(
            self.best_of is None or self.n <= self.best_of <= MAX_BRANCHES,
            "best_of",
            f"must be between n and {MAX_BRANCHES}",
        )
        _check(self.max_tokens > 0 or self.num_branches == 1, "n", "must be 1 if max_tokens is 0")
        if self.beam_search is None:
            return
        _check(self.max_tokens > 0, "max_tokens", "must be at least 1 with beam search")
        _check(self.n <= self.beam_search.width, "n", "must not exceed the beam width")
        _check(self.best_of is None, "best_of", "has no sense with beam search")
        _check(self.temperature in (0.0, 1.0), "temperature", "must be 0 or 1 with beam search")
        for name, neutral in _NO_DRAW.items():
            _check(getattr(self, name) in neutral, name, "cannot be used with beam search")

    @property
    def num_branches(self) -> int:
        """Sequences computed at once from one prompt."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`, or 0 where the likeliest outputs have to be told apart."""
        if self.logprobs is None and self.best_of is not None and self.best_of > self.n:
            return 0
        return self.logprobs


_NO_DRAW: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}


def _several(strings: str | Iterable[str] | None) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(strings or ())


def _check(is_valid: bool, param: str, rule: str) -> None:
    # NaN fails every comparison above, so it ends here too.
    if not is_valid:
        raise InvalidRequestError(f"{param} {rule}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long the KV blocks of a finished request are worth keeping. A hint, never a pin.

    Attributes:
        duration_s: counted from the end of the request.
        priority: among blocks that are still wanted, those of higher priority go last.
    """

    duration_s: float
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it reaches the engine core.

    Attributes:
        request_id: unique among live requests of one client.
        prompt_token_ids: at least one id.
        output_token_ids: empty at first; those of a continuation count as output for
            penalties, `min_tokens` and `max_tokens`.
        arrival_s: wall-clock seconds; orders the waiting queue.
        priority: lower values run first, under the policy `priority`.
        cache_salt: KV blocks are shared only between requests of equal salt.
        retention: what becomes of its blocks when it ends.
        tenant: among tenants the waiting queue is fair.
        weight: the tenant's share of service, beside others'; more than 0.
        wants_queue_position: outputs tell its place while it waits.
        deadline_s: wall-clock seconds by which its first token is wanted; carried for policies.
        adapter: carried for policies.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    arrival_s: float = 0.0
    output_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    wants_queue_position: bool = False
    deadline_s: float | None = None
    adapter: str | None = None
    retention: Retention | None = None


class FinishReason(enum.Enum):
    """Why a sequence ended; values are OpenAI's `finish_reason`, but for `ABORT` and `ERROR`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token, from the model's unmodified logits.

    Attributes:
        logprob: of the sampled token.
        rank: 1 for the likeliest token.
        top: the likeliest (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Notice(enum.Enum):
    """What a stream's client may want to know: it was parked for lack of memory, or is back."""

    PREEMPTED = "preempted"
    RESUMED = "resumed"


@dataclass(slots=True, kw_only=True)  # not frozen: made for every token
class RequestOutput:
    """What one iteration brought to one branch of a request.

    Attributes:
        index: which branch, 0…n-1; of a beam search the rank of the hypothesis, best first.
        token_ids: the new output tokens, 0…k of them. A stop token that ended the sequence is
            included; EOS and stop ids carry no text.
        logprobs: empty, or one entry per new token.
        prompt_logprobs: of the prompt tokens computed meanwhile, in order from the second on
            (the first has none); never repeated.
        finish_reason: set on the last output of the branch, and only there.
        is_last: no output of any branch follows.
        stop_token_id: the EOS or stop id that ended it, if one did.
        num_cached_tokens: prompt tokens whose KV was reused instead of computed.
        score: of a beam search's hypothesis (see `BeamSearch.length_penalty`).
        prefix_id: of a branch that finished, the hash of its last full block of KV: names the
            whole chain.
        notice: the branch was preempted, or resumed.
        queue_position: of a request that waits and asked for it: how many are served before it.
        num_tokens_ahead: with it, the prompt tokens of those.
        error: with `FinishReason.ERROR`, what went wrong.
        is_refused: the request itself was at fault and nothing of it ran.
        param: the parameter at fault.
        is_superseded: with `FinishReason.ERROR`: nobody is at fault, another gateway runs it now.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    is_last: bool = False
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    score: float | None = None
    prefix_id: bytes | None = None
    notice: Notice | None = None
    queue_position: int | None = None
    num_tokens_ahead: int = 0
    error: str | None = None
    is_refused: bool = False
    param: str | None = None
    is_superseded: bool = False


def num_blocks_needed(params: SamplingParams, num_prompt_tokens: int, block_size: int) -> int:
    """Blocks a request takes at its longest: beyond the pool's size it can never be sure to end.

    Samples of one prompt share its full blocks for good. Beams are counted as if they shared
    nothing: their common past may be as short as the prompt, and all must be there at once.
    """
    # The last token's KV is never written.
    num_tokens = num_prompt_tokens + max(params.max_tokens, 1) - 1
    num_each = -(-num_tokens // block_size)
    num_shared = 0 if params.beam_search is not None else num_prompt_tokens // block_size
    num_shared = min(num_shared, num_each)
    return num_shared + params.num_branches * (num_each - num_shared)


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_LEGAL_MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class Sequence:
    """One branch of tokens: a request's prompt and what was generated so far.

    One counter drives scheduling: each step `num_computed_tokens` (KV written or being
    written) chases `num_tokens` (prompt + output + tokens still in flight). There are no
    prefill and decode phases.
    """

    __slots__ = (
        "index",
        "is_on_device",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "request",
        "seq_id",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, *, seq_id: int, index: int = 0) -> None:
        self.request = request
        self.seq_id = seq_id
        self.index = index  # which of the request's branches; part of the sampling draw
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # being sampled by a step whose result is not here yet
        self.num_committed_blocks = 0  # full blocks whose content the prefix cache was told
        self.num_cached_tokens = 0  # of the prompt, found at admission; 0 again once reported
        self.num_prompt_logprobs = 0  # handed out
        self.is_on_device = False  # the device knows it: what is new suffices
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Known tokens plus placeholders for those in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    def move_to(self, status: SequenceStatus) -> None:
        assert status in _LEGAL_MOVES[self.status], f"{self.status} -> {status} is not legal"
        self.status = status

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens have to be computed for their log-probabilities' sake."""
        wanted = self.request.sampling_params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )
