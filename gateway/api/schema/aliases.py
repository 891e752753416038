"""Parameters that other servers name or write otherwise: what each means in this server's terms.

A conversion takes the value and returns this server's parameters; `parameters` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.api.schema.model import invalid
from penstock.gateway.errors import RequestRefusedError

NO_LIMIT = -1  # as `max_tokens`: the output may fill the context
_ON = ("enabled", "on")
_OFF = ("disabled", "off")
_AUTO = ("auto", "adaptive")


@dataclass(frozen=True, slots=True)
class Alias:
    """What a parameter is here.

    Attributes:
        meaning: for the OpenAPI document.
        convert: from its value to this server's parameters; raises `RequestRefusedError`.
    """

    meaning: str
    convert: Callable[[Any], Mapping[str, Any]]


def same_as(target: str) -> Alias:
    """Another name of a parameter, or of a field of one (`reasoning.effort`)."""
    name, _, field = target.partition(".")
    return Alias(
        f"Another name of `{target}`.",
        lambda value: {name: {field: value} if field else value},
    )


def limit(target: str) -> Alias:
    """A maximum of output tokens; a negative one (Ollama's and llama.cpp's) is none."""

    def convert(value: Any) -> Mapping[str, Any]:
        is_negative = isinstance(value, int) and value < 0
        return {target: NO_LIMIT if is_negative else value}

    return Alias(f"Another name of `{target}`; negative: no limit.", convert)


def thinking(name: str) -> Alias:
    """Whether to think, as a boolean; in Ollama's form also how much; or as DeepSeek's and
    Anthropic's object with a `type`, and for how many tokens."""

    def convert(value: Any) -> Mapping[str, Any]:
        if isinstance(value, bool):
            return {"enable_thinking": value}
        if isinstance(value, str):
            return {"reasoning_effort": value}
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in _AUTO:
            return {}
        if kind not in (*_ON, *_OFF):
            known = ", ".join((*_ON, *_OFF, *_AUTO))
            raise invalid(name, f"must be a boolean, an effort, or have a `type` of {known}")
        budget = value.get("budget_tokens")
        if budget is None:
            return {"enable_thinking": kind in _ON}
        if kind in _OFF:
            raise invalid(f"{name}.budget_tokens", f"has no meaning where `type` is {kind}")
        return {"enable_thinking": True, "thinking_token_budget": budget}

    return Alias(
        "`enable_thinking` and `thinking_token_budget`, or an effort as in `reasoning_effort`.",
        convert,
    )


def thinking_of_responses(name: str) -> Alias:
    """Whether to think, as in `thinking`, for responses: the effort is in `reasoning`."""
    alias = thinking(name)

    def convert(value: Any) -> Mapping[str, Any]:
        meant = alias.convert(value)
        if "reasoning_effort" in meant:
            return {"reasoning": {"effort": meant["reasoning_effort"]}}
        return meant

    return Alias("`enable_thinking`, or an effort as in `reasoning`.", convert)


_REASONING_FIELDS = ("effort", "enabled", "exclude", "max_tokens", "summary", "generate_summary")


def _reasoning(value: Any) -> Mapping[str, Any]:
    """OpenRouter's `reasoning`, or that of responses. Summaries have no effect."""
    if not isinstance(value, dict):
        raise invalid("reasoning", "must be an object")
    given = {name: item for name, item in value.items() if item is not None}
    for name in given:
        if name not in _REASONING_FIELDS:
            raise RequestRefusedError(
                f"unknown parameter: 'reasoning.{name}'",
                code="unknown_parameter",
                param=f"reasoning.{name}",
            )
    for name in ("enabled", "exclude"):
        if not isinstance(given.get(name, False), bool):
            raise invalid(f"reasoning.{name}", "must be a boolean")
    meant: dict[str, Any] = {}
    if "effort" in given:
        meant["reasoning_effort"] = given["effort"]
    if "enabled" in given:
        meant["enable_thinking"] = given["enabled"]
    if "exclude" in given:
        meant["include_reasoning"] = not given["exclude"]
    if "max_tokens" in given:
        meant["thinking_token_budget"] = given["max_tokens"]
    return meant


REASONING = Alias(
    "`reasoning_effort`, `enable_thinking`, `include_reasoning` and `thinking_token_budget`.",
    _reasoning,
)


def _reasoning_format(value: Any) -> Mapping[str, Any]:
    """llama.cpp's and Groq's."""
    if value in ("auto", "deepseek", "parsed"):
        return {}
    if value == "hidden":
        return {"include_reasoning": False}
    raise invalid("reasoning_format", "must be auto, deepseek, parsed or hidden")


REASONING_FORMAT = Alias("`hidden` is `include_reasoning: false`.", _reasoning_format)


def _format(value: Any) -> Mapping[str, Any]:
    """Ollama's: `json`, or a schema."""
    if value == "":
        return {}
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "name": "format", "schema": value}
    raise invalid("format", "must be 'json' or a JSON Schema")


def _response_format(value: Any) -> Mapping[str, Any]:
    match _format(value):
        case {"type": kind, **schema}:
            return {
                "response_format": {"type": kind, **({"json_schema": schema} if schema else {})}
            }
    return {}


def _text_format(value: Any) -> Mapping[str, Any]:
    asked = _format(value)
    return {"text": {"format": asked}} if asked else {}


FORMAT = Alias("`json`, or a JSON Schema: a `response_format`.", _response_format)
TEXT_FORMAT = Alias("`json`, or a JSON Schema: a `text.format`.", _text_format)


_SAMPLERS = ["top_k", "top_p", "min_p", "temperature"]  # in llama.cpp's usual order
_IDLE_SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "typ_p", "typical_p", "tfs_z", "xtc", "infill"),
    "adaptive_p",
)


def _samplers(value: Any) -> Mapping[str, Any]:
    """llama.cpp's. The usual order is what a request without them asks for; samplers that have
    parameters of their own do nothing without these, wherever they stand."""
    names = value.split(";") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise invalid("samplers", "must be a list of names")
    if value and [name for name in names if name not in _IDLE_SAMPLERS] != _SAMPLERS:
        raise RequestRefusedError(
            f"this server does not support another order of samplers than {', '.join(_SAMPLERS)}",
            code="unsupported_parameter",
            param="samplers",
        )
    return {}


SAMPLERS = Alias("Without effect: only the usual order is supported.", _samplers)


def _chat_probs(value: Any) -> Mapping[str, Any]:
    return {"logprobs": True, "top_logprobs": value} if value else {}


CHAT_PROBS = Alias("`logprobs` with as many `top_logprobs`; 0: none.", _chat_probs)
COMPLETION_PROBS = Alias(
    "Another name of `logprobs`; 0: none.", lambda value: {"logprobs": value} if value else {}
)


def _usage(value: Any) -> Mapping[str, Any]:
    """OpenRouter's."""
    if not isinstance(value, dict) or not isinstance(value.get("include", False), bool):
        raise invalid("usage", "must be an object whose `include` is a boolean")
    return {"stream_options": {"include_usage": True}} if value.get("include") else {}


USAGE = Alias("`include: true` is `stream_options.include_usage`.", _usage)
