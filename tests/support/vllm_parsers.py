"""Writes what vLLM's own parsers find in `tool_texts`, as the corpus of the tests:

    python -m tests.support.vllm_parsers tests/engine/chat_formats/corpus.json

in an environment that has vLLM 0.33 (no GPU is needed, only its Python code). The tests read the
corpus; they do not need vLLM.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.tool_texts import TOOLS, texts

PARSERS = {
    "hermes": ("hermes_tool_parser", "Hermes2ProToolParser"),
    "qwen3_coder": ("qwen3_engine_tool_parser", "Qwen3EngineToolParser"),
    "llama3_json": ("llama_tool_parser", "Llama3JsonToolParser"),
    "pythonic": ("pythonic_tool_parser", "PythonicToolParser"),
    "mistral": ("mistral_tool_parser", "MistralToolParser"),
    "deepseek_v3": ("deepseekv3_tool_parser", "DeepSeekV3ToolParser"),
    "deepseek_v31": ("deepseekv31_tool_parser", "DeepSeekV31ToolParser"),
    "glm45": ("glm47_moe_tool_parser", "Glm47MoeModelToolParser"),
    "kimi_k2": ("kimi_k2_tool_parser", "KimiK2ToolParser"),
    "granite": ("granite_engine_tool_parser", "GraniteEngineToolParser"),
}
MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>",
    "<arg_value>",
    "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call|>",
    "<|end_of_text|>",
)  # fmt: skip


class Tokenizer:
    """What the parsers ask of a tokenizer: the ids of markers, and characters as tokens."""

    is_fast = True
    all_special_tokens = MARKERS
    all_special_ids = tuple(range(len(MARKERS)))

    def get_vocab(self) -> dict[str, int]:
        return {marker: index for index, marker in enumerate(MARKERS)}

    def encode(self, text: str, **_: Any) -> list[int]:
        vocabulary = self.get_vocab()
        if text in vocabulary:
            return [vocabulary[text]]
        return [1000 + ord(character) for character in text]

    def decode(self, token_ids: list[int] | int, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(MARKERS[i] if i < len(MARKERS) else chr(i - 1000) for i in ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def main() -> None:
    """Parse every text."""
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": dict(tool)} for tool in TOOLS],
    )
    rows, failures = [], 0
    for name, text, kind_of_text in texts():
        if name not in PARSERS:
            continue
        module, kind = PARSERS[name]
        parser_type = getattr(importlib.import_module(f"vllm.tool_parsers.{module}"), kind)
        try:
            parser = parser_type(Tokenizer(), request.tools)
        except TypeError:
            parser = parser_type(Tokenizer())
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as error:
            failures += 1
            rows.append([name, text, kind_of_text, f"{type(error).__name__}: {error}"[:80], None])
            continue
        calls = [[call.function.name, call.function.arguments] for call in found.tool_calls or ()]
        rows.append([name, text, kind_of_text, found.content or "", calls])
    Path(sys.argv[1]).write_text(json.dumps(rows, ensure_ascii=False, indent=0) + "\n")
    print(f"{len(rows)} texts, {failures} failures")


if __name__ == "__main__":
    main()
