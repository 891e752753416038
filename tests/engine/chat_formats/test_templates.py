"""What chat templates show of a model's formats, and what they want of earlier calls."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.chat_formats import (
    ModelFormats,
    OutputSyntax,
    formats_of,
    template_messages,
    template_variables,
)

# The parts of published templates that tell.
TEMPLATES = {
    "qwen2.5": '…<tool_call>\\n{"name": … {{ tool_call.arguments | tojson }}…</tool_call>',
    "qwen3": (
        "<tool_call> … arguments is string … <think> … {%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}"
    ),
    "qwen3-thinking": "<tool_call> {%- if add_generation_prompt %}{{- 'assistant\\n<think>\\n' }}",
    "qwen3-coder": "<tool_call>\\n<function= … tool_call.arguments|items … <parameter=",
    "deepseek-r1": (
        "<｜tool▁calls▁begin｜> + '```json' + tool['function']['arguments'] … "
        "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}"
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜> {%- if add_generation_prompt %}{%- if not thinking %}"
        "{{'</think>'}}{%- else %}{{'<think>'}}"
    ),
    "glm-4.5": (
        "<tool_call> <arg_key> {% for k, v in _args.items() %} {%- if add_generation_prompt -%}"
        "<|assistant|>{{- '\\n<think></think>' if not enable_thinking else '' -}}"
    ),
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}",
    "mistral": "[TOOL_CALLS] {{ tool_call.function|tojson }} "
    "Tool call IDs should be alphanumeric strings with length 9!",
    "llama-3.1": '<|start_header_id|> {"name": … "parameters": {{ tool_call.arguments | tojson }}',
    "llama-4": "<|python_start|>",
    "granite-3.3": "<|start_of_role|> <|tool_call|> <think>",
    "gpt-oss": "<|channel|>analysis<|message|>",
    "plain": "{{ messages }}",
}


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("qwen2.5", ("hermes", "")),
        ("qwen3", ("hermes", "qwen3")),
        ("qwen3-coder", ("qwen3_coder", "")),
        ("deepseek-r1", ("deepseek_v3", "qwen3")),
        ("deepseek-v3.1", ("deepseek_v31", "qwen3")),
        ("glm-4.5", ("glm45", "qwen3")),
        ("kimi-k2", ("kimi_k2", "")),
        ("mistral", ("mistral", "")),
        ("llama-3.1", ("llama3_json", "")),
        ("llama-4", ("llama4_pythonic", "")),
        ("granite-3.3", ("granite", "qwen3")),
        ("gpt-oss", ("openai", "openai_gptoss")),
        ("plain", ("", "")),
    ],
)
def test_formats_are_found(name: str, formats: tuple[str, str]) -> None:
    assert formats_of(TEMPLATES[name]) == formats


@pytest.mark.parametrize(
    ("name", "prompt", "syntax"),
    [
        ("qwen3", "…assistant\n", OutputSyntax("hermes", "qwen3")),
        ("qwen3", "…assistant\n<think>\n\n</think>\n\n", OutputSyntax("hermes")),
        ("qwen3-thinking", "…assistant\n<think>\n", OutputSyntax("hermes", "qwen3", True)),
        ("qwen3-thinking", "…assistant\n", OutputSyntax("hermes")),
        ("deepseek-v3.1", "…</think>", OutputSyntax("deepseek_v31")),
        ("deepseek-v3.1", "…<think>", OutputSyntax("deepseek_v31", "qwen3", True)),
        ("glm-4.5", "…<|assistant|>", OutputSyntax("glm45", "qwen3")),
        ("gpt-oss", "…<|start|>assistant", OutputSyntax("openai")),
        ("plain", "…", OutputSyntax("hermes")),
    ],
)
def test_the_end_of_the_prompt_tells_the_rest(name: str, prompt: str, syntax: OutputSyntax) -> None:
    formats = ModelFormats.found_in(TEMPLATES[name], {})
    assert formats.syntax_after(prompt, has_tools=True) == syntax


def test_a_model_of_deepseek_r1_always_thinks() -> None:
    formats = ModelFormats(reasoning="deepseek_r1")
    syntax = formats.syntax_after("…<｜Assistant｜>", has_tools=False)
    assert syntax == OutputSyntax("", "deepseek_r1", True)


def _history(call_id: str = "call_1") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "y"},
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen2.5", {"a": 1}),
        ("qwen3", {"a": 1}),
        ("qwen3-coder", {"a": 1}),
        ("mistral", {"a": 1}),
        ("llama-3.1", {"a": 1}),
        ("deepseek-r1", '{"a": 1}'),
        ("plain", '{"a": 1}'),
    ],
)
def test_arguments(name: str, arguments: Any) -> None:
    messages = template_messages(_history(), TEMPLATES[name])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_ids() -> None:
    _, called, result = template_messages(_history(), TEMPLATES["mistral"])
    short = called["tool_calls"][0]["id"]
    assert (len(short), short.isalnum(), result["tool_call_id"]) == (9, True, short)
    _, called, result = template_messages(_history("abcdefghi"), TEMPLATES["mistral"])
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "abcdefghi"
    _, called, result, _, again, _ = template_messages(
        [*_history(), *_history("call_2")], TEMPLATES["kimi-k2"]
    )
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "functions.f:0"
    assert again["tool_calls"][0]["id"] == "functions.f:1"


def test_a_text_beside_thoughts_is_a_thought_where_a_template_refuses_both() -> None:
    user, called, result = _history()
    message = {**called, "content": "Let me see.", "reasoning_content": "A tool."}
    template = "{{ raise_exception('Cannot pass both content and thinking in …') }}"
    [_, shown, _] = template_messages([user, message, result], template)
    assert (shown["content"], shown["reasoning_content"]) == ("", "A tool.\n\nLet me see.")
    [_, shown, _] = template_messages([user, message, result], TEMPLATES["qwen3"])
    assert (shown["content"], shown["reasoning_content"]) == ("Let me see.", "A tool.")


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "low"), ("low", "low"), ("max", "high"), (["x"], ["x"])]
)
def test_efforts(effort: Any, shown: Any) -> None:
    variables = {"reasoning_effort": effort, "enable_thinking": True}
    assert template_variables(variables, TEMPLATES["qwen3"]) == variables
    known = template_variables(variables, TEMPLATES["gpt-oss"])
    assert known == {**variables, "reasoning_effort": shown}


def test_messages_without_calls_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert template_messages(messages, TEMPLATES["mistral"]) is messages
