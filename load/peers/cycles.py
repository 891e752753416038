"""Models whose text is known: each word is always followed by the same one.

Speculation is as fast as the text is predictable, and random weights soon write loops: they neither
copy a prompt nor write anything new. These models have random weights too, of the same shapes and
drawn alike in every layer, so that a step multiplies what it always does, and two matrices that
decide the text:

- A token's embedding is random, and so long (16 in root mean square) that everything the layers
  add to it, about 2, only turns it a little.
- The output layer's row of a word is the embedding of the word before it, at length 1. Random
  vectors are nearly at right angles, so that row has the largest product by far. Tokens that are
  not words have rows of zeros. This layer cannot be tied to the embedding, as M's is, but a step
  reads as much of it.

Half of the words form short cycles. After a prompt of one whole cycle comes the same cycle again:
the model copies its prompt. The others form one long cycle: from any place in it, no word comes
twice until all have come. A draft model's next word is the same after a given share of the words.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

SHORT_CYCLE = 128  # words; of a prompt as well
_EMBEDDING_RMS = 16.0


def cycles_of(word_ids: range) -> tuple[list[list[int]], list[int]]:
    """The short cycles and the long one, each in the order in which the model writes its words."""
    words = random.Random("cycles").sample(word_ids, len(word_ids))
    num_short = len(words) // 2 // SHORT_CYCLE * SHORT_CYCLE
    short = [words[start : start + SHORT_CYCLE] for start in range(0, num_short, SHORT_CYCLE)]
    return short, words[num_short:]


def prompts_of(word_ids: range, count: int, *, is_echo: bool) -> list[list[int]]:
    """Different prompts of `SHORT_CYCLE` words that the model copies, or after which nothing
    repeats, as far apart as possible."""
    short, words = cycles_of(word_ids)
    if is_echo:
        return short[:count]
    starts = [len(words) * index // count for index in range(count)]
    return [(words[start:] + words[:start])[:SHORT_CYCLE] for start in starts]


def next_words(word_ids: range, agreement: float = 1.0) -> dict[int, int]:
    """Each word's next one; a share of 1 − `agreement` of the words has another one than before."""
    short, long = cycles_of(word_ids)
    following = {
        word: later
        for cycle in [*short, long]
        for word, later in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    }
    num_changed = round((1.0 - agreement) * len(word_ids))
    changed = random.Random("changed").sample(word_ids, num_changed)
    others = [following[word] for word in changed]
    following.update(zip(changed, others[1:] + others[:1], strict=True))
    return following


@torch.no_grad()
def decide_text(model: Any, following: Mapping[int, int]) -> None:
    """Overwrite the embedding and the output layer of a `transformers` model."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert embedding is not head, "the output layer is tied to the embedding"
    directions = F.normalize(torch.randn(embedding.shape), dim=1)
    embedding.copy_(directions * _EMBEDDING_RMS * embedding.shape[1] ** 0.5)
    head.zero_()
    before, after = torch.tensor(list(following.items())).T
    head[after] = directions[before].to(head.dtype)
