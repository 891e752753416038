"""The rows of weights that turn a causal model's last hidden state into a score, or into a number
for each label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import LoadedModel
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.weights.formats import open_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreHead:
    """Numbers are the products of a hidden state with the rows of `weight`, which is float64
    [num_labels, hidden_size]."""

    weight: Tensor


def load_score_head(
    model: LoadedModel, pooling: ModelPooling, path: Path, *, is_dummy: bool
) -> ScoreHead | None:
    """The head of a model that scores or classifies; None if it does not, or another stage does.

    Of a reranker that answers yes or no, the probability of yes among the two is the sigmoid of
    the difference of their logits, and so of one product with the difference of their rows.

    Raises:
        ModelLoadError: the checkpoint has no such weights.
    """
    if not {"score", "classify"} & set(pooling.tasks):
        return None
    if not isinstance(model, Decoder):
        raise ModelLoadError("a model that scores or classifies must be native, or an encoder")
    if not model.config.has_head:
        return None
    if pooling.pair_format == "yes_no" and not pooling.has_score_weight:
        ids = pooling.answer_tokens or _ids_of(pooling.answers, path)
        yes, no = model.head.look_up(torch.tensor(ids, device=model.device)).double()
        return ScoreHead(weight=(yes - no)[None])
    num_labels = len(pooling.labels)
    if is_dummy:
        return ScoreHead(
            weight=model.head.look_up(torch.arange(num_labels, device=model.device)).double()
        )
    weight = open_checkpoint(path).read("score.weight", (num_labels, model.config.hidden_size))
    return ScoreHead(weight=weight.to(device=model.device, dtype=torch.float64))


def _ids_of(answers: tuple[str, str], path: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    found = [each for each in map(tokenizer.token_to_id, answers) if each is not None]
    if len(found) < len(answers):
        raise ModelLoadError(
            f"{path / 'tokenizer.json'}: a reranker needs the tokens {' and '.join(answers)}"
        )
    return found
