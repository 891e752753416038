"""Requests and sequences: what is asked for, and one branch of tokens answering it.

Lives here: `SamplingParams`, `Request`, `Sequence` and the legal moves of its status.
Not known here: blocks, batches, devices, text (the core sees token ids only).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.errors import InvalidRequestError

MAX_LOGPROBS = 20


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
        max_tokens: output tokens at most.
        min_tokens: EOS and stop tokens are masked until this many were produced.
        ignore_eos: EOS does not end the sequence.
        stop_token_ids: extra ids that end the sequence, like EOS.
        logprobs: None, or how many most likely alternatives to report beside the chosen token.
        stop, include_stop_str_in_output, skip_special_tokens: read by `engine.text` alone,
            where ids become text; they never reach the engine core.
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
        _check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be between 0 and max_tokens",
        )
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"must be between 0 and {MAX_LOGPROBS}",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check(is_valid: bool, param: str, rule: str) -> None:
    # NaN fails every comparison above, so it ends here too.
    if not is_valid:
        raise InvalidRequestError(f"{param} {rule}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it reaches the engine core.

    Attributes:
        request_id: unique among live requests of one client.
        prompt_token_ids: at least one id.
        output_token_ids: empty at first; those of a continuation count as output for
            penalties, `min_tokens` and `max_tokens`.
        arrival_s: wall-clock seconds; orders the waiting queue.
        tenant, priority, cache_salt, deadline_s, adapter: carried for scheduling and caching
            policies; lower priority values run first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    arrival_s: float = 0.0
    output_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    adapter: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one iteration brought to one request.

    Attributes:
        token_ids: the new output tokens, 0…k of them. A stop token that ended the sequence is
            included; EOS and stop ids carry no text.
        logprobs: empty, or one entry per new token.
        finish_reason: set on the last output of the request, and only there.
        stop_token_id: the EOS or stop id that ended it, if one did.
        num_cached_tokens: prompt tokens whose KV was reused instead of computed.
        error: with `FinishReason.ERROR`, what went wrong.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


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
        "num_computed_tokens",
        "num_in_flight_tokens",
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

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )
