"""How a model marks thoughts, by vLLM's names of parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model marks thoughts.

    Attributes:
        begins: the markers of which one begins a thought.
        end: the marker after it.
        is_open: outputs begin inside a thought, whatever the prompt says.
    """

    begins: tuple[str, ...]
    end: str
    is_open: bool = False

    def as_fields(self) -> dict[str, Any]:
        """As plain values, for storage."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ReasoningFormat:
        """The inverse of `as_fields`."""
        return cls(**{**fields, "begins": tuple(fields["begins"])})


_THINK = ReasoningFormat(begins=("<think>",), end="</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat | None] = {
    "deepseek_r1": ReasoningFormat(begins=("<think>",), end="</think>", is_open=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "granite": ReasoningFormat(
        begins=("Here is my thought process:", "Here's my thought process:"),
        end="Here is my response:",
    ),
    "hunyuan_a13b": _THINK,
    "kimi_k2": _THINK,
    "mistral": ReasoningFormat(begins=("[THINK]",), end="[/THINK]"),
    "openai_gptoss": None,  # its tool format reads thoughts too
    "qwen3": _THINK,
}
