"""Requests, their outputs, and sequences (one branch of tokens each) with their legal states."""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from penstock.engine.config import MAX_LOGPROBS
from penstock.engine.errors import InvalidRequestError
from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.type_checks import misfits

MAX_BRANCHES = 128  # of one request: n, best_of or beams
# What a number in a message may be; msgspec checks it when it decodes one.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # neither NaN nor infinite
MAX_LOGIT_BIAS = 100.0  # OpenAI's
# Of `RepetitionDetection`, where a token costs microseconds, and at most some dozens of them.
MAX_PATTERN_SIZE = 1024
_NUM_LOOKED_TOKENS, _MAX_COMPARED_SIZES = 8, 32
SEED_MASK = (1 << 64) - 1


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
        _check_types_if_wrong(self, self._check)

    def _check(self) -> None:
        _check(1 <= self.width <= MAX_BRANCHES, "width", f"must be between 1 and {MAX_BRANCHES}")
        _check(-10.0 <= self.length_penalty <= 10.0, "length_penalty", "must be in [-10, 10]")
        _check(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            'must be true, false or "never"',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a field of `SamplingParams` declares beside its name, type, default and meaning.

    Its checks, the gateway's request schemas and the OpenAPI document are made from it.

    Attributes:
        ge, gt, le: bounds of its value.
        rule: what a message about a value out of bounds says; by default, the bounds.
        neutral: if it shapes a draw: its values that do not.
        is_common: every generating endpoint takes it as it is declared here. The others are in
            the schemas of endpoints, under a name or in a form of their own.
        has_model_default: its default may come from the model's `generation_config.json`.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    rule: str = ""
    neutral: tuple[object, ...] = ()
    is_common: bool = False
    has_model_default: bool = False

    def bounds(self, name: str) -> tuple[float, float, str, str]:
        """The smallest and the largest value, the parameter's name, and the rule."""
        low = -math.inf if self.gt is None else math.nextafter(self.gt, math.inf)
        high = math.inf if self.le is None else self.le
        rule = self.rule or f"must be between {self.ge} and {self.le}"
        return low if self.ge is None else self.ge, high, name, rule


_common = partial(Declared, is_common=True)
_model = partial(_common, has_model_default=True)
_PENALTY = _common(ge=-2, le=2, rule="must be in [-2, 2]", neutral=(0.0,))
_MIN_TOKENS = "must be between 0 and max_tokens"
_LOGPROBS = Declared(ge=0, le=MAX_LOGPROBS)


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What an output must match. `engine.structured_outputs` makes it from what a user wrote, and
    checks it.

    Attributes:
        kind: the language of `text`: a JSON Schema, a regular expression, or a grammar in
            llguidance's dialect of Lark.
        triggers: texts or tokens, from one of which on it must match; none: from the beginning on.
        thought: what begins and ends a thought, in which a trigger means nothing.
        is_thinking: the output begins within one.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    triggers: tuple[str | int, ...] = ()
    thought: tuple[str | int, ...] = ()
    is_thinking: bool = False


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """When an output has run into a loop: its newest tokens are one pattern, again and again. Names
    and meanings follow vLLM.

    Attributes:
        max_pattern_size: tokens of the longest pattern that is looked for.
        min_count: how often it must stand at the end of the output.
        min_pattern_size: tokens of the shortest.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        _check_types_if_wrong(self, self._check)

    def _check(self) -> None:
        name = "repetition_detection"
        is_size = 1 <= self.max_pattern_size <= MAX_PATTERN_SIZE
        _check(is_size, name, f"max_pattern_size must be between 1 and {MAX_PATTERN_SIZE}")
        _check(
            1 <= self.min_pattern_size <= self.max_pattern_size,
            name,
            "min_pattern_size must be between 1 and max_pattern_size",
        )
        _check(2 <= self.min_count <= 1 << 31, name, "min_count must be at least 2")

    def is_found(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the output, the last of these tokens, ends with such a pattern. Where very many
        sizes are possible, as in a run of one token, it may be found some tokens later."""
        longest = min(self.max_pattern_size, num_output_tokens // self.min_count)
        num_tokens = len(token_ids)
        # A pattern's size is a distance at which the newest token stood before: few do.
        before = token_ids[num_tokens - 1 - longest : num_tokens - 1]
        before.reverse()
        size, num_compared = self.min_pattern_size, 0
        while size <= longest and num_compared < _MAX_COMPARED_SIZES:
            try:
                size = before.index(token_ids[-1], size - 1) + 1
            except ValueError:
                return False
            num_looked = min(size, _NUM_LOOKED_TOKENS)
            end = num_tokens - size
            if token_ids[-num_looked:] == token_ids[end - num_looked : end]:  # nearly always not
                num_compared += 1
                pattern = token_ids[end:]
                begins = range(end - size, end - size * self.min_count, -size)
                if all(token_ids[begin : begin + size] == pattern for begin in begins):
                    return True
            size += 1
        return False


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How thoughts are marked in an output, and how one is ended that has used up
    `thinking_token_budget`. `engine.chat_formats` makes it from the output's format.

    Attributes:
        begins, ends: texts that begin and end a thought; each is one token or several.
        marks: tokens that are shown as one of these texts or a part of it, and their texts.
        end_token_ids: the tokens that are generated at the budget. With the last one the thought is
            over.
        is_thinking: the output begins within a thought.
        recurs: there may be several, anywhere; otherwise one, at the beginning.
        never: where the budget is used up, the second token of each pair may not follow the first.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    marks: tuple[tuple[TokenId, str], ...] = ()
    end_token_ids: tuple[TokenId, ...] = ()
    is_thinking: bool = False
    recurs: bool = False
    never: tuple[tuple[TokenId, TokenId], ...] = ()


class DefaultLimit(int):
    """A limit that the caller did not set. `LLM.chat` replaces it by what fits the context."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How output tokens are chosen and when they end. Names and meanings follow vLLM.

    A parameter is declared here, with its meaning, and nowhere else.
    """

    temperature: Annotated[
        float, _model(ge=0, le=100), "0 is greedy (argmax); otherwise logits are divided by it."
    ] = 1.0
    top_p: Annotated[
        float,
        _model(gt=0, le=1, rule="must be in (0, 1]", neutral=(1.0,)),
        "Keep the smallest set of tokens whose probability reaches this.",
    ] = 1.0
    top_k: Annotated[
        int,
        _model(ge=-1, rule="must be -1 (off), 0 (off) or positive", neutral=(0, -1)),
        "Keep this many most likely tokens; 0 (or -1) keeps all.",
    ] = 0
    min_p: Annotated[
        float,
        _model(ge=0, le=1, rule="must be in [0, 1]", neutral=(0.0,)),
        "Drop tokens less likely than this × the likeliest.",
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        _common(ge=-1, le=100, neutral=(0.0, -1.0)),
        "Keep tokens whose logit is at most this many standard deviations of all logits below the "
        "largest; 0 (or less) keeps all.",
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _model(ge=0.01, le=100, neutral=(1.0,)),
        "Above 1 discourages tokens of prompt and output (CTRL paper, §4.1).",
    ] = 1.0
    presence_penalty: Annotated[float, _PENALTY, "OpenAI's, over output tokens."] = 0.0
    frequency_penalty: Annotated[float, _PENALTY, "OpenAI's, over output tokens."] = 0.0
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Declared(),
        "Only these tokens are generated, of which the end token is one only if it is listed.",
    ] = None
    bad_words_token_ids: Annotated[
        tuple[tuple[int, ...], ...], Declared(), "The tokens of `bad_words`; made from them."
    ] = ()
    logit_bias: Annotated[
        Mapping[int, float],
        Declared(neutral=({},)),
        "Token id → value added to its logit, between -100 and 100.",
    ] = msgspec.field(default_factory=dict)
    seed: Annotated[
        int,
        Declared(ge=-(1 << 63), le=SEED_MASK, rule="must be a 64-bit integer"),
        "A draw depends only on seed, sequence index and token position. A negative seed is the "
        "same as its 64 bits without a sign.",
    ] = 0
    max_tokens: Annotated[
        int,
        Declared(ge=0, rule="must not be negative"),
        "Maximum number of output tokens; 0 only computes the prompt.",
    ] = DefaultLimit(16)
    min_tokens: Annotated[
        int,
        _common(ge=0, rule=_MIN_TOKENS),
        "EOS and stop tokens are masked until this many tokens were generated.",
    ] = 0
    thinking_token_budget: Annotated[
        int,
        _model(ge=-1, le=(1 << 53), rule="must be -1 (no limit), 0 (no thoughts) or positive"),
        "After this many tokens of thoughts, the tokens that end them are generated, and the "
        "answer follows; 0: no thoughts, -1: no limit. Without effect where a model has none.",
    ] = -1
    ignore_eos: Annotated[bool, _common(), "EOS does not end the output."] = False
    stop_token_ids: Annotated[
        tuple[int, ...], Declared(), "Extra ids that end the output, like EOS."
    ] = ()
    logprobs: Annotated[
        int | None,
        _LOGPROBS,
        "How many of the likeliest tokens to report with each output token; None: no logprobs.",
    ] = None
    prompt_logprobs: Annotated[
        int | None, _LOGPROBS, "The same for every prompt token after the first."
    ] = None
    n: Annotated[
        int,
        Declared(ge=1, le=MAX_BRANCHES),
        "Number of outputs (with beam search, of hypotheses); they share the prompt's KV blocks.",
    ] = 1
    best_of: Annotated[
        int | None, Declared(), "Number of outputs computed, of which the n likeliest are kept."
    ] = None
    beam_search: Annotated[
        BeamSearch | None,
        Declared(),
        "Search instead of sampling; every parameter that shapes a draw must be neutral.",
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Declared(),
        "What the output must match; tokens that would break it are masked before the draw.",
    ] = None
    repetition_detection: Annotated[
        RepetitionDetection | None,
        Declared(),
        "End the output when its newest tokens repeat one pattern; None: never.",
    ] = None
    thought_limit: Annotated[
        ThoughtLimit | None,
        Declared(),
        "What `thinking_token_budget` means in the output's format; made from it.",
    ] = None
    # `engine.text` uses these, where ids become text; they never reach the engine core.
    stop: Annotated[
        tuple[str, ...], Declared(), "Texts that end the output; may be a single string."
    ] = ()
    bad_words: Annotated[
        tuple[str, ...],
        Declared(),
        "Texts whose tokens, at the beginning of a text or after a space, are not generated one "
        "after the other.",
    ] = ()
    include_stop_str_in_output: Annotated[bool, _common(), "Show the text that ends it."] = False
    skip_special_tokens: Annotated[bool, _common(), "Leave special tokens out of the text."] = True
    spaces_between_special_tokens: Annotated[
        bool, _common(), "Keep the spaces that a tokenizer puts between special tokens."
    ] = True
    speculation: Annotated[
        bool, Declared(), "False: each token is computed in a step of its own, without drafts."
    ] = True

    def __post_init__(self) -> None:
        _check_types_if_wrong(self, self._check_values)

    def _check_values(self) -> None:
        for value, (low, high, name, rule) in zip(_BOUNDED(self), _BOUNDS, strict=True):
            # NaN fails every comparison, so it is refused too.
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(f"{name} {rule}", param=name)
        if self.logit_bias:
            is_bounded = all(abs(bias) <= MAX_LOGIT_BIAS for bias in self.logit_bias.values())
            _check(is_bounded, "logit_bias", "values must be between -100 and 100")
        has_limit = not isinstance(self.max_tokens, DefaultLimit)
        _check(self.min_tokens <= self.max_tokens or not has_limit, "min_tokens", _MIN_TOKENS)
        if self.n > 1 or self.best_of is not None or self.beam_search is not None:
            self._check_branches()
        if self.seed < 0:
            msgspec.structs.force_setattr(self, "seed", self.seed & SEED_MASK)
        msgspec.structs.force_setattr(self, "stop", _as_tuple(self.stop))
        _check("" not in self.stop, "stop", "must not contain an empty string")
        if self.allowed_token_ids is not None:
            allowed = tuple(self.allowed_token_ids)
            _check(bool(allowed), "allowed_token_ids", "must not be empty")
            _check(min(allowed) >= 0, "allowed_token_ids", "must not be negative")
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        if not isinstance(self.repetition_detection, RepetitionDetection | None):
            raise TypeError("not what detects loops")
        if self.bad_words:
            is_empty = any(not word.strip() for word in self.bad_words)
            _check(not is_empty, "bad_words", "must not contain an empty text")

    def _check_branches(self) -> None:
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
        _check(
            self.repetition_detection is None,
            "repetition_detection",
            "is not allowed with beam search",
        )
        _check(self.temperature in (0.0, 1.0), "temperature", "must be 0 or 1 with beam search")
        for name, (_, _, declared, _) in SAMPLING_PARAMETERS.items():
            is_neutral = not declared.neutral or getattr(self, name) in declared.neutral
            _check(is_neutral, name, "is not allowed with beam search")

    def ends_in_loop(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the output, the last of these tokens, ends because it repeats itself."""
        loops = self.repetition_detection
        return (
            loops is not None
            and num_output_tokens >= self.min_tokens
            and loops.is_found(token_ids, num_output_tokens)
        )

    @property
    def is_masked(self) -> bool:
        """Whether some tokens cannot be drawn."""
        has_list = self.allowed_token_ids is not None or bool(self.bad_words_token_ids)
        is_limited = has_list or self.thought_limit is not None
        return is_limited or self.structured_outputs is not None

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


class SamplingParameter(NamedTuple):
    """A field of `SamplingParams`."""

    type: Any
    default: Any  # `msgspec.NODEFAULT` if it is made anew for each instance
    declared: Declared
    doc: str


SAMPLING_PARAMETERS: Mapping[str, SamplingParameter] = {
    field.name: SamplingParameter(field.type.__origin__, field.default, *field.type.__metadata__)
    for field in msgspec.structs.fields(SamplingParams)
}
_BOUNDS = [
    declared.bounds(name)
    for name, (_, _, declared, _) in SAMPLING_PARAMETERS.items()
    if declared.ge is not None or declared.gt is not None
]
_BOUNDED = attrgetter(*(name for _, _, name, _ in _BOUNDS))


def _check_types_if_wrong(struct: msgspec.Struct, check: Callable[[], None]) -> None:
    """Run a check. What is wrong with a value of another type is its type."""
    try:
        check()
    except (TypeError, AttributeError):
        values = {name: getattr(struct, name) for name in struct.__struct_fields__}
        for name, message in misfits(type(struct), values):
            raise InvalidRequestError(message, param=name) from None
        raise


def check_choice(
    params: SamplingParams, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> None:
    """
    Raises:
        InvalidRequestError: no token is allowed, or none before `min_tokens`.
    """
    if params.min_tokens and len({*eos_token_ids, *params.stop_token_ids}) >= vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids and the end tokens are the whole vocabulary of {vocab_size} tokens, "
            "so that none is left for min_tokens",
            param="stop_token_ids",
        )
    if params.allowed_token_ids is not None:
        early = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        bad = {token_ids[0] for token_ids in params.bad_words_token_ids if len(token_ids) == 1}
        if not set(params.allowed_token_ids) - early - bad:
            raise InvalidRequestError(
                "allowed_token_ids: bad_words and min_tokens leave none of them",
                param="allowed_token_ids",
            )


def _as_tuple(strings: str | Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(strings, str):
        return (strings,)
    if not isinstance(strings, list | tuple | None):
        raise TypeError("neither a text nor a list of texts")
    return tuple(strings or ())


def _check(is_valid: bool, param: str, rule: str) -> None:
    if not is_valid:
        raise InvalidRequestError(f"{param} {rule}", param=param)


NO_OUTPUT = SamplingParams(max_tokens=0, speculation=False)  # of a request with `pooling`


class Retention(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How long to prefer the KV blocks of a finished request at eviction. Nothing is pinned.

    Attributes:
        duration_s: counted from the end of the request.
        priority: among retained blocks, those of higher priority are evicted last.
    """

    duration_s: Seconds
    priority: int = 0


class Adapter(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An adapter (LoRA) of the model.

    Attributes:
        name: the model's name for callers.
        path: the directory of its files.
        digest: of their content; KV blocks are shared between requests of equal digests.
    """

    name: str
    path: str
    digest: str


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An image in a prompt.

    Attributes:
        digest: SHA-256 of its file, in hexadecimal; KV blocks are shared between equal ones.
        offset: the position of its first token.
        num_tokens: from there on, text that belongs to it included.
        num_features: of those, image tokens, whose embeddings its features replace.
        data: its file; empty once it is encoded.
    """

    digest: str
    offset: Count
    num_tokens: Count
    num_features: Count
    data: bytes = b""


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
        weight: the tenant's share of service relative to others'; from 0.001 to 1000.
        wants_queue_position: report its position while it waits, and then how much of its prompt
            is left to compute.
        adapter: whose updates its tokens get; None: the base model's only.
        prediction_token_ids: what the output may be; a right guess costs less time.
        pooling: it asks for a vector or a score instead of output; `max_tokens` is 0 then.
        images: of the prompt, in order.
        session: names the conversation that it is a turn of; empty: none.
        is_agent: that session's last turn ended in a tool call, so a program sends this one.
    """

    request_id: str
    prompt_token_ids: tuple[TokenId, ...]
    sampling_params: SamplingParams
    arrival_s: Seconds = 0.0
    output_token_ids: tuple[TokenId, ...] = ()
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    wants_queue_position: bool = False
    adapter: Adapter | None = None
    retention: Retention | None = None
    prediction_token_ids: tuple[TokenId, ...] = ()
    pooling: PoolingParams | None = None
    images: tuple[ImageInput, ...] = ()
    session: str = ""
    is_agent: bool = False


class FinishReason(enum.Enum):
    """Why a sequence ended; values are OpenAI's `finish_reason`, except `GRAMMAR` (no token could
    go on with an output that its grammar does not let end), `REPETITION` (see
    `RepetitionDetection`; callers are told `stop`, with this as the `stop_reason`), `ABORT` and
    `ERROR`."""

    STOP = "stop"
    LENGTH = "length"
    GRAMMAR = "grammar"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"

    @property
    def told(self) -> str:
        """As callers are told, who know OpenAI's reasons."""
        return "stop" if self is FinishReason.REPETITION else self.value


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities of one sampled token, from the model's unmodified logits.

    Attributes:
        logprob: of the sampled token.
        rank: 1 for the likeliest token.
        top: the likeliest (token id, logprob) pairs, best first.
    """

    token_id: TokenId
    logprob: float
    rank: Count
    top: tuple[tuple[TokenId, float], ...] = ()


class Notice(enum.Enum):
    """A stream was preempted for lack of KV blocks, or runs again; or a request that asked for its
    position waits for a resource, whose kind `param` names."""

    PREEMPTED = "preempted"
    RESUMED = "resumed"
    PREPARING = "preparing"


class Spent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a branch took of the engine since this was told of it last.

    Attributes:
        compute_us: microseconds of compute; a step's are shared by its tokens.
        block_us: KV blocks held on the device, times the microseconds for which they were. Blocks
            that branches or requests share count for each of them.
    """

    compute_us: Count = 0
    block_us: Count = 0


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
        num_host_cached_tokens: how many of those were in host memory.
        score: of a beam search's hypothesis (see `BeamSearch.length_penalty`).
        prefix_id: the hash of a finished branch's last full KV block, which names the whole chain.
        notice: the branch was preempted, or resumed, or its request is prepared.
        queue_position: how many requests are served before this one; only while it waits, and if
            it asked.
        num_tokens_ahead: the prompt tokens of those requests; without a position, its own that are
            not computed yet, if it asked.
        error: with `FinishReason.ERROR`, what went wrong.
        is_refused: the request is invalid, and nothing of it ran.
        param: the invalid parameter.
        is_superseded: with `FinishReason.ERROR`: another gateway now runs the request.
        num_draft_tokens: drafts that the step checked.
        num_accepted_tokens: how many of them were right.
        vector: what a request with `pooling` asked for, in float32, lowest byte first; of a score,
            one number.
        spent: with the last output of a branch, and from time to time before it. Of a branch that
            is aborted, the last part is never told.
    """

    request_id: str
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_BRANCHES)] = 0
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    is_last: bool = False
    stop_token_id: TokenId | None = None
    num_cached_tokens: Count = 0
    score: float | None = None
    prefix_id: bytes | None = None
    notice: Notice | None = None
    queue_position: Count | None = None
    num_tokens_ahead: Count = 0
    error: str | None = None
    is_refused: bool = False
    param: str | None = None
    is_superseded: bool = False
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    vector: bytes | None = None
    num_host_cached_tokens: Count = 0
    spent: Spent | None = None


class Requests(Protocol):
    """The part of a scheduler's interface that the queues before it use."""

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str, *, index: int | None = None) -> None: ...

    def has_request(self, request_id: str) -> bool: ...


def refusal(
    request_id: str, error: InvalidRequestError, *, param: str | None = None
) -> RequestOutput:
    """The only output of a request that is invalid.

    Args:
        param: the invalid parameter, if the error does not name it.
    """
    return RequestOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        is_last=True,
        error=str(error),
        is_refused=True,
        param=error.param or param,
    )


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


def most_output_tokens(
    params: SamplingParams,
    num_prompt_tokens: int,
    *,
    limits: range,
    block_size: int,
    num_blocks: int,
) -> int:
    """The largest of some values of `max_tokens` with which all branches fit into KV memory at the
    same time; the smallest of them must fit."""

    def num_needed(max_tokens: int) -> int:
        longest = msgspec.structs.replace(params, max_tokens=max_tokens)
        return num_blocks_needed(longest, num_prompt_tokens, block_size)

    # The number of blocks grows with the limit, so bisection finds the largest limit that fits.
    return limits[bisect.bisect_right(limits, num_blocks, key=num_needed) - 1]


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
        "block_us",
        "compute_us",
        "held_since_s",
        "index",
        "is_on_device",
        "needs_every_token",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_host_cached_tokens",
        "num_in_flight_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_slots",
        "params",
        "parent_seq_id",
        "patience_s",
        "request",
        "seq_id",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, *, seq_id: int, index: int = 0) -> None:
        self.request, self.params = request, request.sampling_params
        self.seq_id = seq_id
        self.index = index  # which of the request's branches; part of the sampling draw
        self.parent_seq_id: int | None = None  # of a beam, the one that it continues
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # being sampled by a step whose result has not arrived
        self.num_draft_tokens = 0  # of those computed, the ones that may turn out to be wrong
        self.num_slots = 0  # tokens that its blocks on the device have room for, at least
        self.num_committed_blocks = 0  # full blocks registered in the prefix cache
        self.num_cached_tokens = 0  # of the prompt, found at admission; 0 again once reported
        self.num_host_cached_tokens = 0  # of those, found in host memory
        self.compute_us = self.block_us = 0.0  # not told yet (`Spent`)
        self.held_since_s = 0.0  # until when its blocks have been charged
        self.num_prompt_logprobs = 0  # already reported
        self.patience_s = 0.0  # how much later others may arrive and still go before it
        self.needs_every_token = False  # none may be skipped that the device has not pooled
        self.is_on_device = False  # the device knows the sequence: only changes are sent
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Known tokens plus placeholders for those in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

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
