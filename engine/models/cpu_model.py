"""A decoder whose program runs in C: the fast path on a CPU.

The weights are packed for the kernels, and the program (`writer`) is recorded once for a KV pool,
the draw of the next tokens included; a step fills in one structure and runs it, and a step like the
last one fills in nothing. The order of a sum depends only on its own row, so neither batch nor
chunking nor a warm cache changes a bit of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.language_model import DrawnTokens, StepOutput
from penstock.engine.models.writer import DecoderWriter, HeadWriter, WrittenLogits
from penstock.engine.program.cpu_backend import CpuBackend, CpuMeeting
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.program import Buffer
from penstock.kernels.token_masks import TokenMasks

# Rates of one thread, for deciding whether to wake the others. With 128 rows, T of load/peers
# (0.1 million weights in layers) is slower on two threads, S (27 million) is faster.
_READ_BYTES_PER_S, _PRODUCTS_PER_S = 20e9, 100e9
_MIN_SHARED_S = 0.3e-3


def can_run(config: DecoderConfig, block_size: int) -> bool:
    """Whether the kernels support these shapes: they process values, and positions, in pairs."""
    sizes = [config.hidden_size, config.intermediate_size, block_size]
    if config.experts is not None:
        sizes += [config.experts.intermediate_size, config.experts.shared_size]
    is_even = all(size % 2 == 0 for size in sizes)
    return is_even and config.head_dim % LANES == 0 and config.head_dim <= MAX_HEAD_DIM


class CpuModel:
    """A `LanguageModel`: a decoder whose weights the kernels own.

    Args:
        decoder: loses its weights: each matrix is packed here and dropped there.
    """

    def __init__(self, decoder: Decoder, library: CpuLibrary) -> None:
        self.config = config = decoder.config
        self.dtype = decoder.dtype
        self.state_spec = decoder.state_spec
        self.num_threads = library.num_threads
        self._library = library
        self._rotary = RotaryTable(list(decoder.rotaries))  # type: ignore[arg-type]
        self.needs_prompt_lens = self._rotary.needs_prompt_lens
        is_over_heads = config.has_qk_norm and config.qk_norm == "row"
        self._meeting = CpuMeeting(
            library, decoder.ranks, decoder.vocab_size, is_normed_over_heads=is_over_heads
        )
        backend = CpuBackend(library, self._meeting, decoder.expected_bytes)
        self._writer = writer = DecoderWriter(decoder, backend)
        self.weight_bytes = writer.num_bytes + decoder.num_tower_bytes
        self.num_verify_rows = library.num_verify_rows(backend.products)
        self._head: CpuHead | NoHead = NoHead(self.dtype)
        if writer.head is not None:
            self._head = CpuHead(library, writer.head, self._meeting)
        self._features: tuple[Buffer, ...] = ()
        self._block_tables = torch.zeros(0, 0, dtype=torch.int32)
        self._program = CpuProgram(library)
        self._recorded_for: tuple[int, tuple[object, ...]] = (0, ())
        # The last step's context, the tensors it points to, and its output.
        self._context: ForwardContext | None = None
        self._given: tuple[object, ...] = ()
        self._output: StepOutput | None = None
        self._is_shared = self.spares_core = False

    def __del__(self) -> None:
        self._library.settle()  # a late thread may still read weights, to no effect

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], valid until the
        next call"""
        self._context = None
        self._fill(input_ids, context, self._keep(context.layout.block_tables))
        self._head.skip()
        self._run(is_shared=self._is_worth_sharing(len(input_ids)))
        return self._head.hidden.rows[: len(input_ids)]

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,
        draws: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        """As in `LanguageModel`.

        If the context is the last step's, its tensors are the same (their values may differ), so
        the recorded pointers are reused.

        Args:
            context: its block tables must stay in place as long as this decoder lives, since a
                descheduled thread may read them late.
        """
        if context is not self._context or self._output is None or self.needs_prompt_lens:
            self._fill(input_ids, context, context.layout.block_tables)
            output = self._head.bind(len(input_ids), sampled_tokens, parameters, draws, masks)
            features = tuple(each.rows[: len(input_ids)] for each in self._features)
            self._output = replace(output, features=features)
            self._is_shared = self._is_worth_sharing(len(input_ids))
            self._context = context
        self._run(is_shared=self._is_shared and not (self.spares_core and self.num_threads == 2))
        return self._output

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        return self._head.logits(hidden, is_shared=self._is_worth_sharing(len(hidden)))

    def _run(self, *, is_shared: bool) -> None:
        if self._meeting.before is None:
            self._program.run(is_shared=is_shared)
            return
        # The first operation may wait long for another stage: the other threads sleep meanwhile.
        self._program.run_part(0, 1, is_shared=False)
        self._program.run_part(1, len(self._program), is_shared=is_shared)

    def _fill(self, input_ids: Tensor, context: ForwardContext, block_tables: Tensor) -> None:
        """Point the program at the inputs of a forward pass."""
        self._record(len(input_ids), context.kv_pool)
        step, layout = self._program.step, context.layout
        cosines, sines, rows = self._rotary.rows(context)
        step.num_tokens, step.num_seqs = len(input_ids), layout.num_seqs
        step.table_stride = block_tables.stride(0)
        step.token_ids = input_ids.data_ptr()
        step.slot_mapping = layout.slot_mapping.data_ptr()
        step.query_start_loc = layout.query_start_loc.data_ptr()
        step.seq_lens = layout.seq_lens.data_ptr()
        step.block_tables = block_tables.data_ptr()
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.rope_stride = cosines[0].numel()
        step.rotary_rows = rows.data_ptr()
        images = context.images
        step.num_features = 0
        if images is not None and images.rows is not None and images.features is not None:
            step.num_features = len(images.rows)
            step.feature_rows, step.features = images.rows.data_ptr(), images.features.data_ptr()
        self._given = (input_ids, cosines, sines, rows, images)  # keeps the memory alive

    def _is_worth_sharing(self, num_tokens: int) -> bool:
        """Whether reading and multiplying the weights takes one thread long enough to wake the
        others."""
        read_s = self._writer.num_active_bytes / _READ_BYTES_PER_S
        num_products = self._writer.num_active_weights * num_tokens
        return max(read_s, num_products / _PRODUCTS_PER_S) > _MIN_SHARED_S

    def _keep(self, block_tables: Tensor) -> Tensor:
        """A copy that stays in place, since a descheduled thread may read it late."""
        num_rows, num_columns = block_tables.shape
        held_rows, held_columns = self._block_tables.shape
        if num_rows > held_rows or num_columns > held_columns:
            self._library.settle()
            shape = (max(2 * num_rows, held_rows), max(2 * num_columns, held_columns))
            self._block_tables = torch.zeros(shape, dtype=torch.int32)
        self._block_tables[:num_rows, :num_columns] = block_tables
        return self._block_tables

    def _record(self, num_tokens: int, kv_pool: Tensor) -> None:
        """Record the program for this pool with room for `num_tokens`, unless already recorded."""
        capacity, pool = self._recorded_for
        if num_tokens > capacity or (kv_pool.data_ptr(), kv_pool.shape) != pool:
            self._library.settle()
            self._recorded_for = (0, ())  # in case memory is too short
            capacity = max(capacity, 1 << (num_tokens - 1).bit_length())
            self._meeting.begin(capacity, self.config.hidden_size)
            program = CpuProgram(self._library)
            self._head.write(program, self._writer.write(program, kv_pool))
            self._features = self._writer.features
            program.record(capacity)
            self._program = program
            self._recorded_for = (capacity, (kv_pool.data_ptr(), kv_pool.shape))


class RotaryTable:
    """Tables of cosines and sines for the kernels, extended as longer sequences come.

    Args:
        rotaries: of each kind of rotary positions that the model has.
    """

    def __init__(self, rotaries: Sequence[RotaryEmbedding]) -> None:
        self._rotaries = rotaries
        self._cosines = self._sines = torch.empty(len(rotaries), 0, rotaries[0].head_dim // 2)
        self.needs_prompt_lens = any(each.needs_prompt_lens for each in rotaries)

    def rows(self, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Two tables float32 [ropes, n, head_dim / 2], and each token's row in them, int64."""
        if self.needs_prompt_lens:  # angles depend on the sequence too, so each token has a row
            cosines, sines = self._angles(context.positions, context.prompt_lens)
            return cosines, sines, torch.arange(len(context.positions))
        if context.layout.max_seq_len > self._cosines.shape[1]:
            positions = torch.arange(1 << (context.layout.max_seq_len - 1).bit_length())
            self._cosines, self._sines = self._angles(positions, None)
        return self._cosines, self._sines, context.positions

    def _angles(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        tables = [each(positions, prompt_lens, torch.float32) for each in self._rotaries]
        cosines, sines = zip(*tables, strict=True)
        return torch.stack(cosines).squeeze(2), torch.stack(sines).squeeze(2)


class CpuHead:
    """The end of a step: logits of the sampled rows, and a token drawn from each.

    Args:
        meeting: with the ranks that have other tokens' logits.

    Attributes:
        hidden: all rows of a step, once the head is written into a program.
    """

    hidden: Buffer

    def __init__(self, library: CpuLibrary, writer: HeadWriter, meeting: CpuMeeting) -> None:
        self._library, self._writer, self._gather = library, writer, meeting.gather
        self._logits = torch.empty(0, writer.vocab_size, dtype=library.dtype)
        self._raw = self._logits  # products that are still to be scaled or capped
        self._uniforms = torch.empty(0)
        self._given: tuple[Tensor | None, ...] = ()

    def write(self, program: CpuProgram, hidden: Buffer) -> None:
        """Add the records after all rows of a step are in `hidden`."""
        step = program.step
        gathered = program.buffer("gathered", hidden.size)
        self.hidden = hidden
        self._step, self._num_rows = step, addressof(step) + type(step).num_sampled.offset
        program.add("gather_rows", y=gathered, x=hidden, size=hidden.size)
        self._written = self._writer.write(
            program, None, gathered, are_sampled=True, num_rows=self._num_rows
        )
        self._draw = program.add("draw_uniforms", num_rows=_NO_ROWS)
        self._sample = program.add(
            "sample_tokens", num_rows=_NO_ROWS, vocab_size=self._writer.vocab_size
        )

    def _point(self, written: WrittenLogits, logits: Tensor) -> None:
        """Let the records of `HeadWriter` end in these rows."""
        products, change = logits, written.change
        if change is not None:
            if len(logits) > len(self._raw):
                self._raw = torch.empty_like(logits)
            products = self._raw[: len(logits)]
            change.x, change.y = products.data_ptr(), logits.data_ptr()
        written.product.y = products.data_ptr()
        if self._gather is not None:
            self._gather.point(written.parts, products)

    def skip(self) -> None:
        """Make the operations do nothing."""
        self._step.num_sampled = 0
        self._draw.num_rows = self._sample.num_rows = addressof(_NO_ROWS)

    def bind(
        self,
        num_tokens: int,
        sampled_tokens: Tensor | None,
        parameters: Tensor | None,
        draws: Tensor | None,
        masks: TokenMasks | None,
    ) -> StepOutput:
        """Point the operations at their inputs; the tensors that they will write.

        Args:
            sampled_tokens, parameters, draws, masks: as in `LanguageModel.step`.
        """
        step = self._step
        num_rows = num_tokens if sampled_tokens is None else len(sampled_tokens)
        logits = self._room(num_rows)
        step.num_sampled = num_rows
        step.sampled_tokens = None if sampled_tokens is None else sampled_tokens.data_ptr()
        self._point(self._written, logits)
        # Keeps the memory alive.
        self._given = (sampled_tokens, parameters, draws, *(masks or ()))
        return StepOutput(
            hidden=self.hidden.rows[:num_tokens],
            logits=logits,
            drawn=self._bind_draw(logits, parameters, draws, masks),
        )

    def logits(self, hidden: Tensor, *, is_shared: bool) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        logits, program = self._room(len(hidden)), CpuProgram(self._library)
        x = program.buffer("hidden", hidden.shape[1])
        written = self._writer.write(
            program, None, x, are_sampled=False, num_rows=addressof(program.step)
        )
        program.record(len(hidden))
        x.rows.copy_(hidden)
        program.step.num_tokens = len(hidden)
        self._point(written, logits)
        program.run(is_shared=is_shared)
        self._library.settle()  # the rows may be freed
        return logits

    def _bind_draw(
        self,
        logits: Tensor,
        parameters: Tensor | None,
        draws: Tensor | None,
        masks: TokenMasks | None,
    ) -> DrawnTokens | None:
        draw, sample = self._draw, self._sample
        draw.num_rows = sample.num_rows = addressof(_NO_ROWS)
        if parameters is None:
            return None
        self._uniforms = uniforms = torch.empty(len(logits), dtype=torch.float64)
        drawn = DrawnTokens(len(logits))
        if draws is not None:
            draw.num_rows, draw.uniforms = self._num_rows, uniforms.data_ptr()
            draw.seeds, draw.indices, draw.positions = (each.data_ptr() for each in draws)
        sample.token_ids, sample.is_valid = drawn.token_ids.data_ptr(), drawn.is_valid.data_ptr()
        sample.num_rows = self._num_rows
        sample.logits, sample.uniforms = logits.data_ptr(), uniforms.data_ptr()
        columns = (each.data_ptr() for each in parameters)
        sample.temperature, sample.top_k, sample.top_p, sample.min_p = columns
        sample.masks = None if masks is None else masks.bits.data_ptr()
        sample.mask_indices = None if masks is None else masks.indices.data_ptr()
        return drawn

    def _room(self, num_rows: int) -> Tensor:
        """Rows for logits; the memory is kept, since fresh pages cost more than small products."""
        if num_rows > len(self._logits):
            self._logits = self._logits.new_empty(num_rows, self._writer.vocab_size)
        return self._logits[:num_rows]


class NoHead:
    """Stands in for `CpuHead` in a stage that is not the last: what it gives is sent on."""

    hidden: Buffer

    def __init__(self, dtype: torch.dtype) -> None:
        self._logits = torch.empty(0, 0, dtype=dtype)

    def write(self, program: CpuProgram, hidden: Buffer) -> None:  # noqa: ARG002
        self.hidden = hidden

    def skip(self) -> None:
        """There is nothing to skip."""

    def bind(self, num_tokens: int, *_: object) -> StepOutput:
        return StepOutput(hidden=self.hidden.rows[:num_tokens], logits=self._logits)

    def logits(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("the last stage has the head")


_NO_ROWS = ctypes.c_int64(0)
