"""Outputs with tool calls in every format: what models write, and what they write wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "is_metric": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "place": {"type": "object"},
            },
            "required": ["city"],
        },
    },
    {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
)
CODE = 'def f(x):\n    """Doc."""\n    return {"a": [x, \'b\'], "c": x < 3 and x > 1}\n'
CALLS: tuple[Call, ...] = (
    ("get_weather", {"city": "Paris"}),
    ("get_weather", {"city": "São Paulo 😀", "days": 3, "share": 0.5, "is_metric": True}),
    ("get_weather", {"city": "", "tags": ["a", "b c"], "place": {"x": {"y": [1, 2]}, "z": "q"}}),
    ("get_weather", {"city": 'the "Hague"', "days": -7, "is_metric": False}),
    ("write_file", {"path": "/tmp/a b.py", "content": CODE}),
    ("write_file", {"path": "C:\\new\\table", "content": "line 1\nline 2\tend"}),
    ("write_file", {"path": "x", "content": "5 > 3 & 2 < 4; [brackets] {braces}"}),
    ("write_file", {"path": "p", "content": 'it\'s "both" kinds'}),
    ("now", {}),
)
BEFORE = ("", "Let me see.", "I'll call it (a < b, {x}).\n", "Zuerst prüfe ich das … 🙂\n\n")


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    blocks = [f'{{"name": "{name}", "arguments": {_json(each)}}}' for name, each in calls]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def _listed(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(f'{{"name": "{n}", "arguments": {_json(a)}}}' for n, a in calls) + "]"


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(each)}}}' for name, each in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(each)}\n```<｜tool▁call▁end｜>"
        for name, each in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(each)}<｜tool▁call▁end｜>"
        for name, each in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(blocks) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(each)}"
        "<|tool_call_end|>"
        for number, (name, each) in enumerate(calls)
    ]
    section = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return "".join(blocks).join(section)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen_coder(calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        lines = [f"<parameter={k}>\n{_plain(v)}\n</parameter>" for k, v in arguments.items()]
        blocks.append("\n".join(["<tool_call>", f"<function={name}>", *lines]) + "\n</function>\n"
                      "</tool_call>")  # fmt: skip
    return "\n".join(blocks)


def _glm(calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        lines = [
            f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>"
            for k, v in arguments.items()
        ]
        blocks.append("\n".join([f"<tool_call>{name}", *lines, "</tool_call>"]))
    return "\n".join(blocks)


def _pythonic(calls: Sequence[Call]) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def _harmony(calls: Sequence[Call]) -> str:
    messages = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(each)}"
        "<|call|>"
        for name, each in calls
    ]
    return "<|start|>assistant".join(messages)


def _mistral_new(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(each)}" for name, each in calls)


# Format → how it writes calls, and whether text may come before.
WRITERS: Mapping[str, tuple[tuple[Callable[[Sequence[Call]], str], bool], ...]] = {
    "hermes": ((_hermes, True),),
    "qwen3_coder": ((_qwen_coder, True),),
    "llama3_json": ((_llama, False), (lambda calls: "<|python_tag|>" + _llama(calls), False)),
    "pythonic": ((_pythonic, False),),
    "mistral": ((lambda calls: "[TOOL_CALLS]" + _listed(calls), True), (_mistral_new, True)),
    "deepseek_v3": ((_deepseek_v3, True),),
    "deepseek_v31": ((_deepseek_v31, True),),
    "glm45": ((_glm, True),),
    "kimi_k2": ((_kimi, True),),
    "granite": ((lambda calls: "<|tool_call|>" + _listed(calls), False),),
    "openai": ((_harmony, False),),
}


def texts() -> Iterator[tuple[str, str, str]]:
    """Formats, texts, and what is special about each: "truncated", "followed" by other text, a
    call of an "unknown" tool, or nothing."""
    for name, writers in WRITERS.items():
        for write, has_text in writers:
            for number, call in enumerate(CALLS):
                yield name, write([call]), ""
                others = [CALLS[(number + 1) % len(CALLS)], CALLS[(number + 4) % len(CALLS)]]
                yield name, write([call, others[0]]), ""
                yield name, write([call, *others]), ""
                if has_text:
                    for before in BEFORE[1:]:
                        yield name, before + write([call]), ""
            whole = write([CALLS[0], CALLS[4]])
            for length in (len(whole) // 4, len(whole) // 3, len(whole) - 30, len(whole) - 3):
                yield name, whole[:length], "truncated"
            yield name, write([("unknown_tool", {"a": 1, "b": "x"})]), "unknown"
            yield name, whole + " Done.", "followed"
        for text in (*BEFORE[1:], "2 < 3 and [1, 2] and {x: 1}", "<tool", "[", "{", "a [TOOL b"):
            yield name, text, ""
