"""The formats of tool calls, a module each, by vLLM's names. To add one: write its module, and
name it here."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine.chat_formats.formats import (
    deepseek,
    glm45,
    granite,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from penstock.engine.chat_formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "glm45": glm45.FORMAT,
    "granite": granite.FORMAT,
    "hermes": hermes.FORMAT,
    "kimi_k2": kimi_k2.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    "llama4_json": llama3_json.FORMAT,
    "llama4_pythonic": pythonic.LLAMA_4,
    "mistral": mistral.FORMAT,
    "openai": harmony.FORMAT,
    "pythonic": pythonic.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "qwen3_xml": qwen3_coder.FORMAT,
}
