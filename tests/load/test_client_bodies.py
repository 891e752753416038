"""What goes over the wire, and what is refused before."""

from __future__ import annotations

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, Endpoint, Message, body_of
from penstock.load.client.transport import Wire

_HISTORY = (
    Message(role="system", content="Be brief."),
    Message(role="user", content=" Hello"),
    Message(role="assistant", content=" there"),
)
_MESSAGES = [{"role": message.role, "content": message.content} for message in _HISTORY]
_ASKED = {
    "model": "m",
    "stream": True,
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def _call(**fields: object) -> Call:
    values = {"model": "m", "max_tokens": 7, "ignore_eos": True, "messages": _HISTORY, **fields}
    return Call(**values)  # type: ignore[arg-type]


def test_completions_get_text_or_token_ids() -> None:
    text = {"prompt": "Be brief. Hello there", "max_tokens": 7}
    assert body_of("completions", _call()) == {**_ASKED, **text}
    body = body_of("completions", _call(messages=(), prompt_token_ids=(3, 5)))
    assert body == {**_ASKED, "prompt": (3, 5), "max_tokens": 7}


def test_chat_gets_messages() -> None:
    assert body_of("chat", _call()) == {**_ASKED, "messages": _MESSAGES, "max_tokens": 7}


def test_responses_get_items_and_what_they_continue() -> None:
    body = body_of("responses", _call(previous_response_id="resp_0", ignore_eos=False))
    assert body == {
        "model": "m",
        "stream": True,
        "input": _MESSAGES,
        "max_output_tokens": 7,
        "previous_response_id": "resp_0",
    }


def test_extra_has_the_last_word() -> None:
    extra = {"temperature": 0, "stream_options": {"include_usage": True}}
    body = body_of("chat", _call(extra=extra))
    assert {name: body[name] for name in extra} == extra
    assert "stream_options" not in body_of("chat", _call(extra={"stream_options": None}))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_websocket_is_for_responses_alone(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match="supports only the endpoint responses"):
        Wire(transport="websocket", endpoint=endpoint).open("http://127.0.0.1:1")


@pytest.mark.parametrize("base_url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:port"])
def test_an_address_must_be_one(base_url: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        Wire(endpoint="chat").open(base_url)
