"""How parameters of the generating endpoints are treated that no schema reads, in one table.

    (in the schema)   honoured: the endpoint's schema has its type and its bounds
    neutral           OpenAI's (or vLLM's), cannot change the text: accepted and ignored
    refused           would change the output but is not implemented: 400 `unsupported_parameter`
    (absent)          in neither API: 400 `unknown_parameter`

`null`, an empty list and the documented default are accepted for all but unknown parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.errors import RequestRefusedError


class Endpoint(enum.Enum):
    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    RESPONSES_SOCKET = "responses over WebSocket"


class Use(enum.Enum):
    NEUTRAL = "neutral"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Unread:
    """How such a parameter is treated; `defaults` are a refused one's values without effect."""

    use: Use
    defaults: tuple[Any, ...] = ()


_CHAT, _COMPLETIONS = (Endpoint.CHAT,), (Endpoint.COMPLETIONS,)
_BOTH = (Endpoint.CHAT, Endpoint.COMPLETIONS)
_RESPONSES = (Endpoint.RESPONSES, Endpoint.RESPONSES_SOCKET)
_MESSAGES = (*_CHAT, *_RESPONSES)
_ALL = tuple(Endpoint)

_Row = tuple[tuple[Endpoint, ...], Use, str, tuple[Any, ...]]
_ROWS: tuple[_Row, ...] = (
    # OpenAI's
    (_ALL, Use.NEUTRAL, "user", ()),
    (_MESSAGES, Use.NEUTRAL, "service_tier prompt_cache_retention", ()),
    (_CHAT, Use.NEUTRAL, "safety_identifier prompt_cache_key prompt_cache_options", ()),
    (_CHAT, Use.NEUTRAL, "metadata store", ()),
    (_RESPONSES, Use.NEUTRAL, "client_metadata", ()),  # Codex sends it
    (_COMPLETIONS, Use.REFUSED, "suffix", ("",)),
    (_CHAT, Use.REFUSED, "audio functions web_search_options", ()),
    (_MESSAGES, Use.REFUSED, "moderation", ()),
    (_CHAT, Use.REFUSED, "function_call", ("none", "auto")),
    (_CHAT, Use.REFUSED, "modalities", (["text"],)),
    (_CHAT, Use.REFUSED, "verbosity", ("medium",)),
    (_RESPONSES, Use.REFUSED, "truncation", ("disabled",)),
    (_RESPONSES, Use.REFUSED, "prompt context_management", ()),
    (_RESPONSES, Use.REFUSED, "access_programs", ({"cyber": "standard"},)),
    (_RESPONSES, Use.REFUSED, "image", ({"context_compression": "auto"},)),
    ((Endpoint.RESPONSES,), Use.REFUSED, "generate", (True,)),  # only in the WebSocket mode
    # vLLM's extras at top level
    (_ALL, Use.NEUTRAL, "request_id", ()),
    (_BOTH, Use.REFUSED, "spaces_between_special_tokens", (True,)),
    (_BOTH, Use.NEUTRAL, "guided_decoding_backend", ()),
    (_BOTH, Use.REFUSED, "logits_processors kv_transfer_params", ()),
    (_BOTH, Use.REFUSED, "prompt_embeds logprob_token_ids", ()),
    (_ALL, Use.REFUSED, "vllm_xargs", ()),
    (_CHAT, Use.REFUSED, "documents mm_processor_kwargs", ()),
)


_NEEDED = frozenset({"messages", "prompt", "input"})  # an empty one is a mistake, not a default


def _build(rows: Iterable[_Row]) -> dict[Endpoint, dict[str, Unread]]:
    table: dict[Endpoint, dict[str, Unread]] = {endpoint: {} for endpoint in Endpoint}
    for endpoints, use, names, defaults in rows:
        for endpoint in endpoints:
            for name in names.split():
                assert name not in table[endpoint], f"{name} is in the table twice"
                table[endpoint][name] = Unread(use, defaults)
    return table


UNREAD: Mapping[Endpoint, Mapping[str, Unread]] = _build(_ROWS)


def honoured(endpoint: Endpoint, fields: Container[str], body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request that its schema reads.

    Args:
        fields: of the schema.

    Raises:
        RequestRefusedError: a parameter is unknown or not supported.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        is_given = value is not None and (value != [] or name in _NEEDED)
        if name in fields:
            if is_given:
                kept[name] = value
            continue
        parameter = UNREAD[endpoint].get(name)
        if parameter is None:
            raise RequestRefusedError(
                f"unknown parameter: {name!r}", code="unknown_parameter", param=name
            )
        is_refused = is_given and parameter.use is Use.REFUSED
        if is_refused and not _has_no_effect(value, parameter.defaults):
            raise RequestRefusedError(
                f"this server does not support parameter {name!r}; "
                f"allowed: {_allowed(parameter.defaults)}",
                code="unsupported_parameter",
                param=name,
            )
    return kept


def _has_no_effect(value: Any, defaults: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):  # null fields of an object have no effect
        value = {name: item for name, item in value.items() if item is not None}
    return value in defaults or (value == {} and any(isinstance(d, dict) for d in defaults))


def _allowed(defaults: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(repr(default) for default in defaults[:2])])
