"""Log-probabilities in the APIs' two shapes: a list of objects, or the older parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.request import TokenLogprobs
from penstock.engine.text import Tokenizer

_LEAST = -9999.0  # JSON has no -inf


def token_objects(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """As chat completions and responses have them: one object per token."""
    return [
        {
            **_token_object(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_token_object(tokenizer, *candidate) for candidate in entry.top],
        }
        for entry in entries
    ]


def _token_object(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


@dataclass(slots=True)
class TokenLists:
    """As completions has them: parallel lists, with each token's offset in the choice's text."""

    tokenizer: Tokenizer
    next_offset: int = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The lists of the next tokens."""
        text = self.tokenizer.token_text
        lists: dict[str, list[Any]] = {
            "tokens": [text(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            # The sampled token is always among them, as OpenAI has it.
            "top_logprobs": [
                {
                    text(token_id): max(logprob, _LEAST)
                    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
                }
                for entry in entries
            ],
            "text_offset": [],
        }
        for token in lists["tokens"]:
            lists["text_offset"].append(self.next_offset)
            self.next_offset += len(token)
        return lists
