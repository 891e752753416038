"""Finds stored token ids that a new prompt can begin with.

Tokenising a conversation again may give other ids than the model generated, whose KV would then not
be found. If the rendered prompt begins with the text of stored ids, these ids are reused and only
the rest is tokenised. A template that drops earlier reasoning, changed instructions or a new date
change the text, so only the equal prefix is reused.

The rest begins at a token at which the tokenizer always splits first (`<|im_end|>`), because there
the parts tokenise to the same ids as the whole.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.engine.text import Tokenizer
from penstock.gateway.storage.conversations.records import Rendering, StoredTurn


@dataclass(frozen=True, slots=True)
class Reused:
    """The beginning of a prompt as token ids whose KV an engine may have.

    Attributes:
        token_ids: empty if nothing could be reused.
        rest: the text after them, to be tokenised without adding special tokens.
    """

    token_ids: Sequence[int]
    rest: str


def rendering_of(text: str, origin: bytes = b"") -> Rendering:
    digest = hashlib.sha256(_utf8(text)).digest()
    return Rendering(num_chars=len(text), digest=digest, origin=origin)


def unknown_text(origin: bytes) -> Rendering:
    """Of ids that do not come from one text."""
    return Rendering(num_chars=0, digest=b"", origin=origin)


def origin_of(turn: StoredTurn) -> bytes:
    """By what its ids were made; empty: unknown."""
    return b"" if turn.prompt is None else turn.prompt.origin


def reuse(text: str, turns: Sequence[StoredTurn], tokenizer: Tokenizer, *, origin: bytes) -> Reused:
    """The longest beginning of a rendered prompt that is stored as token ids.

    Args:
        text: the whole prompt, special tokens included.
        turns: turns of one path, in any order.
        origin: only ids that were made by the same are reused.
    """
    found = [known for turn in turns for known in _known_of(turn) if known[0].origin == origin]
    return reuse_any(text, found, tokenizer)


# A text and its ids in parts, which are joined only if the text is found.
Known: TypeAlias = "tuple[Rendering, Sequence[array[int]]]"


def reuse_any(text: str, known: Sequence[Known], tokenizer: Tokenizer) -> Reused:
    """`reuse` for any known texts."""
    for num_chars, parts in reversed(list(_beginnings(text, known))):
        reused = _cut(text, num_chars, sum(parts, array("I")), tokenizer)
        if reused is not None:
            return reused
    return Reused((), text)


def _known_of(turn: StoredTurn) -> Iterator[Known]:
    if turn.prompt is not None:
        yield turn.prompt, (turn.prompt_token_ids,)
    if turn.whole is not None:
        yield turn.whole, (turn.prompt_token_ids, turn.output_token_ids)


def _beginnings(text: str, known: Sequence[Known]) -> Iterator[tuple[int, Sequence[array[int]]]]:
    """The known texts with which `text` begins: (length, ids), shortest first, in one pass."""
    digest, num_hashed = hashlib.sha256(), 0
    for rendering, parts in sorted(known, key=lambda item: item[0].num_chars):
        if rendering.num_chars > len(text):
            return
        digest.update(_utf8(text[num_hashed : rendering.num_chars]))
        num_hashed = rendering.num_chars
        if digest.digest() == rendering.digest:
            yield num_hashed, parts


def _cut(
    text: str, num_chars: int, token_ids: Sequence[int], tokenizer: Tokenizer
) -> Reused | None:
    """Cut where the rest can be tokenised separately: after the ids, or before the last boundary
    token among them."""
    boundaries = tokenizer.boundary_tokens
    if num_chars == len(text) or text.startswith(tuple(boundaries.values()), num_chars):
        return Reused(token_ids, text[num_chars:])
    for index in range(len(token_ids) - 1, 0, -1):
        if token_ids[index] in boundaries:
            tail = tokenizer.decode(token_ids[index:], skip_special_tokens=False)
            if not text.endswith(tail, 0, num_chars):  # a partial character, or a trimming decoder
                return None
            return Reused(token_ids[:index], text[num_chars - len(tail) :])
    return None


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
