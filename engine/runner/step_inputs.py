"""One step, ready to run: what a model and a sampler are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.sampling.prompt_logprobs import PromptSpan
from penstock.engine.sampling.sampling_table import SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Where tokens come from and go to on a device that keeps the last one of each row.

    Attributes:
        awaited_places: int64 [num_awaited], of the tokens that the host does not know yet, among
            num_tokens.
        awaited_rows: int64 [num_awaited], the rows that have them.
        sampled_rows: int64 [num_sampled], the rows that get one.
    """

    awaited_places: Tensor
    awaited_rows: Tensor
    sampled_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The tensors of a step.

    Attributes:
        input_ids: int64 [num_tokens]
        sampled_seq_ids: sequences whose last known token is computed in this step, in order.
        sampled_tokens: int64 [num_sampled], the place of those tokens among num_tokens; None if
            they are all of them.
        sampling: what those sequences ask for.
        prompt_spans: the prompt tokens whose log-probabilities somebody wants.
        token_rows: only where tokens stay on the device.
    """

    input_ids: Tensor
    context: ForwardContext
    sampled_seq_ids: tuple[int, ...]
    sampled_tokens: Tensor | None
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]
    token_rows: TokenRows | None = None
