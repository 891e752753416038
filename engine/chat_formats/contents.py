"""Contents of messages: texts, or lists of parts."""

from __future__ import annotations

from typing import Any


def joined(first: Any, second: Any, between: str = "\n") -> Any:
    """Two contents as one; either may be missing.

    Args:
        between: of two texts.
    """
    if not (first and second):
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_parts(first), *_parts(second)]


def text_of(content: Any) -> str:
    """The text of a content, without its images."""
    return "\n".join(part["text"] for part in _parts(content or "") if "text" in part)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
