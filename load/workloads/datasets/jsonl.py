"""`jsonl`: a user's own prompts, a JSON object a line.

    {"prompt": "text" or [token ids], "max_tokens": 64}
    {"messages": [{"role": "system", ...}, {"role": "user", "content": "text"}, ...]}

Each message of a user is a turn. Answers of an assistant are left out: the server gives its own.
`output_tokens` means the same as `max_tokens`; without either, a default counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Prompt, Turn
from penstock.load.workloads.datasets.lines import positive_int, read_lines
from penstock.load.workloads.prompts import PromptMaker

_SYSTEM_ROLES, _ROLES = ("system", "developer"), ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl:
    """
    Attributes:
        num_dialogues: so many at most, from the file's start.
        max_tokens: where a line says nothing.
    """

    path: Path
    num_dialogues: int
    max_tokens: int

    def make(self, _: PromptMaker) -> list[Dialogue]:
        """
        Raises:
            ConfigError: a file or line of another form.
        """
        lines = read_lines(self.path, max_lines=self.num_dialogues)
        return [self._dialogue(item, place) for place, item in lines]

    def _dialogue(self, item: Mapping[str, Any], place: str) -> Dialogue:
        value = item.get("max_tokens", item.get("output_tokens", self.max_tokens))
        max_tokens = positive_int(value, "max_tokens", place)
        if "messages" not in item:
            prompt = _prompt(item.get("prompt"), place)
            return Dialogue(turns=(Turn(text=prompt, max_tokens=max_tokens),))
        said = list(_messages(item["messages"], place))
        users = [content for role, content in said if role == "user"]
        if not users:
            raise ConfigError(f"{place}: no message of a user")
        return Dialogue(
            turns=tuple(Turn(text=content, max_tokens=max_tokens) for content in users),
            system="\n\n".join(content for role, content in said if role in _SYSTEM_ROLES),
        )


def _prompt(value: object, place: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{place}: needs messages, or a prompt: a text or a list of token ids")


def _messages(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Role and content of each."""
    if not isinstance(value, list):
        raise ConfigError(f"{place}: messages must be a list")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ConfigError(f"{place}: a message needs a role: one of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{place}: a message's content must be a text")
        yield message["role"], message["content"]
