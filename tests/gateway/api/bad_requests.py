"""Bad requests, each with the status, code and parameter of its refusal."""

from __future__ import annotations

import json
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hello"}]


def chat(**values: Any) -> str:
    return json.dumps({"model": "tiny", "messages": USER, **values})


def says(**message: Any) -> str:
    return chat(messages=[{"role": "user", "content": "x", **message}])


def predicts(**values: Any) -> str:
    return chat(prediction={"type": "content", "content": "x", **values})


def responds(**values: Any) -> str:
    return json.dumps({"input": "a", **values})


def tool(**values: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **values}}


CASES: list[tuple[str, str | bytes, int, str, str | None]] = [
    # not JSON, not UTF-8, not an object
    (CHAT, "{", 400, "invalid_json", None),
    (CHAT, "", 400, "invalid_json", None),
    (CHAT, "[]", 400, "invalid_json", None),
    (CHAT, b'{"messages": "\xff\xfe"}', 400, "invalid_json", None),
    (CHAT, '{"messages": "\\ud800"}', 400, "invalid_json", None),
    (CHAT, "[" * 100_000, 400, "invalid_json", None),
    (CHAT, '{"temperature": NaN}', 400, "invalid_value", "temperature"),
    (CHAT, '{"seed": 1, "top_p": -Infinity}', 400, "invalid_value", "top_p"),
    (CHAT, '{"logit_bias": {"1": NaN}}', 400, "invalid_json", None),
    (CHAT, '{"temperature": NaN', 400, "invalid_json", None),
    # messages
    (CHAT, "{}", 400, "missing_required_parameter", "messages"),
    (CHAT, chat(messages=[]), 400, "invalid_value", "messages"),
    (CHAT, chat(messages="hello"), 400, "invalid_type", "messages"),
    (CHAT, chat(messages=["hello"]), 400, "invalid_type", "messages[0]"),
    (CHAT, says(content=None), 400, "missing_required_parameter", "messages[0].content"),
    (CHAT, says(content=7), 400, "invalid_type", "messages[0].content"),
    (CHAT, says(role=""), 400, "invalid_value", "messages[0].role"),
    (CHAT, says(tool_calls=[{}]), 400, "missing_required_parameter", "messages[0].tool_calls[0]"),
    (
        CHAT,
        says(tool_calls=[{"function": {"name": "f"}}]),
        400,
        "invalid_value",
        "messages[0].tool_calls",
    ),
    (CHAT, says(tool_call_id="c"), 400, "invalid_value", "messages[0].tool_call_id"),
    (
        CHAT,
        says(function_call={"name": "f"}),
        400,
        "unsupported_parameter",
        "messages[0].function_call",
    ),
    (CHAT, says(content=""), 400, "invalid_value", "messages"),  # the template refuses it
    (
        CHAT,
        says(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].image_url",
    ),
    (CHAT, says(content="x" * 2000), 400, "context_length_exceeded", "messages"),
    (CHAT, says(content=[{"mood": 1}]), 400, "unsupported_parameter", "messages[0].content"),
    (CHAT, says(**{f"k{index}": 1 for index in range(1000)}), 400, "invalid_value", "messages[0]"),
    (CHAT, chat(repetition_penalty=1e300), 400, "invalid_value", "repetition_penalty"),
    (CHAT, chat(repetition_penalty=1e-320), 400, "invalid_value", "repetition_penalty"),
    (CHAT, chat(min_tokens=100_000), 400, "context_length_exceeded", "min_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=8), 400, "invalid_value", "min_tokens"),
    # predictions
    (CHAT, chat(prediction="x"), 400, "invalid_type", "prediction"),
    (CHAT, chat(prediction={}), 400, "missing_required_parameter", "prediction.type"),
    (CHAT, predicts(type="tokens"), 400, "invalid_value", "prediction.type"),
    (CHAT, predicts(content=7), 400, "invalid_type", "prediction.content"),
    (CHAT, predicts(content=["x"]), 400, "invalid_type", "prediction.content[0]"),
    (
        CHAT,
        predicts(content=[{"type": "text", "text": 7}]),
        400,
        "invalid_type",
        "prediction.content[0].text",
    ),
    (
        CHAT,
        predicts(content=[{"type": "image_url", "text": "x"}]),
        400,
        "invalid_value",
        "prediction.content[0].type",
    ),
    (CHAT, predicts(mood="x"), 400, "unknown_parameter", "prediction.mood"),
    (
        COMPLETIONS,
        json.dumps({"prompt": ["a", "b"], "prediction": {"type": "content", "content": "c"}}),
        400,
        "invalid_value",
        "prediction",
    ),
    (CHAT, chat(penstock={"speculation": 1}), 400, "invalid_type", "penstock.speculation"),
    (CHAT, chat(penstock={"continue": True}), 400, "unknown_parameter", "penstock.continue"),
    # the model
    (CHAT, chat(model="other"), 404, "model_not_found", "model"),
    (CHAT, chat(model=7), 400, "invalid_type", "model"),
    # parameters
    (CHAT, chat(temprature=1), 400, "unknown_parameter", "temprature"),
    (CHAT, chat(temperature="hot"), 400, "invalid_type", "temperature"),
    (CHAT, chat(temperature=-1), 400, "invalid_value", "temperature"),
    (CHAT, chat(temperature=True), 400, "invalid_type", "temperature"),
    (CHAT, chat(top_p=0), 400, "invalid_value", "top_p"),
    (CHAT, chat(top_n_sigma=-2), 400, "invalid_value", "top_n_sigma"),
    (CHAT, chat(top_n_sigma=101), 400, "invalid_value", "top_n_sigma"),
    (CHAT, chat(top_n_sigma="1"), 400, "invalid_type", "top_n_sigma"),
    (CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "invalid_type", "max_tokens"),
    (CHAT, chat(max_completion_tokens=-2), 400, "invalid_value", "max_completion_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=3), 400, "invalid_value", "min_tokens"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "invalid_value", "logit_bias.x"),
    (CHAT, chat(logit_bias={"999": 1}), 400, "invalid_value", "logit_bias"),
    (CHAT, chat(stop=["x"] * 17), 400, "invalid_value", "stop"),
    (CHAT, chat(stop=[""]), 400, "invalid_value", "stop[0]"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "invalid_value", "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[400]), 400, "invalid_value", "stop_token_ids"),
    (CHAT, chat(seed=1 << 70), 400, "invalid_type", "seed"),
    (CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    (CHAT, chat(top_logprobs=21, logprobs=True), 400, "invalid_value", "top_logprobs"),
    (CHAT, chat(stream="yes"), 400, "invalid_type", "stream"),
    (CHAT, chat(n=0), 400, "invalid_value", "n"),
    (CHAT, chat(n=129), 400, "invalid_value", "n"),
    (CHAT, chat(n=17), 400, "invalid_value", "n"),  # more than the engine runs at once
    (CHAT, chat(n="2"), 400, "invalid_type", "n"),
    (CHAT, chat(best_of=2), 400, "unknown_parameter", "best_of"),
    (CHAT, chat(length_penalty=2), 400, "invalid_value", "length_penalty"),
    (CHAT, chat(early_stopping=True), 400, "invalid_value", "early_stopping"),
    (CHAT, chat(early_stopping="soon"), 400, "invalid_value", "early_stopping"),
    (CHAT, chat(use_beam_search=True, length_penalty=11), 400, "invalid_value", "length_penalty"),
    (CHAT, chat(use_beam_search=True, temperature=0.5), 400, "invalid_value", "temperature"),
    (CHAT, chat(use_beam_search=True, top_p=0.5), 400, "invalid_value", "top_p"),
    (CHAT, chat(use_beam_search=True, top_n_sigma=1.0), 400, "invalid_value", "top_n_sigma"),
    (CHAT, chat(use_beam_search=True, top_k=5), 400, "invalid_value", "top_k"),
    (CHAT, chat(use_beam_search=True, logit_bias={"1": 1}), 400, "invalid_value", "logit_bias"),
    (CHAT, chat(prompt_logprobs=-1), 400, "invalid_value", "prompt_logprobs"),
    (CHAT, chat(prompt_logprobs=0, stream=True), 400, "invalid_value", "prompt_logprobs"),
    (CHAT, chat(cache_salt=""), 400, "invalid_value", "cache_salt"),
    (CHAT, chat(cache_salt="x" * 257), 400, "invalid_value", "cache_salt"),
    (CHAT, chat(priority=1), 400, "invalid_value", "priority"),  # served by arrival
    (CHAT, chat(priority="high"), 400, "invalid_type", "priority"),
    (CHAT, chat(priority=1 << 31), 400, "invalid_value", "priority"),
    (CHAT, chat(echo=True), 400, "unsupported_parameter", "echo"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "invalid_value",
        "continue_final_message",
    ),
    (CHAT, chat(truncate_prompt_tokens=0), 400, "invalid_value", "truncate_prompt_tokens"),
    (CHAT, chat(bad_words=["x", " "]), 400, "invalid_value", "bad_words"),
    (CHAT, chat(bad_words=["x" * 257]), 400, "invalid_value", "bad_words[0]"),
    (CHAT, chat(allowed_token_ids=[1, 10**6]), 400, "invalid_value", "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=[1, -1]), 400, "invalid_value", "allowed_token_ids[1]"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "missing_required_parameter", "tools[0]"),
    (CHAT, chat(tools=[{"type": "web_search"}]), 400, "unsupported_parameter", "tools[0].type"),
    (CHAT, chat(tools=[tool(name="a b")]), 400, "invalid_value", "tools[0].function.name"),
    (CHAT, chat(tools=[tool(), tool()]), 400, "invalid_value", "tools[1]"),
    (CHAT, chat(tools=[tool(parameters=[1])]), 400, "invalid_type", "tools[0].function.parameters"),
    (CHAT, chat(tool_choice="required"), 400, "invalid_value", "tool_choice"),
    (
        CHAT,
        chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "invalid_value",
        "tool_choice",
    ),
    (CHAT, chat(reasoning_effort="huge"), 400, "invalid_value", "reasoning_effort"),
    # completions
    (COMPLETIONS, "{}", 400, "missing_required_parameter", "prompt"),
    (COMPLETIONS, '{"prompt": ""}', 400, "invalid_value", "prompt"),
    (COMPLETIONS, '{"prompt": []}', 400, "invalid_value", "prompt"),
    (COMPLETIONS, '{"prompt": 7}', 400, "invalid_type", "prompt"),
    (COMPLETIONS, '{"prompt": [-1]}', 400, "invalid_value", "prompt[0]"),
    (COMPLETIONS, '{"prompt": ["a", 1]}', 400, "invalid_type", "prompt[1]"),
    (COMPLETIONS, '{"prompt": [400]}', 400, "invalid_value", "prompt"),
    (COMPLETIONS, json.dumps({"prompt": [1] * 1024}), 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, '{"prompt": "a", "echo": 1}', 400, "invalid_type", "echo"),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 0}', 400, "invalid_value", "max_tokens"),
    (
        COMPLETIONS,
        '{"prompt": "a", "max_tokens": 0, "echo": true, "n": 2}',
        400,
        "invalid_value",
        "n",
    ),
    (
        COMPLETIONS,
        '{"prompt": "a", "max_tokens": 0, "echo": true, "min_tokens": 1}',
        400,
        "invalid_value",
        "min_tokens",
    ),
    (
        COMPLETIONS,
        json.dumps({"prompt": [1] * 1025, "max_tokens": 0, "echo": True}),
        400,
        "context_length_exceeded",
        "prompt",
    ),
    (COMPLETIONS, '{"prompt": "a", "n": 2, "best_of": 1}', 400, "invalid_value", "best_of"),
    (COMPLETIONS, json.dumps({"prompt": ["a"] * 128, "n": 9}), 400, "invalid_value", "n"),
    (COMPLETIONS, '{"prompt": "a", "best_of": 17}', 400, "invalid_value", "best_of"),
    (COMPLETIONS, '{"prompt": "a", "best_of": 2, "stream": true}', 400, "invalid_value", "best_of"),
    (
        COMPLETIONS,
        '{"prompt": "a", "n": 2, "best_of": 2, "use_beam_search": true}',
        400,
        "invalid_value",
        "best_of",
    ),
    (
        COMPLETIONS,
        '{"prompt": "a", "echo": true, "truncate_prompt_tokens": 1}',
        400,
        "invalid_value",
        "truncate_prompt_tokens",
    ),
    (COMPLETIONS, '{"prompt": "a", "suffix": "b"}', 400, "unsupported_parameter", "suffix"),
    # responses
    (RESPONSES, "{}", 400, "missing_required_parameter", "input"),
    (RESPONSES, responds(background=True, store=False), 400, "invalid_value", "background"),
    (RESPONSES, responds(background="yes"), 400, "invalid_type", "background"),
    (
        RESPONSES,
        responds(conversation="conv_1", previous_response_id="resp_1"),
        400,
        "mutually_exclusive_parameters",
        "previous_response_id",
    ),
    (RESPONSES, responds(conversation=7), 400, "invalid_type", "conversation"),
    (RESPONSES, responds(conversation={}), 400, "missing_required_parameter", "conversation"),
    (
        RESPONSES,
        responds(conversation={"id": "conv_1", "x": 1}),
        400,
        "unknown_parameter",
        "conversation",
    ),
    (RESPONSES, responds(metadata={"k" * 65: ""}), 400, "invalid_value", f"metadata.{'k' * 65}"),
    (RESPONSES, responds(metadata={"k": "v" * 513}), 400, "invalid_value", "metadata.k"),
    (
        RESPONSES,
        responds(metadata=dict.fromkeys("abcdefghijklmnopq", "")),
        400,
        "invalid_value",
        "metadata",
    ),
    (RESPONSES, responds(metadata={"k": 1}), 400, "invalid_type", "metadata.k"),
    (RESPONSES, responds(stream_options={"x": 1}), 400, "unknown_parameter", "stream_options.x"),
    (
        RESPONSES,
        responds(penstock={"continue": True}),
        400,
        "missing_required_parameter",
        "previous_response_id",
    ),
    (
        RESPONSES,
        responds(penstock={"continue": True}, previous_response_id="resp_1"),
        400,
        "invalid_value",
        "input",
    ),
    (
        RESPONSES,
        responds(penstock={"continues": True}),
        400,
        "unknown_parameter",
        "penstock.continues",
    ),
    (RESPONSES, '{"input": "a", "prompt": {"id": "p"}}', 400, "unsupported_parameter", "prompt"),
    (RESPONSES, '{"input": "", "max_output_tokens": 0}', 400, "invalid_value", "max_output_tokens"),
    (RESPONSES, '{"input": "a", "include": ["x"]}', 400, "invalid_value", "include[0]"),
    (RESPONSES, '{"input": []}', 400, "invalid_value", "input"),
    (RESPONSES, '{"input": "a", "n": 2}', 400, "unknown_parameter", "n"),
    (RESPONSES, '{"input": "a", "generate": false}', 400, "unsupported_parameter", "generate"),
    (RESPONSES, '{"input": "a", "penstock": 7}', 400, "invalid_type", "penstock"),
    (RESPONSES, '{"input": "a", "penstock": {"x": 1}}', 400, "unknown_parameter", "penstock.x"),
    (
        RESPONSES,
        '{"input": "a", "penstock": {"events": ["preempted", "x"]}}',
        400,
        "invalid_value",
        "penstock.events[1]",
    ),
    (
        RESPONSES,
        '{"input": "a", "prompt_cache_options": {"x": 1}}',
        400,
        "unknown_parameter",
        "prompt_cache_options.x",
    ),
    (
        RESPONSES,
        '{"input": [{"type": "function_call_output", "output": "1"}]}',
        400,
        "missing_required_parameter",
        "input[0].call_id",
    ),
    (
        RESPONSES,
        '{"input": [{"type": "function_call_output", "call_id": "call_1", "output": "1"}]}',
        400,
        "invalid_value",
        "input[0].call_id",
    ),
    (
        RESPONSES,
        '{"input": [{"type": "web_search_call", "id": "ws_1"}]}',
        400,
        "unsupported_parameter",
        "input[0].type",
    ),
    (RESPONSES, '{"input": [{"id": "msg_1"}]}', 404, "item_not_found", "input[0].id"),
    (
        RESPONSES,
        '{"input": "a", "tools": [{"type": "web_search"}]}',
        400,
        "unsupported_parameter",
        "tools[0].type",
    ),
]  # fmt: skip
