"""What features add to a step, before and after its forward pass.

A runner has the `StepExtension` of each feature that its settings turn on (adapters, drafts by a
model). What single sequences ask for is a `SequenceExtension`: the batch has their state as long
as they are on the device, and calls those of which a sequence of it has one. Where all is off,
both lists are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.batch import Batch, BatchResult, ScheduledSequence, SequenceEntry
from penstock.engine.layers.attention import StepImages
from penstock.engine.lora.slots import AdapterSlots
from penstock.engine.models.language_model import ImageEncoder, LanguageModel, StepOutput
from penstock.engine.pooling.pooler import PooledSequence, PooledSpan, Pooler, Vectors
from penstock.engine.request import FinishReason
from penstock.engine.sampling.logprobs import PromptSpan, prompt_logprobs
from penstock.engine.vision.image_rows import SequenceImages, step_images

if TYPE_CHECKING:
    from penstock.engine.runner.input_batch import StepInputs
    from penstock.engine.speculative.device.drafters import Drafter

Integers = npt.NDArray[np.int64]


class ResultPart(Protocol):
    """What an extension adds to a step's result, once the step has ended."""

    def add_to(self, result: BatchResult) -> BatchResult: ...


class StepExtension(Protocol):
    """What a feature does in every step."""

    def update(self, batch: Batch) -> None:
        """Follow the sequences that enter and leave; also in a step that computes nothing."""
        ...

    def before(self, batch: Batch) -> None:
        """Before the step's inputs are made: it may change the batch's drafts."""
        ...

    def bind(self, batch: Batch, sampled_seq_ids: Sequence[int]) -> None:
        """Just before the forward pass.

        Args:
            sampled_seq_ids: the sequence of each row whose logits are computed.
        """
        ...

    def after(self, batch: Batch, inputs: StepInputs, output: StepOutput) -> ResultPart | None:
        """After the forward pass."""
        ...

    def settle(self, seq_ids: Sequence[int]) -> None:
        """The new tokens of these sequences are known."""
        ...


class AdapterRows:
    """The rows of a step take their adapters from slots."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def update(self, batch: Batch) -> None:
        self._slots.update(batch)

    def before(self, batch: Batch) -> None:
        """Inputs do not depend on adapters."""

    def bind(self, batch: Batch, sampled_seq_ids: Sequence[int]) -> None:
        self._slots.prepare(batch, sampled_seq_ids)

    def after(self, batch: Batch, inputs: StepInputs, output: StepOutput) -> None:
        """Results do not depend on them either."""

    def settle(self, seq_ids: Sequence[int]) -> None:
        """Nothing waits for tokens."""


class ModelDrafts:
    """A model's guesses of what comes next."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.settle = drafter.settle

    def update(self, batch: Batch) -> None:
        self._drafter.update(batch)

    def before(self, batch: Batch) -> None:
        self._drafter.propose(batch)

    def bind(self, batch: Batch, sampled_seq_ids: Sequence[int]) -> None:
        """It has inputs of its own."""

    def after(self, batch: Batch, inputs: StepInputs, output: StepOutput) -> ResultPart:
        self._drafter.follow(batch, inputs, output)
        return _CheckedDrafts(self._drafter, inputs.sampled_seq_ids)


@dataclass(frozen=True, slots=True)
class _CheckedDrafts:
    drafter: Drafter
    seq_ids: Sequence[int]

    def add_to(self, result: BatchResult) -> BatchResult:
        self.drafter.settle(self.seq_ids)
        return result


@dataclass(slots=True, kw_only=True)
class PlannedRows:
    """A step whose inputs are being made; extensions change it.

    Attributes:
        states: of each sequence, by the extensions that it has.
        starts, stops: int64 [num_seqs], the positions that are computed.
        is_complete: [num_seqs], whether the sequence gets a token.
        images: what images add to the forward pass.
        readers: take what they need of the forward pass.
        may_last: whether the next step's inputs can be made of this one's.
    """

    scheduled: Sequence[ScheduledSequence]
    states: Sequence[Mapping[SequenceExtension, Any]]
    starts: Integers
    stops: Integers
    is_complete: npt.NDArray[np.bool_]
    device: torch.device
    images: StepImages | None = None
    readers: list[Callable[[StepOutput], ResultPart | None]] = field(default_factory=list)
    may_last: bool = True

    def having(
        self, extension: SequenceExtension
    ) -> Iterator[tuple[int, ScheduledSequence, int, Any]]:
        """The sequences that have an extension: number, item, first row in the step, state."""
        first_row = 0
        for number, (item, states) in enumerate(zip(self.scheduled, self.states, strict=True)):
            if extension in states:
                yield number, item, first_row, states[extension]
            first_row += item.num_new_tokens


class SequenceExtension(Protocol):
    """What some sequences ask for."""

    def enter(self, entry: SequenceEntry, token_ids: Sequence[int]) -> object | None:
        """A new sequence's state, which goes when the sequence leaves; None: it asks for nothing.

        Args:
            token_ids: the sequence's, to which later ones are appended.
        """
        ...

    def before(self, step: PlannedRows) -> None:
        """Before the inputs of a step are made, if one of the device's sequences has a state."""
        ...


class PooledRows:
    """Sequences that end with a vector or scores, not with tokens."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler

    def enter(self, entry: SequenceEntry, _: Sequence[int]) -> PooledSequence | None:
        return None if entry.pooling is None else PooledSequence(entry.pooling)

    def before(self, step: PlannedRows) -> None:
        spans = []
        for number, item, first_row, sequence in step.having(self):
            spans.append(
                PooledSpan(
                    seq_id=item.seq_id,
                    first_row=first_row,
                    num_rows=item.num_new_tokens,
                    start=int(step.starts[number]),
                    is_last=bool(step.is_complete[number]),
                    sequence=sequence,
                )
            )
            step.is_complete[number] = False

        def read(output: StepOutput) -> ResultPart | None:
            vectors = self._pooler.pool(spans, output.hidden)
            return None if vectors is None else _VectorsPart(vectors)

        if spans:
            step.readers.append(read)


@dataclass(frozen=True, slots=True)
class _VectorsPart:
    vectors: Vectors

    def add_to(self, result: BatchResult) -> BatchResult:
        found, spoilt = self.vectors.read()
        ended = {**result.ended_seq_ids, **dict.fromkeys(spoilt, FinishReason.ERROR)}
        return msgspec.structs.replace(result, vectors=found, ended_seq_ids=ended)


class PromptLogprobRows:
    """Sequences whose prompt's log-probabilities are asked for."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def enter(
        self, entry: SequenceEntry, token_ids: Sequence[int]
    ) -> tuple[SequenceEntry, Sequence[int]] | None:
        return None if entry.num_prompt_logprobs is None else (entry, token_ids)

    def before(self, step: PlannedRows) -> None:
        spans = []
        for number, item, first_row, (entry, known) in step.having(self):
            start, stop = int(step.starts[number]) + 1, int(step.stops[number]) + 1
            token_ids = known[start : min(stop, entry.num_prompt_tokens)]
            if token_ids:
                spans.append(
                    PromptSpan(
                        seq_id=item.seq_id,
                        position=start,
                        token_ids=token_ids,
                        first_row=first_row,
                        num_top=entry.num_prompt_logprobs,
                    )
                )
        if spans:
            step.readers.append(
                lambda output: _PromptPart(
                    prompt_logprobs(spans, output.hidden, self._model.logits)
                )
            )


@dataclass(frozen=True, slots=True)
class _PromptPart:
    entries: Mapping[int, Any]

    def add_to(self, result: BatchResult) -> BatchResult:
        return msgspec.structs.replace(result, prompt_logprobs=self.entries)


class ImageRows:
    """Sequences with images in their prompts."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder

    def enter(self, entry: SequenceEntry, _: Sequence[int]) -> SequenceImages | None:
        return SequenceImages(entry, self._encoder) if entry.images else None

    def before(self, step: PlannedRows) -> None:
        given = [states.get(self) for states in step.states]
        found = step_images(given, step.starts.tolist(), step.stops.tolist(), step.device)
        step.images = found
        step.may_last = found is None or found.rows is None  # which stay in one step
