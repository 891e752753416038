"""Building blocks of request schemas: bounded values, and the parameters that
several endpoints share (sampling, number of outputs).

Each endpoint's own `schema` has the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from penstock.engine.config import MAX_LOGPROBS
from penstock.engine.request import (
    MAX_BRANCHES,
    MAX_LOGIT_BIAS,
    MAX_PATTERN_SIZE,
    SAMPLING_PARAMETERS,
    BeamSearch,
    RepetitionDetection,
    SamplingParams,
)
from penstock.gateway.api.schema.aliases import NO_LIMIT
from penstock.gateway.api.schema.messages import MAX_ITEMS
from penstock.gateway.api.schema.model import Model, bounded, invalid
from penstock.gateway.api.schema.parameters import Endpoint
from penstock.gateway.api.schema.structured_outputs import (
    UNCONSTRAINED,
    Asked,
    Constraint,
    ResponseFormat,
    StructuredOutputsParams,
    constraint_of,
    given,
)
from penstock.gateway.generation.context_limits import UNKNOWN_LIMIT, Effort, GenerationOptions

_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_CHARS = 512
_MAX_INCLUDES = 32
_MAX_ID_CHARS = 128
_MAX_CACHE_KEY_CHARS = 512
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIAS = 1024
_MAX_ALLOWED = 1 << 18
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_CHARS = 256
_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 1 << 31
# Beam search does not sample, so the model's sampling defaults do not apply to it.
_SEARCH_DEFAULTS: Mapping[str, float] = {"temperature": 0.0}

_Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS, fail_fast=True)]
NumBranches = Annotated[int, Field(ge=1, le=MAX_BRANCHES)]


def listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _id_of(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    unknown = sorted(set(value) - {"id"}, key=str)
    if unknown:
        raise PydanticCustomError(
            "unknown_parameter", "a conversation has no field {name}", {"name": repr(unknown[0])}
        )
    if "id" not in value:
        raise PydanticCustomError("missing", "a conversation needs an `id`")
    return value["id"]


class ConversationName(Model):
    """What `_id_of` accepts as a conversation; only the OpenAPI document uses it."""

    id: Annotated[str, Field(max_length=_MAX_ID_CHARS)]


TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
MaxTokens = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(
        lambda value: None if value == NO_LIMIT else value,
        json_schema_input_type=Annotated[int, Field(ge=1)] | Literal[-1] | None,
    ),
]
NumKept = Annotated[int, Field(ge=1)]
# OpenAI's limits.
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=_MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=_MAX_METADATA_CHARS)],
    ],
    BeforeValidator(lambda value: bounded(value, _MAX_METADATA)),
]
CacheKey = Annotated[str, Field(max_length=_MAX_CACHE_KEY_CHARS)]
ConversationId = Annotated[
    str,
    Field(max_length=_MAX_ID_CHARS),
    BeforeValidator(_id_of, json_schema_input_type=str | ConversationName),
]
Includable = Literal[
    "message.output_text.logprobs",
    # Accepted without effect: such tools do not run here, images are always listed, and reasoning
    # can be read.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
Includes = Annotated[list[Includable], Field(max_length=_MAX_INCLUDES, fail_fast=True)]


class PredictedPart(Model):
    type: Literal["text"]
    text: str


class Prediction(Model):
    """OpenAI's: what the output may be. It changes no token, only the time."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_ITEMS, fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Extensions(Model):
    """penstock's own parameters.

    Attributes:
        speculation: see `SamplingParams`.
    """

    speculation: bool = True


class StreamExtensions(Extensions):
    """Those of chats and completions.

    Attributes:
        events: `progress`: chunks without choices say what the request waits for.
    """

    events: Annotated[list[Literal["progress"]], Field(max_length=1)] = Field(default_factory=list)


class LoopDetection(Model):
    """vLLM's `repetition_detection`: when an output that repeats itself ends."""

    max_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_count: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] = 0

    @model_validator(mode="after")
    def _check(self) -> LoopDetection:
        if self.min_pattern_size > self.max_pattern_size:
            raise invalid(
                "repetition_detection.min_pattern_size", "must not be greater than max_pattern_size"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise invalid("repetition_detection.min_count", "must be at least 2")
        return self

    @property
    def params(self) -> RepetitionDetection | None:
        """None: no pattern is looked for."""
        if not self.max_pattern_size:
            return None
        return RepetitionDetection(
            max_pattern_size=self.max_pattern_size,
            min_pattern_size=max(self.min_pattern_size, 1),
            min_count=self.min_count,
        )


class StreamOptions(Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @property
    def is_usage_continuous(self) -> bool:
        return self.include_usage and self.continuous_usage_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How many outputs answer one prompt, in the terms of `SamplingParams`."""

    n: int = 1
    best_of: int | None = None
    beam_search: BeamSearch | None = None


class _Generating(Model):
    endpoint: ClassVar[Endpoint]
    model: str | None = None
    stream: bool = False


def _bounded(name: str) -> Any:
    """A parameter's type and bounds as `SamplingParams` declares them."""
    kind, _, declared, _ = SAMPLING_PARAMETERS[name]
    return Annotated[kind, Field(ge=declared.ge, gt=declared.gt, le=declared.le)]


if TYPE_CHECKING:
    _Seed = int
else:
    _Seed = _bounded("seed")


def _common_field(name: str) -> Any:
    """A parameter as `SamplingParams` declares it; None where the model may have a default."""
    _, default, declared, _ = SAMPLING_PARAMETERS[name]
    limited = _bounded(name)
    if declared.has_model_default:
        return limited | None, _described(name, default=None)
    return limited, _described(name, default=default)


def _described(name: str, **more: Any) -> Any:
    return Field(description=SAMPLING_PARAMETERS[name].doc, **more)


_COMMON = {
    name: _common_field(name)
    for name, each in SAMPLING_PARAMETERS.items()
    if each.declared.is_common
}
if TYPE_CHECKING:

    class _Common(_Generating):
        skip_special_tokens: bool  # what is read of them by name
        thinking_token_budget: int | None

else:
    _Common = create_model("_Common", __base__=_Generating, **_COMMON)


class SamplingRequest(_Common):
    """Shared by all generating endpoints. Absent values take the model's defaults, then OpenAI's.

    It has the common parameters of `SamplingParams` as they are declared there; here are the others
    that all endpoints take.

    Attributes:
        endpoint: `parameters` says which more of its API's parameters are accepted.
    """

    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], _Bias],
        BeforeValidator(lambda value: bounded(value, _MAX_LOGIT_BIAS)),
    ] = _described("logit_bias", default_factory=dict)
    seed: _Seed | None = _described("seed", default=None)
    stop: Annotated[_Stops, BeforeValidator(listed, json_schema_input_type=_Stop | _Stops)] = (
        _described("stop", default_factory=list)
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_LOGIT_BIAS, fail_fast=True)] = (
        _described("stop_token_ids", default_factory=list)
    )
    structured_outputs: StructuredOutputsParams | None = _described(
        "structured_outputs", default=None
    )
    repetition_detection: LoopDetection | None = _described("repetition_detection", default=None)
    cache_salt: Annotated[str, Field(min_length=1, max_length=_MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-_MAX_PRIORITY, lt=_MAX_PRIORITY)] = 0
    prediction: Prediction | None = None
    penstock: Extensions = Extensions()

    @model_validator(mode="after")
    def _check_constraint(self) -> SamplingRequest:
        _ = self.constraint
        return self

    def options(self, model_defaults: Mapping[str, Any]) -> GenerationOptions:
        """What it asks of its output."""
        asked, most = self.output_limit, model_defaults.get("max_tokens")
        limits = [self.default_output_limit if asked is None else asked, most]
        return GenerationOptions(
            sampling_params=self._sampling_params(model_defaults),
            max_tokens=min((each for each in limits if each is not None), default=None),
            is_limit_given=asked is not None,
            priority=self.priority if "priority" in self.model_fields_set else None,
            cache_salt=self.cache_salt,
            wants_queue_position=self.wants_queue_position,
            continues_prompt=self.continues_prompt,
            grammars=self.constraint.grammars,
            prediction="" if self.prediction is None else self.prediction.text,
            model=self.model,
            has_end_logprobs=self.has_end_logprobs,
            tells_every_token=self.tells_every_token,
            effort=self.effort,
        )

    def _sampling_params(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        branching = self.branching
        defaults = model_defaults if branching.beam_search is None else _SEARCH_DEFAULTS
        given = {name: getattr(self, name) for name in self.model_fields_set if name in _COMMON}
        if self.thought_budget >= 0:
            given["thinking_token_budget"] = self.thought_budget
        seed = model_defaults.get("seed") if self.seed is None else self.seed
        loops = self.repetition_detection
        drawn = {
            "seed": secrets.randbits(63) if seed is None else seed,
            "max_tokens": UNKNOWN_LIMIT,
        }
        return SamplingParams(
            **{**defaults, **given, **drawn},
            logit_bias={int(token_id): bias for token_id, bias in self.logit_bias.items()},
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            n=branching.n,
            best_of=branching.best_of,
            beam_search=branching.beam_search,
            structured_outputs=self.constraint.structured_outputs,
            repetition_detection=None if loops is None else loops.params,
            stop=tuple(self.stop),
            speculation=self.penstock.speculation,
        )

    @cached_property
    def constraint(self) -> Constraint:
        """What the output must match.

        Raises:
            RequestRefusedError: it is invalid on its face.
        """
        asked = list(self.formats)
        return constraint_of(asked) if asked else UNCONSTRAINED

    @property
    def formats(self) -> Iterator[Asked]:
        """The parameters that say what the output must match."""
        if self.structured_outputs is not None:
            yield from self.structured_outputs.asked
            yield from self.structured_outputs.how

    @property
    def continues_prompt(self) -> bool:
        """Whether the output continues the prompt's text instead of starting a new one."""
        return False

    @property
    def effort(self) -> Effort | None:
        """How much to think."""
        return None

    @property
    def thought_budget(self) -> int:
        """The requested maximum of tokens of thoughts; -1: there is none."""
        return -1 if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def output_limit(self) -> int | None:
        """The requested maximum of output tokens, under the endpoint's own name for it."""
        raise NotImplementedError

    @property
    def default_output_limit(self) -> int | None:
        """Output tokens where the caller sets no limit; None: what fits."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report beside each token; None for no logprobs."""
        raise NotImplementedError

    @property
    def has_end_logprobs(self) -> bool:
        """Whether logprobs are also wanted of the token that ends the output."""
        return False

    @property
    def tells_every_token(self) -> bool:
        """Whether tokens without text are told too, as what is told beside the text changes."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to report beside each token of the prompt; None for no logprobs."""
        return None

    @property
    def wants_queue_position(self) -> bool:
        """Whether the caller wants events with its position in the engine's queue."""
        return False

    @property
    def branching(self) -> Branching:
        """How many outputs are requested."""
        return Branching()


_AllowedTokenIds = Annotated[list[TokenId], Field(max_length=_MAX_ALLOWED, fail_fast=True)]
_BadWords = Annotated[
    list[Annotated[str, Field(max_length=_MAX_BAD_WORD_CHARS)]],
    Field(max_length=_MAX_BAD_WORDS, fail_fast=True),
]


class ChoicesRequest(SamplingRequest):
    """Shared by chat completions and completions: several choices, and OpenAI's stream options.

    In a beam search, `n` is both the width and the number of hypotheses, as in vLLM.

    Attributes:
        truncate_prompt_tokens: keep only this many tokens of a prompt.
        truncation_side: the side of the prompt that is cut off.
    """

    stream_options: StreamOptions = StreamOptions()
    penstock: StreamExtensions = StreamExtensions()
    n: NumBranches = 1
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: NumKept | None = None
    truncation_side: Literal["left", "right"] = "left"
    allowed_token_ids: _AllowedTokenIds | None = _described("allowed_token_ids", default=None)
    bad_words: _BadWords = _described("bad_words", default_factory=list)
    response_format: ResponseFormat | None = None
    # Older names of vLLM's `structured_outputs`.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # llama.cpp's names (a schema, GBNF) and SGLang's.
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> ChoicesRequest:
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be used with stream")
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise invalid(name, "needs use_beam_search to be true")
        return self

    def _sampling_params(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        params = super()._sampling_params(model_defaults)
        if self.allowed_token_ids is None and not self.bad_words:
            return params
        allowed = None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
        bad_words = tuple(self.bad_words)
        return msgspec.structs.replace(params, allowed_token_ids=allowed, bad_words=bad_words)

    def kept(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """The prompt after `truncate_prompt_tokens`."""
        num_kept = self.truncate_prompt_tokens
        if num_kept is None:
            return prompt_token_ids
        is_left = self.truncation_side == "left"
        return prompt_token_ids[-num_kept:] if is_left else prompt_token_ids[:num_kept]

    @property
    def wants_queue_position(self) -> bool:
        return self.stream and bool(self.penstock.events)

    @property
    def formats(self) -> Iterator[Asked]:
        if self.response_format is not None:
            yield from self.response_format.asked
        yield from super().formats
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        # An empty text is llama.cpp's default.
        others = {
            "json_schema": self.json_schema,
            "grammar": self.grammar or None,
            "regex": self.regex or None,
            "ebnf": self.ebnf or None,
        }
        for prefix, values in (("guided_", guided), ("", others)):
            if any(value is not None for value in values.values()):
                yield from given(prefix, values)

    @property
    def has_end_logprobs(self) -> bool:
        return self.return_token_ids  # then there are as many logprobs as ids

    @property
    def tells_every_token(self) -> bool:
        return self.return_token_ids or self.stream_options.is_usage_continuous

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def branching(self) -> Branching:
        return Branching(n=self.n, beam_search=self._beam_search)

    @property
    def beyond_one_output(self) -> Iterator[str]:
        """The parameters by which it asks for more than one plain output."""
        if self.n > 1:
            yield "n above 1"
        if self.use_beam_search:
            yield "use_beam_search"
        if self.prompt_logprobs is not None:
            yield "prompt_logprobs"

    @property
    def _beam_search(self) -> BeamSearch | None:
        if not self.use_beam_search:
            return None
        return BeamSearch(
            width=self.n, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )
