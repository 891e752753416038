"""What a request asks of the synthetic server, and what is wrong with it.

It takes what OpenAI's clients and benchmarks send and looks away from parameters that it does not
know. Prompt tokens are token ids, or words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson

from .plan import Fault, StreamPlan
from .settings import PER_REQUEST, SyntheticSettings


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"


class RefusedError(Exception):
    """A request that is not served."""

    def __init__(
        self, message: str, *, code: str, param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": "rate_limit_error" if self.status == 429 else kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be served.

    Attributes:
        num_tokens: of the answer; None: nobody says.
        settings: the server's, with the request's own wishes.
    """

    endpoint: Endpoint
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int | None
    is_stream: bool
    shows_usage: bool
    shows_running_usage: bool
    settings: SyntheticSettings
    fault: Fault | None


_NUMBERS = {
    "temperature": (int, float),
    "top_p": (int, float),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "max_output_tokens": (int,),
    "seed": (int,),
}
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_OTHERS: dict[str, type] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "previous_response_id": str,
    "synthetic": dict,
}
_MAX_WISH = 60_000
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_json(data: bytes | str) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RefusedError(f"not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_json")
    return body


def read(endpoint: Endpoint, body: Mapping[str, Any], settings: SyntheticSettings) -> Asked:
    """A request as asked.

    Raises:
        RefusedError: it makes no sense.
    """
    body = {name: value for name, value in body.items() if value is not None}
    _check_types(body)
    if body.get("model", settings.model) != settings.model:
        raise RefusedError(
            f"no model {body['model']!r} here", code="model_not_found", param="model", status=404
        )
    own, fault = _own_settings(body.get("synthetic", {}), settings)
    history_tokens = _history_tokens(body)
    prompt_tokens = history_tokens + _PROMPTS[endpoint](body)
    num_tokens = next((body[name] for name in _LENGTHS if name in body), None)
    if prompt_tokens + (num_tokens or settings.default_tokens) > settings.max_model_len:
        raise RefusedError(
            f"{prompt_tokens} prompt tokens and the answer exceed {settings.max_model_len}",
            code="context_length_exceeded",
            param="prompt",
        )
    options = body.get("stream_options", {})
    return Asked(
        endpoint=endpoint,
        prompt_tokens=prompt_tokens,
        cached_tokens=history_tokens,
        num_tokens=num_tokens,
        is_stream=body.get("stream", False),
        shows_usage=bool(options.get("include_usage")),
        shows_running_usage=bool(options.get("continuous_usage_stats")),
        settings=own,
        fault=fault,
    )


def _check_types(body: Mapping[str, Any]) -> None:
    for name, kinds in _NUMBERS.items():
        value = body.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise _wrong(name, "must be a number", code="invalid_type")
        if name in _LENGTHS and value < 1:
            raise _wrong(name, "must be at least 1")
    for name, kind in _OTHERS.items():
        if name in body and not isinstance(body[name], kind):
            raise _wrong(name, f"must be a {kind.__name__}", code="invalid_type")
    if body.get("n", 1) != 1:
        raise _wrong("n", "one answer is all there is")


def _own_settings(
    wishes: Mapping[str, Any], settings: SyntheticSettings
) -> tuple[SyntheticSettings, Fault | None]:
    """The settings for one request, and the fault that it wishes for."""
    unknown = set(wishes) - set(PER_REQUEST)
    if unknown:
        raise _wrong(f"synthetic.{min(unknown)}", f"may be {', '.join(PER_REQUEST)}")
    for name, value in wishes.items():
        kind = type(getattr(settings, name))
        if not isinstance(value, (int, float) if kind is float else kind) or value is True:
            raise _wrong(f"synthetic.{name}", f"must be a {kind.__name__}", code="invalid_type")
        least = 1 if name == "tokens_per_event" else 0
        if not isinstance(value, str) and not least <= value <= _MAX_WISH:
            raise _wrong(f"synthetic.{name}", f"must be {least} to {_MAX_WISH}")
    try:
        fault = Fault.parse(wishes.get("fault", ""))
    except ValueError as error:
        raise _wrong("synthetic.fault", str(error)) from error
    return replace(settings, **wishes), fault


def _history_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of the turns before, which count as cached."""
    if "previous_response_id" not in body:
        return 0
    previous = StreamPlan.from_id(body["previous_response_id"])
    if previous is None:
        raise RefusedError(
            f"no response {body['previous_response_id']!r} here",
            code="previous_response_not_found",
            param="previous_response_id",
            status=404,
        )
    return previous.prompt_tokens + previous.num_tokens


def _completion_tokens(body: Mapping[str, Any]) -> int:
    prompt = _needed(body, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _num_words(prompt)
    if isinstance(prompt, list) and all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in prompt
    ):
        return len(prompt)
    raise _wrong("prompt", "must be a text or token ids, and one of them", code="invalid_type")


def _chat_tokens(body: Mapping[str, Any]) -> int:
    return _message_tokens(_needed(body, "messages"), "messages")


def _response_tokens(body: Mapping[str, Any]) -> int:
    if "previous_response_id" in body and not body.get("input"):
        return 0
    asked = _needed(body, "input")
    given = _num_words(asked) if isinstance(asked, str) else _message_tokens(asked, "input")
    return given + len(str(body.get("instructions", "")).split())


_PROMPTS = {
    Endpoint.COMPLETIONS: _completion_tokens,
    Endpoint.CHAT: _chat_tokens,
    Endpoint.RESPONSES: _response_tokens,
}


def _message_tokens(messages: Any, param: str) -> int:
    if not isinstance(messages, list):
        raise _wrong(param, "must be a list of messages", code="invalid_type")
    num = 0
    for index, message in enumerate(messages):
        path = f"{param}[{index}]"
        if not isinstance(message, dict):
            raise _wrong(path, "must be an object", code="invalid_type")
        if message.get("role") not in _ROLES:
            raise _wrong(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        num += _content_tokens(message.get("content"), f"{path}.content")
    return num


def _content_tokens(content: Any, path: str) -> int:
    if isinstance(content, str):
        return _num_words(content)
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return sum(_num_words(part["text"]) for part in content)
    raise _wrong(path, "must be a text, or parts with a text", code="invalid_type")


def _num_words(text: str) -> int:
    return max(1, len(text.split()))


def _needed(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise RefusedError(f"{name} is needed", code="missing_required_parameter", param=name)
    if body[name] in ("", []):
        raise _wrong(name, "must not be empty")
    return body[name]


def _wrong(param: str, message: str, *, code: str = "invalid_value") -> RefusedError:
    return RefusedError(f"{param}: {message}", code=code, param=param)
