"""Hidden states to vectors, scores and probabilities, for the sequences that want no token.

Everything is computed in float64 and rounded once: a sum's order, which depends on how a prompt was
cut into chunks, does not show in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.pooling.score_head import ScoreHead
from penstock.engine.pooling.settings import Activation, ModelPooling, PoolingParams

_MIN_LENGTH = 1e-12  # of a vector, before it is divided by it: as torch's `normalize`


@dataclass(slots=True)
class PooledSequence:
    """A sequence that ends with a vector or scores.

    Attributes:
        part: inside its prompt: float64 [hidden_size], the sum of its hidden states so far, or the
            first one.
    """

    params: PoolingParams
    part: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSpan:
    """The tokens of a pooled sequence that a step computes.

    Attributes:
        first_row: of its tokens among the step's.
        start: the position of the first.
        is_last: with the last of them the sequence is computed.
    """

    seq_id: int
    first_row: int
    num_rows: int
    start: int
    is_last: bool
    sequence: PooledSequence


class Vectors:
    """The results of one step, which a GPU may not have computed yet.

    Args:
        rows: float32 [num_rows, size]
    """

    def __init__(self, seq_ids: Sequence[int], rows: Tensor) -> None:
        self._seq_ids, self._rows = seq_ids, rows

    def read(self) -> tuple[Mapping[int, bytes], list[int]]:
        """By sequence, lowest byte first; and the sequences whose numbers are not finite."""
        rows = self._rows.cpu()
        is_good = rows.isfinite().all(dim=1).tolist()
        numbers = rows.numpy().astype("<f4", copy=False)
        pairs = list(zip(self._seq_ids, is_good, strict=True))
        found = {
            seq_id: numbers[row].tobytes() for row, (seq_id, is_fine) in enumerate(pairs) if is_fine
        }
        return found, [seq_id for seq_id, is_fine in pairs if not is_fine]


def activated(numbers: Tensor, activation: Activation) -> Tensor:
    """Scores or probabilities.

    Args:
        numbers: float64 [num_texts, num_labels], as a head gives them.
    """
    if activation == "softmax":
        return numbers.softmax(dim=1)
    return numbers.sigmoid() if activation == "sigmoid" else numbers


class Pooler:
    """
    Args:
        head: of a model that scores or classifies; None: it has none.
    """

    def __init__(self, pooling: ModelPooling, head: ScoreHead | None = None) -> None:
        self._pooling = pooling
        self._head = head

    def pool(self, spans: Sequence[PooledSpan], hidden: Tensor) -> Vectors | None:
        """The results of the sequences that end with this step; None if there are none.

        Args:
            hidden: [num_tokens, hidden_size], of the step.
        """
        pooled = [self._pool(span, hidden) for span in spans]
        ended = [span for span in spans if span.is_last]
        if not ended:
            return None
        rows = torch.stack([each for each in pooled if each is not None])
        if ended[0].sequence.params.task != "embed":
            rows = self._scores(rows)
        elif self._pooling.is_normalized:
            rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(_MIN_LENGTH)
        return Vectors([span.seq_id for span in ended], rows.float())

    def _pool(self, span: PooledSpan, hidden: Tensor) -> Tensor | None:
        """float64 [hidden_size], if the sequence is computed."""
        first, end = span.first_row, span.first_row + span.num_rows
        kind, sequence = self._pooling.kind, span.sequence
        if kind == "last":
            return hidden[end - 1].double() if span.is_last else None
        # Each of its tokens is computed once, in order, and none is found in the cache.
        assert (sequence.part is None) == (span.start == 0)
        if kind == "cls":
            part = hidden[first].double() if sequence.part is None else sequence.part
        else:
            part = hidden[first:end].double().sum(0)
            if sequence.part is not None:
                part = part + sequence.part
        if not span.is_last:
            sequence.part = part
            return None
        return part / (span.start + span.num_rows) if kind == "mean" else part

    def _scores(self, rows: Tensor) -> Tensor:
        assert self._head is not None, "the model has no score head"
        numbers = torch.stack([(rows * weight).sum(1) for weight in self._head.weight], dim=1)
        return activated(numbers, self._pooling.activation)
