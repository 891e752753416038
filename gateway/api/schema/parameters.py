"""How parameters of the generating endpoints are treated that no schema reads, in one table.

    (in the schema)   honoured: the endpoint's schema has its type and its bounds
    alias             another server's name or form of one that is honoured
    neutral           cannot change the text: accepted and ignored
    logged            the same, and the log says so once: its sender may expect an effect
    refused           would change the output but is not implemented: 400 `unsupported_parameter`
    (absent)          in none of these APIs: 400 `unknown_parameter`

`null`, an empty list and the documented default are accepted for all but unknown parameters.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.gateway.api.schema import aliases
from penstock.gateway.api.schema.aliases import Alias, limit, same_as
from penstock.gateway.errors import RequestRefusedError

_LOG = logging.getLogger(__name__)


class Endpoint(enum.Enum):
    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    RESPONSES_SOCKET = "responses over WebSocket"
    ANTHROPIC = "Anthropic's messages"


class Use(enum.Enum):
    NEUTRAL = "neutral"
    LOGGED = "logged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Unread:
    """How such a parameter is treated.

    Attributes:
        defaults: a refused one's values without effect.
        switch: a refused one has no effect either beside this one, where that has none.
        reason: why a logged one has no effect.
    """

    use: Use
    defaults: tuple[Any, ...] = ()
    switch: str = ""
    reason: str = ""


_CHAT, _COMPLETIONS = (Endpoint.CHAT,), (Endpoint.COMPLETIONS,)
_BOTH = (Endpoint.CHAT, Endpoint.COMPLETIONS)
_RESPONSES = (Endpoint.RESPONSES, Endpoint.RESPONSES_SOCKET)
_MESSAGES = (*_CHAT, *_RESPONSES)
_ANTHROPIC = (Endpoint.ANTHROPIC,)
_ALL = tuple(Endpoint)
_NOT_CHAT = tuple(each for each in Endpoint if each is not Endpoint.CHAT)

_Row = tuple[tuple[Endpoint, ...], Use, str, tuple[Any, ...]]
_ROWS: tuple[_Row, ...] = (
    # OpenAI's
    (_NOT_CHAT, Use.NEUTRAL, "user", ()),
    (_MESSAGES, Use.NEUTRAL, "service_tier prompt_cache_retention", ()),
    (_CHAT, Use.NEUTRAL, "safety_identifier prompt_cache_options", ()),
    (_CHAT, Use.NEUTRAL, "metadata store", ()),
    (_RESPONSES, Use.NEUTRAL, "client_metadata", ()),  # Codex sends it
    (_CHAT, Use.REFUSED, "audio functions web_search_options", ()),
    (_MESSAGES, Use.REFUSED, "moderation", ()),
    (_CHAT, Use.REFUSED, "function_call", ("none", "auto")),
    (_CHAT, Use.REFUSED, "modalities", (["text"],)),
    (_RESPONSES, Use.REFUSED, "prompt", ()),
    (_RESPONSES, Use.REFUSED, "access_programs", ({"cyber": "standard"},)),
    (_RESPONSES, Use.REFUSED, "image", ({"context_compression": "auto"},)),
    ((Endpoint.RESPONSES,), Use.REFUSED, "generate", (True,)),  # only in the WebSocket mode
    # Anthropic's
    (_ANTHROPIC, Use.NEUTRAL, "cache_control service_tier inference_geo speed", ()),
    (_ANTHROPIC, Use.NEUTRAL, "user_profile_id workspace_id billing_policy", ()),
    (_ANTHROPIC, Use.NEUTRAL, "fallbacks fallback_credit_token", ()),
    (_ANTHROPIC, Use.REFUSED, "container mcp_servers compaction thread", ()),
    # vLLM's extras at top level
    (_ALL, Use.NEUTRAL, "request_id", ()),
    (_BOTH, Use.NEUTRAL, "guided_decoding_backend", ()),
    (_BOTH, Use.REFUSED, "logits_processors kv_transfer_params", ()),
    (_BOTH, Use.REFUSED, "prompt_embeds logprob_token_ids", ()),
    (_ALL, Use.REFUSED, "vllm_xargs", ()),
    (_MESSAGES, Use.REFUSED, "mm_processor_kwargs", ()),
    (_RESPONSES, Use.REFUSED, "media_io_kwargs previous_input_messages", ()),
    (_RESPONSES, Use.REFUSED, "kv_transfer_params ec_transfer_params", ()),
    (_RESPONSES, Use.REFUSED, "watermarking enable_response_messages", (False,)),
    (_RESPONSES, Use.REFUSED, "include_reasoning", (True,)),
    (_CHAT, Use.REFUSED, "echo", (False,)),
    (_ALL, Use.REFUSED, "return_mm_kwargs", (False,)),
    (_ALL, Use.REFUSED, "mm_payload", ("tensors",)),
    (_BOTH, Use.REFUSED, "return_weight_versions", (False,)),
    (_BOTH, Use.REFUSED, "routed_experts_prompt_start", (0,)),
    (_ALL, Use.NEUTRAL, "session_id stream_interval", ()),
    # of llama.cpp, SGLang, OpenRouter and others
    (_ALL, Use.NEUTRAL, "cache_prompt verbose rid trace backend_sampling", ()),
    (
        _ALL,
        Use.NEUTRAL,
        "speculative speculative.n_max speculative.n_min speculative.p_min speculative.type",
        (),
    ),
    (_ALL, Use.REFUSED, "typical_p typ_p tfs_z", (1,)),
    (_ALL, Use.REFUSED, "top_a epsilon_cutoff eta_cutoff smoothing_factor", (0,)),
    (_ALL, Use.REFUSED, "no_repeat_ngram_size n_indent", (0,)),
    (_ALL, Use.REFUSED, "mirostat xtc_probability dynatemp_range", (0,)),
    (_ALL, Use.REFUSED, "dry_multiplier adaptive_target", (0, -1)),
    (_ALL, Use.REFUSED, "min_keep", (0, 1)),
    (_ALL, Use.REFUSED, "t_max_predict_ms", (0, -1)),
    (_BOTH, Use.REFUSED, "post_sampling_probs return_hidden_states penalize_nl", (False,)),
    (_BOTH, Use.REFUSED, "stop_regex plugins lora image_data", ("",)),
    (_BOTH, Use.REFUSED, "lora_path session_params custom_logit_processor custom_params", ()),
    (_BOTH, Use.REFUSED, "bootstrap_host bootstrap_port bootstrap_room ec_transfer_params", ()),
    (_BOTH, Use.REFUSED, "media_io_kwargs images_config", ()),
    (_BOTH, Use.REFUSED, "watermarking return_prompt_text return_token_offsets", (False,)),
    (_BOTH, Use.REFUSED, "return_routed_experts return_cached_tokens_details", (False,)),
    (_BOTH, Use.NEUTRAL, "extra_key custom_labels ngram_corpus_id", ()),
    (_CHAT, Use.REFUSED, "separate_reasoning parse_tool_calls", (True,)),
    (_CHAT, Use.REFUSED, "reasoning_in_content thinking_forced_open", (False,)),
)


class _Switched(NamedTuple):
    """Parameters of a sampler that is not implemented, with its default."""

    switch: str
    names: Mapping[str, tuple[Any, ...]]


_SWITCHED = (
    _Switched("mirostat", {"mirostat_eta": (0,), "mirostat_tau": (0,)}),
    _Switched("xtc_probability", {"xtc_threshold": (0.1,)}),
    _Switched("dynatemp_range", {"dynatemp_exponent": (1,)}),
    _Switched(
        "dry_multiplier",
        {
            "dry_base": (1.75,),
            "dry_allowed_length": (2,),
            "dry_penalty_last_n": (-1, 0),
            "dry_sequence_breakers": (["\n", ":", '"', "*"],),
        },
    ),
    _Switched("adaptive_target", {"adaptive_decay": (0.9,)}),
    _Switched("smoothing_factor", {"smoothing_curve": (1,)}),
)

_NO_TEMPLATE = "completions have no chat template"
_STARTED = "it is set where the server is started"
_LOGGED: tuple[tuple[tuple[Endpoint, ...], str, str], ...] = (
    (_ALL, "num_ctx", "the context is that of --max-model-len"),
    (_ALL, "num_batch num_thread num_gpu main_gpu low_vram f16_kv vocab_only", _STARTED),
    (_ALL, "use_mmap use_mlock numa", _STARTED),
    (_ALL, "keep_alive ttl", "the model is always loaded"),
    (_ALL, "num_keep n_keep n_discard", "a context that is full is not shifted"),
    (_ALL, "repeat_last_n", "penalties are over the whole prompt and output"),
    (_ALL, "draft_model", "it is set with --speculative-config"),
    (_ALL, "id_slot slot_id data_parallel_rank routed_dp_rank", "the server chooses"),
    (_BOTH, "timings_per_token return_progress", "chunks have no such field"),
    (_BOTH, "t_max_prompt_ms", "prompts are not limited by time"),
    (_CHAT, "stream_reasoning", "thoughts are streamed as the answer is"),
    (_COMPLETIONS, "think enable_thinking thinking reasoning verbosity", _NO_TEMPLATE),
    (_COMPLETIONS, "reasoning_effort reasoning_format include_reasoning", _NO_TEMPLATE),
    (_ALL, "provider models route", "this server has no other providers or models"),
    (_ALL, "transforms", "prompts are not compressed"),
)


# llama.cpp's names of vLLM's `thinking_token_budget`, and Qwen's.
_BUDGETS = (
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
    "thinking_budget",
)


def _alias_table() -> dict[Endpoint, dict[str, Alias]]:
    budgets = dict.fromkeys(_BUDGETS, same_as("thinking_token_budget"))
    both = {
        **budgets,
        "repeat_penalty": same_as("repetition_penalty"),
        "num_predict": limit("max_tokens"),
        "n_predict": limit("max_tokens"),
        "return_tokens": same_as("return_token_ids"),
        "no_stop_trim": same_as("include_stop_str_in_output"),
        "samplers": aliases.SAMPLERS,
        "format": aliases.FORMAT,
        "usage": aliases.USAGE,
    }
    chat = {
        "n_probs": aliases.CHAT_PROBS,
        "think": aliases.thinking("think"),
        "thinking": aliases.thinking("thinking"),
        "reasoning": aliases.REASONING,
        "reasoning_format": aliases.REASONING_FORMAT,
    }
    responses = {
        **budgets,
        "repeat_penalty": same_as("repetition_penalty"),
        "num_predict": limit("max_output_tokens"),
        "n_predict": limit("max_output_tokens"),
        "no_stop_trim": same_as("include_stop_str_in_output"),
        "think": aliases.thinking_of_responses("think"),
        "thinking": aliases.thinking_of_responses("thinking"),
        "reasoning_effort": same_as("reasoning.effort"),
        "verbosity": same_as("text.verbosity"),
        "samplers": aliases.SAMPLERS,
        "format": aliases.TEXT_FORMAT,
    }
    anthropic = {
        "stop_sequences": same_as("stop"),
        "output_format": same_as("output_config.format"),
    }
    return {
        Endpoint.ANTHROPIC: anthropic,
        Endpoint.CHAT: {**both, **chat},
        Endpoint.COMPLETIONS: {**both, "n_probs": aliases.COMPLETION_PROBS},
        Endpoint.RESPONSES: responses,
        Endpoint.RESPONSES_SOCKET: responses,
    }


_NEEDED = frozenset({"messages", "prompt", "input"})  # an empty one is a mistake, not a default


def _build() -> dict[Endpoint, dict[str, Unread]]:
    table: dict[Endpoint, dict[str, Unread]] = {endpoint: {} for endpoint in Endpoint}

    def add(endpoints: Iterable[Endpoint], names: str, unread: Unread) -> None:
        for endpoint in endpoints:
            for name in names.split():
                assert name not in table[endpoint], f"{name} is in the table twice"
                table[endpoint][name] = unread

    for endpoints, use, names, defaults in _ROWS:
        add(endpoints, names, Unread(use, defaults))
    for endpoints, names, reason in _LOGGED:
        add(endpoints, names, Unread(Use.LOGGED, reason=reason))
    for switch, dependent in _SWITCHED:
        for name, defaults in dependent.items():
            add(_ALL, name, Unread(Use.REFUSED, defaults, switch))
    return table


UNREAD: Mapping[Endpoint, Mapping[str, Unread]] = _build()
ALIASES: Mapping[Endpoint, Mapping[str, Alias]] = _alias_table()
_logged: set[str] = set()  # in this process


@dataclass(slots=True)
class Honoured:
    """The parameters of a request that its schema reads.

    Attributes:
        values: by their names in the schema.
        names: what the request calls those that it has by another name, for messages.
    """

    values: dict[str, Any]
    names: dict[str, str]


def honoured(endpoint: Endpoint, fields: Container[str], body: Mapping[str, Any]) -> Honoured:
    """The parameters of a request that its schema reads.

    Args:
        fields: of the schema.

    Raises:
        RequestRefusedError: a parameter is unknown or not supported, or two contradict each other.
    """
    kept: dict[str, Any] = {}
    meant: dict[str, Mapping[str, Any]] = {}
    for name, value in body.items():
        is_given = value is not None and (value != [] or name in _NEEDED)
        if name in fields:
            if is_given:
                kept[name] = value
        elif name in ALIASES[endpoint]:
            if is_given:
                meant[name] = ALIASES[endpoint][name].convert(value)
        else:
            _check_unread(endpoint, name, value, body, is_given=is_given)
    return _with_aliases(kept, meant) if meant else Honoured(kept, {})


def _with_aliases(kept: dict[str, Any], meant: Mapping[str, Mapping[str, Any]]) -> Honoured:
    """
    Raises:
        RequestRefusedError: two names of a parameter have different values.
    """
    names: dict[str, str] = {}
    for name, parameters in meant.items():
        for target, value in parameters.items():
            if target not in kept:
                kept[target] = value
                names[target] = name
            elif isinstance(value, dict) and isinstance(kept[target], dict):
                both = {**value, **kept[target]}
                if any(both[field] != item for field, item in value.items()):
                    raise _contradiction(name, names.get(target, target))
                kept[target] = both
            elif kept[target] != value:
                raise _contradiction(name, names.get(target, target))
    return Honoured(kept, names)


def _contradiction(name: str, other: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"{name} and {other} contradict each other; send only one of them",
        code="mutually_exclusive_parameters",
        param=name,
    )


def _check_unread(
    endpoint: Endpoint, name: str, value: Any, body: Mapping[str, Any], *, is_given: bool
) -> None:
    """
    Raises:
        RequestRefusedError: the parameter is unknown or not supported.
    """
    parameter = UNREAD[endpoint].get(name)
    if parameter is None:
        raise RequestRefusedError(
            f"unknown parameter: {name!r}", code="unknown_parameter", param=name
        )
    if not is_given or parameter.use is Use.NEUTRAL:
        return
    if parameter.use is Use.LOGGED:
        if name not in _logged:
            _logged.add(name)
            _LOG.warning(
                "requests have the parameter %r, which has no effect: %s", name, parameter.reason
            )
        return
    if _has_no_effect(value, parameter.defaults):
        return
    switch, beside = parameter.switch, ""
    if switch:
        beside = f"; with {switch} 0, any"
        if switch in body and _has_no_effect(body[switch], UNREAD[endpoint][switch].defaults):
            return
    raise RequestRefusedError(
        f"this server does not support parameter {name!r}; "
        f"allowed: {_allowed(parameter.defaults)}{beside}",
        code="unsupported_parameter",
        param=name,
    )


def _has_no_effect(value: Any, defaults: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):  # null fields of an object have no effect
        value = {name: item for name, item in value.items() if item is not None}
    return value in defaults or (value == {} and any(isinstance(d, dict) for d in defaults))


def _allowed(defaults: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(repr(default) for default in defaults[:2])])
