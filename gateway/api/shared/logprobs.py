"""Log-probabilities in the APIs' three formats: a list of objects, the older parallel lists, and
vLLM's list of dictionaries for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.request import TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.engine.text.detokenizer import new_detokenizer

_LEAST = -9999.0  # JSON has no -inf
Lists = dict[str, list[Any]]


def token_name(token_id: int) -> str:
    """vLLM's name of a token by its id: several tokens may have the same text."""
    return f"token_id:{token_id}"


class TokenObjects:
    """The format of chat completions and responses: one object per token of an output. Joined, the
    bytes are the output's text.

    Args:
        begins: the output begins a text, and with its first token.
        as_ids: name tokens by id instead of by text.
    """

    def __init__(self, tokenizer: Tokenizer, *, begins: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_first = begins
        self._as_ids = as_ids

    def of(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The objects of the next tokens."""
        return [self._of(entry) for entry in entries]

    def _of(self, entry: TokenLogprobs) -> dict[str, Any]:
        found = {
            **self._object(entry.token_id, entry.logprob),
            "top_logprobs": [self._object(*candidate) for candidate in entry.top],
        }
        if self._is_first:  # nothing is first after a token that is shown
            self._is_first = entry.token_id in self._tokenizer.special_token_ids
        return found

    def _object(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer, is_first = self._tokenizer, self._is_first
        return {
            "token": token_name(token_id)
            if self._as_ids
            else tokenizer.token_text(token_id, is_first=is_first),
            "logprob": max(logprob, _LEAST),
            "bytes": list(tokenizer.token_bytes(token_id, is_first=is_first)),
        }


def prompt_dictionaries(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: null for the first token, then token id → object, the token's own first.

    Args:
        entries: of the prompt's tokens from the second on.
        num_top: alternatives wanted; the entries may have more.
    """

    def entry_object(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": text}

    dictionaries: list[dict[str, Any] | None] = [None]
    for entry in entries:
        objects = {str(entry.token_id): entry_object(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1):
            objects.setdefault(str(token_id), entry_object(token_id, logprob, rank))
        dictionaries.append(objects)
    return dictionaries


class TokenLists:
    """The format of completions: parallel lists, with each token's offset in the choice's text.

    Args:
        num_top: alternatives wanted; the entries may have more.
        context: preceding ids, whose text is not counted.
        as_ids: name tokens by id instead of by text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        skip_special_tokens: bool,
        context: Sequence[int] = (),
        next_offset: int = 0,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._is_first = not set(context) - tokenizer.special_token_ids
        self._num_top = num_top
        self._next_offset = next_offset
        self._detokenizer = new_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context=context
        )

    def add(self, entries: Sequence[TokenLogprobs]) -> Lists:
        """The lists of the next tokens."""
        if self._is_first and len(entries) > 1:  # the others are not first
            return joined(self.add(entries[:1]), self.add(entries[1:]))
        name = self._name
        return {
            "tokens": [name(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives by name; of several with the same text, the likeliest. As with OpenAI,
        the token itself is always among them."""
        likeliest: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            name, logprob = self._name(token_id), max(logprob, _LEAST)
            likeliest[name] = max(logprob, likeliest.get(name, logprob))
        return likeliest

    def add_prompt(self, first_token_id: int, entries: Sequence[TokenLogprobs]) -> Lists:
        """The lists of a prompt, whose first token has no logprobs."""
        first: Lists = {
            "tokens": [self._name(first_token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset(first_token_id)],
        }
        return joined(first, self.add(entries))

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return token_name(token_id)
        return self._tokenizer.token_text(token_id, is_first=self._is_first)

    def _offset(self, token_id: int) -> int:
        """Where the token's text begins. Tokens that share a character get the same offset. The
        next token follows this one."""
        if self._is_first:
            self._is_first = token_id in self._tokenizer.special_token_ids
        offset = self._next_offset
        self._next_offset += len(self._detokenizer.push(token_id))
        return offset


def joined(first: Lists, second: Lists) -> Lists:
    return {name: [*first[name], *second[name]] for name in first}
