"""The formats of tool calls, a module each, by vLLM's names.

To add one: write its module (`hermes.py` is the shortest), and name it here. A model writes in the
first whose `template_marks` are all in its chat template, so those that have more of them come
before those that have fewer. Where templates insist on ids of their own, `history.py` makes them.
"""

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
    "openai": harmony.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "qwen3_xml": qwen3_coder.FORMAT,
    "glm45": glm45.FORMAT,
    "kimi_k2": kimi_k2.FORMAT,
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "mistral": mistral.FORMAT,
    "granite": granite.FORMAT,
    "llama4_pythonic": pythonic.LLAMA_4,
    "llama3_json": llama3_json.FORMAT,
    "llama4_json": llama3_json.FORMAT,
    "pythonic": pythonic.FORMAT,
    "hermes": hermes.FORMAT,
}
