"""What features add to a step, before and after its forward pass.

What a feature knows of a sequence is the state that its `SequenceExtension` returns when the
sequence enters. The batch keeps it, and it goes when the sequence leaves; a feature of which no
sequence on the device has a state takes no part in steps. A drafter also plans: it guesses tokens
before the inputs of a step are made (`StepPlanner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
from penstock.engine.sampling.grammars import GrammarMasks, SequenceGrammar, StepMasks
from penstock.engine.sampling.logprobs import PromptSpan, prompt_logprobs
from penstock.engine.sampling.sampling_table import SamplingRow, SpecialRows
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.vision.image_rows import SequenceImages, step_images

if TYPE_CHECKING:
    from penstock.engine.runner.input_batch import StepInputs

Integers = npt.NDArray[np.int64]


class ResultPart(Protocol):
    """What an extension adds to a step's result, once the step has ended."""

    def add_to(self, result: BatchResult) -> BatchResult: ...


class StepPlanner(Protocol):
    """What a feature does before a step's inputs are made."""

    def plan(self, batch: Batch) -> None:
        """Follow the batch's blocks, also where it computes nothing; it may change its drafts."""
        ...


class SequenceExtension(Protocol):
    """What a feature does for the sequences that need it."""

    def enter(self, entry: SequenceEntry, token_ids: Sequence[int], parent: Any) -> object | None:
        """A new sequence's state; None: it needs nothing.

        Args:
            token_ids: the sequence's, to which later ones are appended.
            parent: the state of the sequence that it is a fork of, if that has just left.
        """
        ...

    def before(self, step: PlannedRows) -> None:
        """Before the inputs of a step are made, if some sequence on the device has a state. Where
        the same rows follow, step after step, only before the first."""
        ...


class _Rows(NamedTuple):
    """A sequence's share of a step.

    Attributes:
        number: of the sequence in the step.
        first: its first row.
        sampled: those of the sampled rows that are its: one more than it has drafts, or none.
        state: the extension's.
    """

    number: int
    item: ScheduledSequence
    first: int
    sampled: range
    state: Any


# Takes what it needs of a forward pass, in which the inputs of several steps may be one object.
Reader = Callable[["StepInputs", StepOutput], ResultPart | None]
Interrupt = tuple[int, Callable[[ScheduledSequence], bool]]


@dataclass(slots=True, kw_only=True)
class PlannedRows:
    """A step whose inputs are being made; extensions change it, in their order.

    Attributes:
        states: of each sequence, by the extensions that it has.
        starts, stops: int64 [num_seqs], the positions that are computed.
        is_complete: [num_seqs], whether the sequence gets a token.
        images: what images add to the forward pass.
        special: what sampled rows need besides a draw.
        readers: called after the forward pass.
        may_last: whether the next step's inputs can be made of this one's.
        interrupts: called before each such step, with the sequence of their number; True: its
            inputs have to be made anew.
    """

    scheduled: Sequence[ScheduledSequence]
    states: Sequence[Mapping[SequenceExtension, Any]]
    starts: Integers
    stops: Integers
    is_complete: npt.NDArray[np.bool_]
    device: torch.device
    images: StepImages | None = None
    special: SpecialRows = field(default_factory=SpecialRows)
    readers: list[Reader] = field(default_factory=list)
    may_last: bool = True
    interrupts: list[Interrupt] = field(default_factory=list)

    def sampled_rows(self) -> list[range]:
        """Which of the sampled rows are each sequence's."""
        counts = [
            1 + len(item.draft_token_ids) if is_complete else 0
            for item, is_complete in zip(self.scheduled, self.is_complete.tolist(), strict=True)
        ]
        return [
            range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)
        ]

    def having(self, extension: SequenceExtension) -> Iterator[_Rows]:
        """The sequences that have an extension's state."""
        first = 0
        for number, (item, states, sampled) in enumerate(
            zip(self.scheduled, self.states, self.sampled_rows(), strict=True)
        ):
            if extension in states:
                yield _Rows(number, item, first, sampled, states[extension])
            first += item.num_new_tokens


class PooledRows:
    """Sequences that end with a vector or scores, not with tokens. Before those that count sampled
    rows.

    Args:
        pooler: None: a later stage has the hidden states.
    """

    def __init__(self, pooler: Pooler | None) -> None:
        self._pooler = pooler

    def enter(self, entry: SequenceEntry, *_: object) -> PooledSequence | None:
        return None if entry.pooling is None else PooledSequence(entry.pooling)

    def before(self, step: PlannedRows) -> None:
        spans = [
            PooledSpan(
                seq_id=rows.item.seq_id,
                first_row=rows.first,
                num_rows=rows.item.num_new_tokens,
                start=int(step.starts[rows.number]),
                is_last=bool(step.is_complete[rows.number]),
                sequence=rows.state,
            )
            for rows in step.having(self)
        ]
        step.is_complete[[self in states for states in step.states]] = False
        pooler = self._pooler
        if not spans or pooler is None:
            return

        def read(_: StepInputs, output: StepOutput) -> ResultPart | None:
            vectors = pooler.pool(spans, output.hidden)
            return None if vectors is None else _VectorsPart(vectors)

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
        self, entry: SequenceEntry, token_ids: Sequence[int], _: object
    ) -> tuple[SequenceEntry, Sequence[int]] | None:
        return None if entry.num_prompt_logprobs is None else (entry, token_ids)

    def before(self, step: PlannedRows) -> None:
        spans = []
        for number, item, first_row, _, (entry, known) in step.having(self):
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
                lambda _, output: _PromptPart(
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

    def enter(self, entry: SequenceEntry, *_: object) -> SequenceImages | None:
        return SequenceImages(entry, self._encoder) if entry.images else None

    def before(self, step: PlannedRows) -> None:
        given = [states.get(self) for states in step.states]
        found = step_images(given, step.starts.tolist(), step.stops.tolist(), step.device)
        step.images = found
        step.may_last = found is None or found.rows is None  # which stay in one step


class AdapterRows:
    """Rows that take their adapters from slots."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def enter(self, entry: SequenceEntry, *_: object) -> str:
        """The digest of its adapter; all have one, so that rows without are seen too."""
        return entry.adapter or ""

    def before(self, step: PlannedRows) -> None:
        self._slots.use(
            [states[self] for states in step.states],
            num_tokens=[item.num_new_tokens for item in step.scheduled],
            num_sampled=list(map(len, step.sampled_rows())),
        )


class GrammarRows:
    """Sequences of which not every token may be the next.

    Args:
        max_num_seqs: sequences on the device.
    """

    def __init__(self, compiler: GrammarCompiler, max_num_seqs: int, device: torch.device) -> None:
        self._compiler, self._max_num_seqs, self._device = compiler, max_num_seqs, device
        self._memory: GrammarMasks | None = None

    def enter(
        self, entry: SequenceEntry, token_ids: Sequence[int], parent: SequenceGrammar | None
    ) -> SequenceGrammar | None:
        if parent is not None:
            return parent.fork(token_ids)
        return SequenceGrammar.of(entry, token_ids, self._compiler)

    def before(self, step: PlannedRows) -> None:
        grammars: dict[int, SequenceGrammar] = {}
        for rows in step.having(self):
            if rows.sampled:
                grammar, drafts = rows.state, rows.item.draft_token_ids
                num_known = int(step.stops[rows.number]) - len(drafts)
                is_masked = grammar.needs_mask(num_known, drafts)
                if is_masked:
                    grammars |= dict.fromkeys(rows.sampled, grammar)
                if grammar.is_idle_at_times:
                    changes = partial(grammar.changes, is_masked)
                    step.interrupts.append((rows.number, changes))
        if grammars:
            num_rows = step.sampled_rows()[-1].stop
            step.special.masks = StepMasks(self._memory_for(len(grammars)), grammars, num_rows)

    def _memory_for(self, num_masks: int) -> GrammarMasks:
        if self._memory is None or len(self._memory) < num_masks:  # drafts have masks of their own
            num_masks += self._max_num_seqs
            self._memory = GrammarMasks(num_masks, self._compiler.vocab_size, self._device)
        return self._memory


class ChangedRows:
    """Sequences whose logits are changed before the draw, or whose log-probabilities are asked
    for."""

    def enter(
        self, entry: SequenceEntry, token_ids: Sequence[int], _: object
    ) -> SamplingRow | None:
        row = SamplingRow(
            params=entry.params,
            token_ids=token_ids,
            num_prompt_tokens=entry.num_prompt_tokens,
            num_logprobs=entry.num_logprobs,
        )
        return row if row.is_special else None

    def before(self, step: PlannedRows) -> None:
        for rows in step.having(self):
            num_known = int(step.stops[rows.number]) - len(rows.item.draft_token_ids)
            step.special.add(rows.sampled, rows.state, num_known)
