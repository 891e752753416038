"""The formats of tool calls that have names: vLLM's, for `--tool-call-parser`, and those that a
chat template does not tell (`template_facts.NAMED`).

Nearly all are values (`call_format`), as those that are read off templates. Modules of their own
have: Harmony, which is messages in channels, and Llama's, Mistral's and Granite's, of which models
write several versions.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine.chat_formats.call_format import CallFormat, read_as
from penstock.engine.chat_formats.formats import (
    granite,
    harmony,
    llama3_json,
    mistral,
    pythonic,
)
from penstock.engine.chat_formats.tool_format import (
    ARGUMENTS,
    KEY,
    NAME,
    NUMBER,
    VALUE,
    ToolFormat,
)

_HERMES = CallFormat(
    call=f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>', between="\n"
)
_QWEN3_CODER = CallFormat(
    call=f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
    between="\n",
    arguments="tags",
    argument=f"<parameter={KEY}>\n{VALUE}\n</parameter>\n",
)
_GLM45 = CallFormat(
    call=f"<tool_call>{NAME}\n{ARGUMENTS}</tool_call>",
    between="\n",
    arguments="tags",
    argument=f"<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n",
)
_KIMI_K2 = CallFormat(
    call=f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>{ARGUMENTS}"
    "<|tool_call_end|>",
    first="<|tool_calls_section_begin|>",
    last="<|tool_calls_section_end|>",
)
_DEEPSEEK_V31 = CallFormat(
    call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>",
    last="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_V3 = CallFormat(
    call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>",
    between="\n",
    last="<｜tool▁calls▁end｜>",
)
_LFM2 = CallFormat(
    call=f"{NAME}({ARGUMENTS})",
    first="<|tool_call_start|>[",
    between=", ",
    last="]<|tool_call_end|>",
    arguments="literals",
    argument=f"{KEY}={VALUE}",
    separator=", ",
    quote="'",
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "openai": harmony.FORMAT,
    "qwen3_coder": read_as(_QWEN3_CODER),
    "qwen3_xml": read_as(_QWEN3_CODER),
    "glm45": read_as(_GLM45),
    "kimi_k2": read_as(_KIMI_K2),
    "deepseek_v3": read_as(_DEEPSEEK_V3),
    "deepseek_v31": read_as(_DEEPSEEK_V31),
    "mistral": mistral.FORMAT,
    "granite": granite.FORMAT,
    "lfm2": read_as(_LFM2),
    "llama4_pythonic": pythonic.LLAMA_4,
    "llama3_json": llama3_json.FORMAT,
    "llama4_json": llama3_json.FORMAT,
    "pythonic": pythonic.FORMAT,
    "hermes": read_as(_HERMES),
}


def tool_format_of(calls: CallFormat | str) -> ToolFormat:
    """The parser of calls, and what a grammar needs.

    Args:
        calls: the format, or its name.
    """
    return TOOL_FORMATS[calls] if isinstance(calls, str) else read_as(calls)
