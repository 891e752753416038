"""What int8 does to a model's logits: beside those of the same weights as they are.

On conversations that the demo model was not trained on: questions in wordings kept from it. Knows
nothing of speed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import ModelConfig, Quantization
from penstock.engine.demo.evaluate import Case, held_out_answers
from penstock.engine.errors import ConfigError, InvalidRequestError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.fast_path import LanguageModel, cpu_kernels, fastest
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.kernels.paged_layout import PagedLayout

_BLOCK_SIZE = 16
_TURNS_BEFORE = 5
# What is summed over texts.
_COMPARED = (
    "squared change", "squares", "tokens", "same", "tokens of answers", "same in answers", "loss",
    "int8 loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """A conversation and, from `answer_start` on, the last answer in it."""

    token_ids: list[int]
    answer_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of all texts together.

    Attributes:
        relative_error: root mean square of the logits' change ÷ that of the logits, both about
            their mean in each position (a shift of all logits changes nothing).
        same_top_share: positions whose likeliest token stayed the same ÷ all.
        answer_same_top_share: the same of the tokens of answers.
        perplexity, int8_perplexity: of answers.
    """

    num_texts: int
    num_tokens: int
    relative_error: float
    same_top_share: float
    answer_same_top_share: float
    perplexity: float
    int8_perplexity: float


def held_out_texts(path: Path, *, num_texts: int, seed: int, context_len: int) -> list[Text]:
    """Conversations of six turns for the model in a directory; longer ones than it takes are left
    out. Without a chat template, lines of text.

    Raises:
        ConfigError: none fits.
    """
    tokenizer, template = Tokenizer.from_directory(path), ChatTemplate.from_directory(path)
    rng = random.Random(seed)
    cases = list(held_out_answers(rng, num_before=_TURNS_BEFORE))
    rng.shuffle(cases)

    def texts() -> Iterator[Text]:
        for case in cases:
            prompt = tokenizer.encode(_prompt(template, case), add_special_tokens=False)
            answer = tokenizer.encode(case[1].assistant, add_special_tokens=False)
            if len(prompt) + len(answer) <= context_len:
                yield Text(prompt + answer, len(prompt))

    chosen = list(islice(texts(), num_texts))
    if not chosen:
        raise ConfigError(f"no text fits a context of {context_len} tokens")
    return chosen


def _prompt(template: ChatTemplate, case: Case) -> str:
    """Everything up to the last answer."""
    conversation, turn = case
    messages = [
        {"role": role, "content": content}
        for each in (*conversation.turns, turn)
        for role, content in (("user", each.user), ("assistant", each.assistant))
    ][:-1]
    try:
        return template.render(messages)
    except InvalidRequestError:  # there is none
        return "".join(f"{message['content']}\n" for message in messages)


@torch.inference_mode()
def measure_errors(
    path: Path, *, dtype: str, texts: Sequence[Text], num_threads: int | None
) -> Errors:
    """Run every text through the model in a directory, as it is and in int8, on the CPU."""
    as_it_is, int8 = (
        _load(path, dtype, quantization, num_threads) for quantization in ("none", "int8")
    )
    pool = _pool(as_it_is, max(len(text.token_ids) for text in texts))
    totals = dict.fromkeys(_COMPARED, 0.0)
    for text in texts:
        exact, rounded = (_logits(model, pool, text.token_ids) for model in (as_it_is, int8))
        for name, value in zip(_COMPARED, _compare(exact, rounded, text), strict=True):
            totals[name] += value
    return Errors(
        num_texts=len(texts),
        num_tokens=int(totals["tokens"]),
        relative_error=math.sqrt(totals["squared change"] / totals["squares"]),
        same_top_share=totals["same"] / totals["tokens"],
        answer_same_top_share=totals["same in answers"] / totals["tokens of answers"],
        perplexity=math.exp(totals["loss"] / totals["tokens of answers"]),
        int8_perplexity=math.exp(totals["int8 loss"] / totals["tokens of answers"]),
    )


def _compare(exact: Tensor, rounded: Tensor, text: Text) -> tuple[float, ...]:
    """What `_COMPARED` names, of one text's logits [num_tokens, vocab_size]."""
    answers = slice(text.answer_start - 1, -1)  # where they are predicted
    answer = torch.tensor(text.token_ids[text.answer_start :])
    is_same = exact.argmax(1) == rounded.argmax(1)
    return (
        _squares(rounded - exact),
        _squares(exact),
        float(len(is_same)),
        float(is_same.sum()),
        float(len(answer)),
        float(is_same[answers].sum()),
        float(F.cross_entropy(exact[answers], answer, reduction="sum")),
        float(F.cross_entropy(rounded[answers], answer, reduction="sum")),
    )


def _squares(rows: Tensor) -> float:
    """The sum of squares about each row's mean."""
    return float((rows - rows.mean(1, keepdim=True)).square().sum())


def _load(
    path: Path, dtype: str, quantization: Quantization, num_threads: int | None
) -> LanguageModel:
    config = ModelConfig(dtype=dtype)  # type: ignore[arg-type]
    decoder = load_model(config, path, torch.device("cpu"))
    library = cpu_kernels(decoder, _BLOCK_SIZE, num_threads=num_threads)
    return fastest(decoder, _BLOCK_SIZE, library, quantization)


def _pool(model: LanguageModel, num_tokens: int) -> Tensor:
    """As `KVShape.allocate` gives it: room for so many tokens."""
    shape = KVShape.of(model.config, _BLOCK_SIZE, model.dtype)
    return shape.allocate(shape.num_blocks_for(num_tokens), torch.device("cpu"))


def _logits(model: LanguageModel, pool: Tensor, token_ids: Sequence[int]) -> Tensor:
    """float64 [num_tokens, vocab_size] of one sequence, computed at once."""
    num_tokens = len(token_ids)
    positions = torch.arange(num_tokens)
    context = ForwardContext(
        kv_pool=pool,
        layout=PagedLayout(
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=torch.arange(pool.shape[2], dtype=torch.int32)[None],
            slot_mapping=positions,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
        ),
        positions=positions,
        prompt_lens=torch.full_like(positions, num_tokens),
    )
    return model.logits(model(torch.tensor(token_ids), context)).double()
