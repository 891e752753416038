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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

SHORT_CYCLE = 128  # words; of a prompt to be copied as well
_EMBEDDING_RMS = 16.0


def short_cycles(word_ids: range) -> list[list[int]]:
    """The cycles of `SHORT_CYCLE` words each, in the order in which the model writes them."""
    words = _shuffled(word_ids)
    num_cycles = len(words) // 2 // SHORT_CYCLE
    return [words[n * SHORT_CYCLE : (n + 1) * SHORT_CYCLE] for n in range(num_cycles)]


def long_cycle(word_ids: range) -> list[int]:
    """The words of no short cycle, in the order in which the model writes them."""
    return _shuffled(word_ids)[len(short_cycles(word_ids)) * SHORT_CYCLE :]


def _shuffled(word_ids: range) -> list[int]:
    return random.Random("cycles").sample(word_ids, len(word_ids))


def prompts_of(word_ids: range, count: int, *, is_echo: bool) -> list[list[int]]:
    """Prompts of `SHORT_CYCLE` words that the model copies, or after which nothing repeats."""
    if is_echo:
        return echoed_prompts(word_ids, count)
    return novel_prompts(word_ids, count, SHORT_CYCLE)


def echoed_prompts(word_ids: range, count: int) -> list[list[int]]:
    """Prompts that the model copies; all differ, if there are so many."""
    cycles = short_cycles(word_ids)
    return [cycles[index % len(cycles)] for index in range(count)]


def novel_prompts(word_ids: range, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts after which nothing repeats itself, as far apart as possible."""
    words = long_cycle(word_ids)
    starts = [len(words) * index // count for index in range(count)]
    return [(words[start:] + words[:start])[:num_tokens] for start in starts]


def misled(prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """A prompt as long, of threes of the output's tokens, each before another one than there."""
    decoys = [
        token_id
        for start in range(0, min(len(prompt), len(output)) - 4, 4)
        for token_id in (*output[start : start + 3], prompt[0])
    ]
    return decoys + list(prompt[len(decoys) :])


def next_words(word_ids: range, agreement: float = 1.0) -> dict[int, int]:
    """Each word's next one; a share of 1 − `agreement` of the words has another one than before."""
    following = dict(_pairs([*short_cycles(word_ids), long_cycle(word_ids)]))
    num_changed = round((1.0 - agreement) * len(word_ids))
    changed = random.Random("changed").sample(word_ids, num_changed)
    others = [following[word] for word in changed]
    following.update(zip(changed, others[1:] + others[:1], strict=True))
    return following


def _pairs(cycles: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for cycle in cycles:
        yield from zip(cycle, [*cycle[1:], cycle[0]], strict=True)


def continuation(prompt: Sequence[int], following: Mapping[int, int], num_tokens: int) -> list[int]:
    """What the model writes after a prompt."""
    token_ids = [prompt[-1]]
    for _ in range(num_tokens):
        token_ids.append(following[token_ids[-1]])
    return token_ids[1:]


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


def repeat_rate(token_ids: Sequence[int], num_prompt_tokens: int, size: int = 4) -> float:
    """The share of n-grams, of those that end in the output, that occurred before in the text."""
    seen: set[tuple[int, ...]] = set()
    num_repeated = 0
    for end in range(size, len(token_ids) + 1):
        ngram = tuple(token_ids[end - size : end])
        num_repeated += end > num_prompt_tokens and ngram in seen
        seen.add(ngram)
    return num_repeated / (len(token_ids) - num_prompt_tokens)
