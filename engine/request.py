"""Requests, their outputs, and sequences (one branch of tokens each) with their legal states."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from penstock.engine.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_BRANCHES = 128  # of one request: n, best_of or beams


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Deterministic search for likely outputs, as `transformers` defines it.

    Attributes:
        width: beams kept at every step.
        length_penalty: exponent of a hypothesis's score: summed log-probability ÷ length ** it.
        early_stopping: when the search ends. True: at `width` finished hypotheses. False: when the
            best running beam cannot beat the worst of them at its current length. "never": when
            it cannot at any length.
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How output tokens are chosen and when they end. Names and meanings follow vLLM.

    Attributes:
        temperature: 0 is greedy (argmax); otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many most likely tokens; 0 (or -1) keeps all.
        min_p: drop tokens less likely than `min_p` × the likeliest, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL paper, §4.1).
        presence_penalty, frequency_penalty: OpenAI's, over output tokens, in [-2, 2].
        logit_bias: token id → value added to its logit.
        seed: 64-bit; a draw depends only on (seed, sequence index, token position).
        max_tokens: maximum number of output tokens; 0 only computes the prompt.
        min_tokens: EOS and stop tokens are masked until this many tokens were generated.
        ignore_eos: EOS does not end the sequence.
        stop_token_ids: extra ids that end the sequence, like EOS.
        logprobs: None, or how many of the likeliest tokens to report with each output token.
        prompt_logprobs: the same for every prompt token after the first.
        n: number of outputs (with beam search, of hypotheses); they share the prompt's KV blocks.
        best_of: number of outputs computed; `LLM` or the gateway keeps the n likeliest.
        beam_search: search instead of sampling; every field that shapes a draw must be neutral.
        stop, include_stop_str_in_output, skip_special_tokens: used by `engine.text`, where ids
            become text; they never reach the engine core. `stop` may be a single string.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
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
        msgspec.structs.force_setattr(self, "stop", _as_tuple(self.stop))

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
        _check(self.best_of is None, "best_of", "is not allowed with beam search")
        _check(self.temperature in (0.0, 1.0), "temperature", "must be 0 or 1 with beam search")
        for name, neutral in _NEUTRAL_VALUES.items():
            _check(getattr(self, name) in neutral, name, "is not allowed with beam search")

    @property
    def num_branches(self) -> int:
        """Sequences computed at once from one prompt."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`, or 0 where `best_of` needs log-probabilities to rank the outputs."""
        if self.logprobs is None and self.best_of is not None and self.best_of > self.n:
            return 0
        return self.logprobs


_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}


def _as_tuple(strings: str | Iterable[str] | None) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(strings or ())


def _check(is_valid: bool, param: str, rule: str) -> None:
    # NaN fails every comparison, so it is refused too.
    if not is_valid:
        raise InvalidRequestError(f"{param} {rule}", param=param)


class Retention(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How long to prefer the KV blocks of a finished request at eviction. Nothing is pinned.

    Attributes:
        duration_s: counted from the end of the request.
        priority: among retained blocks, those of higher priority are evicted last.
    """

    duration_s: float
    priority: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request as it reaches the engine core.

    Attributes:
        request_id: unique among live requests of one client.
        prompt_token_ids: at least one id.
        output_token_ids: tokens generated before (a continuation); they count as output for
            penalties, `min_tokens` and `max_tokens`.
        arrival_s: wall-clock seconds; orders the waiting queue.
        priority: lower values run first, under the policy `priority`.
        cache_salt: KV blocks are shared only between requests of equal salt.
        retention: how its blocks are kept after it ends.
        tenant: the waiting queue is fair among tenants.
        weight: the tenant's share of service relative to others'; more than 0.
        wants_queue_position: report its position while it waits.
        deadline_s: wall-clock seconds by which its first token is wanted; not used yet.
        adapter: not used yet.
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
    """Why a sequence ended; values are OpenAI's `finish_reason`, except `ABORT` and `ERROR`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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
    """A stream was preempted for lack of KV blocks, or runs again."""

    PREEMPTED = "preempted"
    RESUMED = "resumed"


# One is made for every token. It cannot be part of a cycle, so the garbage collector skips it.
class RequestOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The output of one iteration for one branch of a request.

    Attributes:
        index: the branch, 0…n-1; with beam search, the rank of the hypothesis, best first.
        token_ids: the new output tokens, 0…k of them. A stop token that ended the sequence is
            included; EOS and stop ids carry no text.
        logprobs: empty, or one entry per new token.
        prompt_logprobs: of newly computed prompt tokens, in order from the second on (the first
            has none); never repeated.
        finish_reason: set only on the last output of the branch.
        is_last: no output of any branch follows.
        stop_token_id: the EOS or stop id that ended the branch, if one did.
        num_cached_tokens: prompt tokens whose KV was reused instead of computed.
        score: of a beam search's hypothesis (see `BeamSearch.length_penalty`).
        prefix_id: the hash of a finished branch's last full KV block, which names the whole chain.
        notice: the branch was preempted, or resumed.
        queue_position: how many requests are served before this one; only while it waits, and if
            it asked.
        num_tokens_ahead: the prompt tokens of those requests.
        error: with `FinishReason.ERROR`, what went wrong.
        is_refused: the request is invalid, and nothing of it ran.
        param: the invalid parameter.
        is_superseded: with `FinishReason.ERROR`: another gateway now runs the request.
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
    """KV blocks that a request needs at its longest; if the pool has fewer, it may never finish.

    Samples of one prompt share its full blocks to the end. Beams are counted as if they shared
    nothing: they may have only the prompt in common, and all must be resident at once.
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
    """One branch of tokens: a request's prompt and the output so far.

    One counter drives scheduling: each step, `num_computed_tokens` (KV written or being
    written) catches up with `num_tokens` (prompt + output + tokens still in flight). There are no
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
        self.num_in_flight_tokens = 0  # being sampled by a step whose result has not arrived
        self.num_committed_blocks = 0  # full blocks registered in the prefix cache
        self.num_cached_tokens = 0  # of the prompt, found at admission; 0 again once reported
        self.num_prompt_logprobs = 0  # already reported
        self.is_on_device = False  # the device knows the sequence: only changes are sent
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
        """Whether cached prompt tokens must be computed again for their log-probabilities."""
        wanted = self.request.sampling_params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )
