"""How a thought is ended that has used up its budget: by the end that its format has, after a
sentence that the model's family has learnt to stop with, where one is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.engine.chat_formats.formats import tool_format_of
from penstock.engine.chat_formats.syntax import OutputSyntax
from penstock.engine.request import ThoughtLimit

# By the beginning of `model_type`: what is before and after the end. Sources: Qwen, "Qwen3
# Technical Report", 2025, section 4.3, and Qwen's documentation, "Thinking Budget"; ByteDance, the
# model card of Seed-OSS; NVIDIA, that of Nemotron Nano 2.
_SENTENCES: Mapping[str, tuple[str, str]] = {
    "qwen3": (
        "\n\nConsidering the limited time by the user, I have to give the solution based on the "
        "thinking directly now.\n",
        "\n\n",
    ),
    "seed_oss": (
        "\n<seed:cot_budget_reflect>I have exhausted my token budget, and now I will start "
        "answering the question.</seed:cot_budget_reflect>\n",
        "",
    ),
    "nemotron_h": (".\n", "\n\n"),
}


def sentence_of(directory: Path) -> tuple[str, str]:
    """What a model's family writes before and after the end of a thought that is cut short.

    Args:
        directory: of the model's files.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever needs it says what is wrong
        return "", ""
    kind = str(config.get("model_type")) if isinstance(config, dict) else ""
    return next((each for name, each in _SENTENCES.items() if kind.startswith(name)), ("", ""))


def thought_limit(
    syntax: OutputSyntax,
    encode: Callable[[str], Sequence[int]],
    *,
    tokens: Mapping[str, int],
    budget: int,
    sentence: tuple[str, str] = ("", ""),
) -> ThoughtLimit | None:
    """What `thinking_token_budget` means in an output; None: it has no thoughts.

    Args:
        encode: to tokens, in which markers are special ones.
        tokens: markers that are single tokens.
        budget: 0: a thought is ended as if there had been none.
        sentence: around the end.
    """
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    frame = tool_format_of(syntax.tools).frame if syntax.tools else None
    before, after = sentence if budget else ("", sentence[1])
    if frame is not None and frame.thought is not None:
        begin, end, following = frame.thought
        begins, ends = ("".join(begin),), (end, *following[:1])
        after, never, recurs = "".join(following), _never(begin, tokens, encode), True
    elif syntax.thoughts is not None:
        begins, end = syntax.thoughts.begins, syntax.thoughts.end
        ends, never, recurs = (end,), (), False
        if not budget and after:
            before = "\n"
    else:
        return None
    marks = "".join((*begins, *ends))
    return ThoughtLimit(
        begins=begins,
        ends=ends,
        marks=tuple((token_id, text) for text, token_id in tokens.items() if text in marks),
        end_token_ids=tuple(encode(f"{before}{end}{after}")),
        is_thinking=syntax.begins_in_reasoning,
        recurs=recurs,
        never=never,
    )


def _never(
    begin: Sequence[str], tokens: Mapping[str, int], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """A thought in a channel is not begun: its name does not follow the mark of channels."""
    mark, name, *_ = begin
    return ((tokens[mark], encode(name)[0]),) if mark in tokens else ()
