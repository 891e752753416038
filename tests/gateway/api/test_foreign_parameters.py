"""Parameters as programs written for other servers send them: Ollama, llama.cpp, SGLang, LM Studio,
OpenRouter, DeepSeek, and Open WebUI, which passes on what its user sets."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.engine.request import SamplingParams
from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.responses.schema import ResponsesRequest
from penstock.gateway.api.schema import parameters
from penstock.gateway.api.schema.fields import SamplingRequest
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.errors import RequestRefusedError

from ..conftest import Serve, Served
from .bad_requests import CHAT, COMPLETIONS, RESPONSES, USER

_BODIES: dict[type[SamplingRequest], dict[str, Any]] = {
    ChatRequest: {"messages": USER},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}
_PATHS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}


def parsed(kind: type[SamplingRequest], **values: Any) -> Any:
    return parse_request(kind, {**_BODIES[kind], **values})


def sampled(kind: type[SamplingRequest], **values: Any) -> SamplingParams:
    params: SamplingParams = parsed(kind, **values, seed=1).options({}).sampling_params
    return params


def refused(kind: type[SamplingRequest], **values: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestRefusedError) as caught:
        parsed(kind, **values)
    assert caught.value.status == 400
    return caught.value.code, caught.value.param


# What Open WebUI 0.12 sends of its advanced parameters, at the values that it offers.
OPEN_WEBUI: dict[str, Any] = {
    "temperature": 0.8,
    "max_tokens": 128,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "frequency_penalty": 1.1,
    "presence_penalty": 0.0,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "repeat_last_n": 64,
    "tfs_z": 1,
    "repeat_penalty": 1.1,
    "seed": 0,
    "stop": ["###"],
    "logit_bias": {"5": 10},
    "num_ctx": 2048,
    "num_batch": 512,
    "num_keep": 24,
    "num_thread": 2,
    "num_gpu": 0,
    "use_mmap": True,
    "use_mlock": True,
    "keep_alive": "5m",
    "think": True,
    "reasoning_effort": "medium",
    "format": "json",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_open_webuis_advanced_parameters(served: Served, path: str) -> None:
    sent = {"model": "tiny", "stream": False, **_BODIES[_PATHS[path]], **OPEN_WEBUI}
    if path == RESPONSES:
        del sent["max_tokens"]  # Open WebUI sends `max_output_tokens` there
    answer = await served.http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    [request] = served.engine.submitted.values()
    params = request.sampling_params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
    assert (params.repetition_penalty, params.frequency_penalty) == (1.1, 1.1)
    assert (params.seed, params.logit_bias) == (0, {5: 10})
    assert params.structured_outputs is not None
    assert path == RESPONSES or params.max_tokens == 128


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("name", "value"), [("mirostat", 2), ("mirostat_tau", 5.0), ("tfs_z", 0.9), ("typo", 1)]
)
async def test_what_would_change_the_text_is_refused_by_name(
    served: Served, path: str, name: str, value: Any
) -> None:
    answer = await served.http.post(path, json={**_BODIES[_PATHS[path]], name: value})
    error = answer.json()["error"]
    code = "unknown_parameter" if name == "typo" else "unsupported_parameter"
    assert (answer.status_code, error["code"], error["param"]) == (400, code, name)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"num_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": 7, "num_predict": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {"max_tokens": -1}),
        ({"num_predict": -2}, {"max_tokens": -1}),
        ({"return_tokens": True}, {"return_token_ids": True}),
        ({"usage": {"include": True}}, {"stream_options": {"include_usage": True}}),
        ({"usage": {"include": False}}, {}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": ""}, {}),
        (
            {"format": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "format", "schema": {"type": "object"}},
                }
            },
        ),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_another_name_means_the_same(
    kind: type[SamplingRequest], sent: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert parsed(kind, **sent).model_dump() == parsed(kind, **meant).model_dump()


def test_the_likeliest_tokens_by_llama_cpps_name() -> None:
    assert parsed(ChatRequest, n_probs=3).num_logprobs == 3
    assert parsed(CompletionRequest, n_probs=3).num_logprobs == 3
    assert parsed(ChatRequest, n_probs=0).num_logprobs is None


@pytest.mark.parametrize("kind", _BODIES)
def test_no_limit_is_what_fits(kind: type[SamplingRequest]) -> None:
    name = "max_output_tokens" if kind is ResponsesRequest else "max_tokens"
    for sent in ({name: -1}, {"n_predict": -1}, {"num_predict": -2}):
        options = parsed(kind, **sent).options({})
        assert (options.max_tokens, options.is_limit_given) == (None, False)
    assert refused(kind, **{name: -2}) == ("invalid_value", name)


@pytest.mark.parametrize(
    ("sent", "kwargs"),
    [
        ({"think": True}, {"enable_thinking": True, "thinking": True}),
        ({"think": False}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 4096}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 4096},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning_budget": 0}, {"enable_thinking": False, "thinking": False}),
        ({"thinking_budget_tokens": 99}, {"thinking_budget": 99}),
        ({"reasoning_budget": -1}, {}),
        (
            {"think": "low"},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
        ({"verbosity": "low"}, {"verbosity": "low"}),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest])
def test_how_to_think_reaches_the_template(
    kind: type[SamplingRequest], sent: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert parsed(kind, **sent).template_kwargs == kwargs


def test_no_thinking_whatever_the_effort() -> None:
    asked = parsed(ChatRequest, reasoning_effort="low", thinking={"type": "disabled"})
    assert asked.template_kwargs == {
        "enable_thinking": False,
        "thinking": False,
        "reasoning_effort": "low",
    }


def test_verbosity_of_responses() -> None:
    asked = parsed(ResponsesRequest, text={"verbosity": "high"})
    assert asked.template_kwargs == {"verbosity": "high"}
    assert asked.text.echo()["verbosity"] == "high"
    assert refused(ResponsesRequest, text={"verbosity": "huge"})[1] == "text.verbosity"


def test_effort_beside_another_field_of_reasoning() -> None:
    asked = parsed(ResponsesRequest, reasoning_effort="low", reasoning={"summary": "auto"})
    assert asked.reasoning.echo() == {"effort": "low", "summary": "auto"}


@pytest.mark.parametrize(
    ("sent", "effort", "thinks", "includes"),
    [
        ({"effort": "high"}, "high", None, True),
        ({"enabled": True, "max_tokens": 2000}, None, True, True),
        ({"enabled": False}, None, False, True),
        ({"effort": "low", "exclude": True, "summary": None}, "low", None, False),
    ],
)
def test_reasoning_as_openrouter_has_it(
    sent: dict[str, Any], effort: str | None, thinks: bool | None, includes: bool
) -> None:
    asked = parsed(ChatRequest, reasoning=sent)
    seen = (asked.reasoning_effort, asked.enable_thinking, asked.include_reasoning)
    assert seen == (effort, thinks, includes)


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"reasoning": {"mood": 1}}, "reasoning.mood"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "huge"}}, "reasoning"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_predict": 0}, "n_predict"),
        ({"reasoning": "high"}, "reasoning"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"thinking": 7}, "thinking"),
        ({"think": "huge"}, "think"),  # not `reasoning_effort`, which was not sent
        ({"repeat_penalty": "x"}, "repeat_penalty"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"format": "xml"}, "format"),
        ({"usage": True}, "usage"),
        ({"num_predict": 1.5}, "num_predict"),
    ],
)
def test_a_mistake_has_the_name_that_was_sent(sent: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, **sent)[1] == param


@pytest.mark.parametrize(
    "sent",
    [
        {"repeat_penalty": 1.1, "repetition_penalty": 1.2},
        {"max_tokens": 5, "n_predict": 6},
        {"num_predict": 5, "n_predict": 6},
        {"think": True, "thinking": {"type": "disabled"}},
        {"think": "low", "reasoning_effort": "high"},
        {"reasoning_effort": "none", "enable_thinking": True},
        {"reasoning_effort": "none", "think": True},
        {"format": "json", "response_format": {"type": "text"}},
        {"usage": {"include": True}, "stream_options": {"include_usage": False}},
    ],
)
def test_two_names_that_contradict_each_other(sent: dict[str, Any]) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parsed(ChatRequest, **sent)
    assert caught.value.code == "mutually_exclusive_parameters"
    assert all(name in str(caught.value) for name in sent)
    assert caught.value.param in sent


_NEUTRAL: list[dict[str, Any]] = [
    {"typical_p": 1.0, "typ_p": 1, "top_a": 0, "min_keep": 0, "t_max_predict_ms": -1},
    {"dry_multiplier": 0.0, "dry_base": 2.5, "dry_sequence_breakers": ["x"]},
    {"xtc_probability": 0.0, "xtc_threshold": 0.3, "dynatemp_range": 0, "dynatemp_exponent": 2},
    {"dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "xtc_threshold": 0.1},
    {"cache_prompt": True, "id_slot": -1, "n_keep": 0, "verbose": True, "timings_per_token": True},
    {"rid": "x", "ttl": 300, "session_id": "s", "stream_interval": 4, "trace": {"id": "t"}},
    {"provider": {"sort": "price"}, "models": ["a", "b"], "route": "fallback", "plugins": []},
    {"transforms": ["middle-out"], "stop_regex": None, "return_progress": True},
    {"samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]},
    {"samplers": "top_k;typ_p;top_p;min_p;temperature", "backend_sampling": False},
    {"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "adaptive_target": -1},
    {"watermarking": False, "return_routed_experts": False, "extra_key": "k", "lora_path": None},
    {"post_sampling_probs": False, "reasoning_budget": -1, "top_n_sigma": -1.0},
]


@pytest.mark.parametrize("sent", _NEUTRAL)
def test_what_changes_no_token_is_accepted(sent: dict[str, Any]) -> None:
    for kind in (ChatRequest, CompletionRequest):
        fields = {**sent}
        without = sampled(kind, **({"top_n_sigma": -1.0} if "top_n_sigma" in fields else {}))
        assert sampled(kind, **fields) == without


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dry_multiplier", 0.8),
        ("dry_base", 2),
        ("dry_allowed_length", 3),
        ("dry_sequence_breakers", ["x"]),
        ("xtc_probability", 0.5),
        ("xtc_threshold", 0.3),
        ("typical_p", 0.9),
        ("dynatemp_range", 0.5),
        ("dynatemp_exponent", 2),
        ("samplers", ["top_k"]),
        ("samplers", ["temperature", "top_k", "top_p", "min_p"]),
        ("min_keep", 3),
        ("t_max_predict_ms", 100),
        ("post_sampling_probs", True),
        ("stop_regex", "a+"),
        ("watermarking", True),
        ("custom_logit_processor", "x"),
        ("plugins", [{"id": "web"}]),
    ],
)
def test_what_would_change_tokens_is_refused(name: str, value: Any) -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert refused(kind, **{name: value}) == ("unsupported_parameter", name)


def test_what_else_vllms_requests_have() -> None:
    """Accepted at its defaults, as its own client sends them."""
    both = {"mm_payload": "tensors", "return_mm_kwargs": None, "return_weight_versions": False}
    both["routed_experts_prompt_start"] = 0
    parsed(ChatRequest, echo=False, **both)
    parsed(CompletionRequest, **both)
    theirs = {"include_reasoning": True, "enable_response_messages": False}
    parsed(ResponsesRequest, previous_input_messages=None, mm_processor_kwargs=None, **theirs)
    assert refused(ChatRequest, echo=True) == ("unsupported_parameter", "echo")
    unread = ("unsupported_parameter", "include_reasoning")
    assert refused(ResponsesRequest, include_reasoning=False) == unread


def test_thoughts_as_other_servers_ask_for_them() -> None:
    assert parsed(ChatRequest, separate_reasoning=True, reasoning_format="auto").include_reasoning
    assert not parsed(ChatRequest, reasoning_format="hidden").include_reasoning
    assert refused(ChatRequest, separate_reasoning=False)[1] == "separate_reasoning"


def test_what_has_no_effect_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parameters, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for kind in _BODIES:
                parsed(kind, num_ctx=4096, keep_alive=-1, cache_prompt=True, num_batch=None)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "num_ctx" in told[0]
    assert "--max-model-len" in told[0]
    assert "keep_alive" in told[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_fingerprint(serve: Serve, path: str, is_streamed: bool) -> None:
    async def fingerprint(served: Served) -> str:
        client, asked = served.client, {"model": "tiny", "stream": is_streamed}
        if path == CHAT:
            answer: Any = await client.chat.completions.create(messages=USER, **asked)
        else:
            answer = await client.completions.create(prompt="x", **asked)
        seen = {each.system_fingerprint async for each in answer} if is_streamed else None
        [name] = seen or {answer.system_fingerprint}
        return str(name)

    names = []
    for weights in (b"one", b"one", b"other"):
        async with serve(info={"cache_root": weights}) as served:
            names.append(await fingerprint(served))
    assert names[0] == names[1] != names[2]
    version = (await _version(serve)).json()["version"]
    assert all(name.startswith(f"fp_{version}_") for name in names)


async def _version(serve: Serve) -> Any:
    async with serve() as served:
        return await served.http.get("/version")
