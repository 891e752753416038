"""The decoder as a program of C operations: the fast path on a CPU.

It computes what `models.decoder.Decoder` specifies, with weights packed for the kernels, and draws
the next tokens (`CpuHead`). Each part of the decoder writes its operations into the program, which
is recorded once for a KV pool; a step fills in one structure and runs the program without Python
between the operations, and a step like the last one fills in nothing. The order of a sum depends
only on its own row, so neither batch nor chunking nor a warm cache changes a bit of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Embedding, Linear
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.models.cpu_adapters import CpuAdapters, as_cpu
from penstock.engine.models.decoder import Decoder, DecoderLayer, GatedMLP, SelfAttention
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.packed_linear import CpuLinear, CpuTable, pack_linear, pack_table
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary
from penstock.kernels.cpu.program import Buffer, Program
from penstock.kernels.token_masks import TokenMasks

# Rates of one thread, for deciding whether to wake the others. With 128 rows, T of load/peers
# (0.1 million weights in layers) is slower on two threads, S (27 million) is faster.
_READ_BYTES_PER_S, _PRODUCTS_PER_S = 20e9, 100e9
_MIN_SHARED_S = 0.3e-3


def can_run(config: DecoderConfig, block_size: int) -> bool:
    """Whether the kernels support these shapes: they process values, and positions, in pairs."""
    sizes = (config.hidden_size, config.intermediate_size, block_size)
    is_even = all(size % 2 == 0 for size in sizes)
    if config.attention_soft_cap is not None or config.has_sinks:
        return False
    return is_even and config.head_dim % LANES == 0 and config.head_dim <= MAX_HEAD_DIM


class CpuDecoder:
    """A decoder whose weights the kernels own.

    Args:
        decoder: loses its weights: each matrix is packed here and dropped there.
    """

    can_be_captured = False

    def __init__(self, decoder: Decoder, library: CpuLibrary) -> None:
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.kv_spec = decoder.kv_spec
        self._library = library
        self._feature_layers = decoder.feature_layers
        self._features: tuple[Buffer, ...] = ()
        self._rotary = RotaryTable(decoder.rotary)
        self._layers = [
            PackedLayer(library, layer)  # type: ignore[arg-type]
            for layer in decoder.layers
        ]
        self._norm = decoder.norm
        head = decoder.embed_tokens if self.config.is_tied else decoder.lm_head
        self._head = CpuHead(
            library, pack_table(library, head), self.dtype, as_cpu(decoder.head_adapters)
        )
        self._table_adapters = as_cpu(decoder.embed_tokens.adapters)
        # A tied embedding is looked up in the packed head, so it is stored once.
        self._embedding = (
            self._head.matrix if self.config.is_tied else _pack_table(library, decoder.embed_tokens)
        )
        self._num_weights = sum(layer.num_weights for layer in self._layers)
        self._num_bytes = sum(layer.num_bytes for layer in self._layers)
        tables = {self._head.matrix, self._embedding}
        self.weight_bytes = self._num_bytes + sum(each.num_bytes for each in tables)
        self._block_tables = torch.zeros(0, 0, dtype=torch.int32)
        self._program = Program(library)
        self._recorded_for = (0, 0)
        # The last step's context, the tensors it points to, and its output.
        self._context: ForwardContext | None = None
        self._given: tuple[Tensor, ...] = ()
        self._output: StepOutput | None = None
        self._is_shared = False

    def __del__(self) -> None:
        self._library.settle()  # a late thread may still read weights, to no effect

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    @property
    def needs_prompt_lens(self) -> bool:
        return self._rotary.needs_prompt_lens

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        return self.forward(input_ids, context)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], valid until the
        next call"""
        self._context = None
        self._fill(input_ids, context, self._keep(context.layout.block_tables))
        self._head.skip()
        self._program.run(is_shared=self._is_worth_sharing(len(input_ids)))
        return self._head.hidden.rows[: len(input_ids)]

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None,
        parameters: Tensor | None,
        draws: Tensor | None,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        """A forward pass, logits and the next tokens; valid until the next call.

        If the context is the last step's, its tensors are the same (their values may differ), so
        the recorded pointers are reused.

        Args:
            input_ids: int64 [num_tokens]
            context: its block tables must stay in place as long as this decoder lives, since a
                descheduled thread may read them late.
            sampled_tokens: int64 [num_sampled], indices of the tokens to sample after; None: all.
            parameters, draws, masks: as in `sample_tokens` and `draw_uniforms`. Without
                parameters nothing is drawn; without draws every temperature is 0.
        """
        if context is not self._context or self._output is None or self.needs_prompt_lens:
            self._fill(input_ids, context, context.layout.block_tables)
            output = self._head.bind(len(input_ids), sampled_tokens, parameters, draws, masks)
            features = tuple(each.rows[: len(input_ids)] for each in self._features)
            self._output = replace(output, features=features)
            self._is_shared = self._is_worth_sharing(len(input_ids))
            self._context = context
        self._program.run(is_shared=self._is_shared)
        return self._output

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        return self._head.logits(hidden, is_shared=self._is_worth_sharing(len(hidden)))

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
        step.rotary_rows = rows.data_ptr()
        self._given = (input_ids, cosines, sines, rows)  # keeps the memory alive

    def _is_worth_sharing(self, num_tokens: int) -> bool:
        """Whether reading and multiplying the weights takes one thread long enough to wake the
        others."""
        read_s = self._num_bytes / _READ_BYTES_PER_S
        return max(read_s, self._num_weights * num_tokens / _PRODUCTS_PER_S) > _MIN_SHARED_S

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
        if num_tokens > capacity or kv_pool.data_ptr() != pool:
            self._library.settle()
            self._recorded_for = (0, 0)  # in case memory is too short
            capacity = max(capacity, 1 << (num_tokens - 1).bit_length())
            self._program = self._write(kv_pool)
            self._program.record(capacity)
            self._recorded_for = (capacity, kv_pool.data_ptr())

    def _write(self, kv_pool: Tensor) -> Program:
        """The program of a step, part by part as in `Decoder.forward`."""
        program, size = Program(self._library), self.config.hidden_size
        stream, normed = program.buffer("stream", size), program.buffer("normed", size)
        kept = {layer: program.buffer(f"input {layer}", size) for layer in self._feature_layers}
        self._features = tuple(kept.values())
        self._embedding.write_lookup(program, stream)
        if self._table_adapters is not None:
            self._table_adapters.write_lookup(program, stream)
        x = stream
        for number, (layer, cache) in enumerate(zip(self._layers, kv_pool, strict=True)):
            y = kept.get(number + 1, stream)
            layer.write(program, y, x, cache)
            x = y
        _write_norm(program, normed, x, self._norm)
        self._head.write(program, normed)
        return program


class PackedLayer:
    """The weights of one layer, and its part of the program."""

    def __init__(self, library: CpuLibrary, layer: DecoderLayer) -> None:
        def pack(linear: Linear) -> CpuLinear:
            return pack_linear(library, linear, linear.bias)

        self.input_norm = layer.input_layernorm
        self.post_attention_norm = layer.post_attention_layernorm
        self.attention = PackedAttention(layer.self_attn, pack)
        self.mlp = PackedMLP(layer.mlp, pack)

    @property
    def num_weights(self) -> int:
        """Number of values in its matrices."""
        return sum(each.in_features * each.out_features for each in self._linears)

    @property
    def num_bytes(self) -> int:
        """Size of its matrices."""
        return sum(each.num_bytes for each in self._linears)

    @property
    def _linears(self) -> tuple[CpuLinear, ...]:
        return *self.attention.linears, *self.mlp.linears

    def write(self, program: Program, y: Buffer, x: Buffer, cache: Tensor) -> None:
        """y = the residual stream x with this layer added to it; y may be x. Another buffer holds
        the stream in between, since no operation writes to what it reads.

        Args:
            cache: [2, num_blocks, block_size, num_kv_heads, head_size], as in `LayerKV`
        """
        attended = program.buffer("attended", x.size)
        normed = program.buffer("normed", x.size)
        _write_norm(program, normed, x, self.input_norm)
        self.attention.write(program, attended, normed, cache, residual=x)
        _write_norm(program, normed, attended, self.post_attention_norm)
        self.mlp.write(program, y, normed, residual=attended)


class PackedAttention:
    """The matrices of `SelfAttention`, and its part of the program."""

    def __init__(self, attention: SelfAttention, pack: Callable[[Linear], CpuLinear]) -> None:
        self._module = attention
        self._qkv_proj, self._o_proj = pack(attention.qkv_proj), pack(attention.o_proj)
        self.linears = (self._qkv_proj, self._o_proj)

    def write(
        self, program: Program, y: Buffer, x: Buffer, cache: Tensor, *, residual: Buffer
    ) -> None:
        """y = attention(x) + residual"""
        module = self._module
        qkv = program.buffer("qkv", self._qkv_proj.out_features)
        query = program.buffer("query", self._o_proj.in_features)
        mixed = program.buffer("mixed", self._o_proj.in_features)
        heads: dict[str, Any] = {
            "query": query, "key_cache": cache[0], "value_cache": cache[1],
            "block_size": cache.shape[2], "num_heads": module.num_heads,
            "num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim,
            "is_int8": cache.dtype == torch.int8,
            "key_scales": module.attention.key_scale,
            "value_scales": module.attention.value_scale,
        }  # fmt: skip
        norms: dict[str, Any] = {}
        if module.has_qk_norm:
            weights = {"query_norm": module.q_norm.weight, "key_norm": module.k_norm.weight}
            norms = {**weights, "eps": module.q_norm.eps}
        window, scale = module.attention.window or 0, module.attention.scale
        self._qkv_proj.write(program, qkv, x)
        program.add("rope_store", qkv=qkv, **norms, **heads)
        program.add("attention", out=mixed, window=window, scale=scale, **heads)
        self._o_proj.write(program, y, mixed, residual=residual)


class PackedMLP:
    """The matrices of `GatedMLP`, and its part of the program."""

    def __init__(self, mlp: GatedMLP, pack: Callable[[Linear], CpuLinear]) -> None:
        self._gate_up_proj, self._down_proj = pack(mlp.gate_up_proj), pack(mlp.down_proj)
        self.linears = (self._gate_up_proj, self._down_proj)

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer) -> None:
        """y = MLP(x) + residual"""
        gate_up = program.buffer("gate_up", self._gate_up_proj.out_features)
        gated = program.buffer("gated", self._down_proj.in_features)
        self._gate_up_proj.write(program, gate_up, x)
        program.add("silu_mul", y=gated, x=gate_up, size=gated.size)
        self._down_proj.write(program, y, gated, residual=residual)


def _write_norm(program: Program, y: Buffer, x: Buffer, norm: RMSNorm) -> None:
    program.add("rms_norm", y=y, x=x, weight=norm.weight, size=x.size, eps=norm.eps)


class _PlainTable:
    """An embedding that is no output head, as it is."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def write_lookup(self, program: Program, y: Buffer) -> None:
        program.add("embed", y=y, weight=self._table, size=y.size)


def _pack_table(library: CpuLibrary, embedding: Embedding) -> _PlainTable | CpuTable:
    if embedding.quantized:
        return pack_table(library, embedding)
    return _PlainTable(embedding.weight)


class RotaryTable:
    """Tables of cosines and sines for the kernels, extended as longer sequences come."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        self._cosines = self._sines = torch.empty(0, rotary.head_dim // 2)
        self.needs_prompt_lens = rotary.needs_prompt_lens

    def rows(self, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Two tables float32 [n, head_dim / 2], and each token's row in them, int64."""
        if self.needs_prompt_lens:  # angles depend on the sequence too, so each token has a row
            cosines, sines = self._rotary(context.positions, context.prompt_lens, torch.float32)
            return cosines, sines, torch.arange(len(context.positions))
        if context.layout.max_seq_len > len(self._cosines):
            positions = torch.arange(1 << (context.layout.max_seq_len - 1).bit_length())
            self._cosines, self._sines = self._rotary(positions, None, torch.float32)
        return self._cosines, self._sines, context.positions


class DrawnTokens:
    """The next token of each row, in host memory.

    Attributes:
        token_ids, is_valid: int64 and bool, [num_rows] each, as in `sample_tokens`.
    """

    __slots__ = ("_token_ids", "_validity", "is_valid", "token_ids")

    def __init__(self, num_rows: int) -> None:
        self.token_ids = torch.empty(num_rows, dtype=torch.int64)
        self.is_valid = torch.empty(num_rows, dtype=torch.bool)
        # NumPy views for reading: in a small model's step, torch's calls would be noticeable.
        self._token_ids, self._validity = self.token_ids.numpy(), self.is_valid.numpy()

    def read(self) -> tuple[list[int], list[bool]]:
        return self._token_ids.tolist(), self._validity.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The output of one step.

    Attributes:
        hidden: [num_tokens, hidden_size]
        logits: [num_sampled, vocab_size], of the sampled rows.
        drawn: None, or the tokens drawn from the unmodified logits.
        features: the inputs of the decoder's `feature_layers`, [num_tokens, hidden_size] each.
    """

    hidden: Tensor
    logits: Tensor
    drawn: DrawnTokens | None = None
    features: tuple[Tensor, ...] = ()


class CpuHead:
    """The end of a step: logits of the sampled rows, and a token drawn from each.

    Args:
        matrix: [vocab_size, hidden_size]
        dtype: of hidden states and logits.
        adapters: of the sampled rows.

    Attributes:
        hidden: all rows of a step, once the head is written into a program.
    """

    hidden: Buffer

    def __init__(
        self,
        library: CpuLibrary,
        matrix: CpuTable,
        dtype: torch.dtype,
        adapters: CpuAdapters | None = None,
    ) -> None:
        self.matrix = matrix
        self._adapters = adapters
        self._library = library
        self._logits = torch.empty(0, matrix.out_features, dtype=dtype)
        self._uniforms = torch.empty(0)
        self._given: tuple[Tensor | None, ...] = ()

    def write(self, program: Program, hidden: Buffer) -> None:
        """Add the operations after all rows of a step are in `hidden`."""
        step = program.step
        gathered = program.buffer("gathered", hidden.size)
        self.hidden = hidden
        self._step, self._num_rows = step, addressof(step) + type(step).num_sampled.offset
        program.add("gather_rows", y=gathered, x=hidden, size=hidden.size)
        self._product = self.matrix.write(program, None, gathered, num_rows=self._num_rows)
        if self._adapters is not None:
            self._adapters.write(program, None, gathered, self._product)
        self._draw = program.add("draw_uniforms", num_rows=_NO_ROWS)
        self._sample = program.add(
            "sample_tokens", num_rows=_NO_ROWS, vocab_size=self.matrix.out_features
        )

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
            sampled_tokens, parameters, draws, masks: as in `CpuDecoder.step`.
        """
        step = self._step
        num_rows = num_tokens if sampled_tokens is None else len(sampled_tokens)
        logits = self._room(num_rows)
        step.num_sampled = num_rows
        step.sampled_tokens = None if sampled_tokens is None else sampled_tokens.data_ptr()
        self._product.y = logits.data_ptr()
        # Keeps the memory alive.
        self._given = (sampled_tokens, parameters, draws, *(masks or ()))
        return StepOutput(
            hidden=self.hidden.rows[:num_tokens],
            logits=logits,
            drawn=self._bind_draw(logits, parameters, draws, masks),
        )

    def logits(self, hidden: Tensor, *, is_shared: bool) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        logits, program = self._room(len(hidden)), Program(self._library)
        x = program.buffer("hidden", hidden.shape[1])
        product = self.matrix.write(program, None, x)
        program.record(len(hidden))
        x.rows.copy_(hidden)
        program.step.num_tokens, product.y = len(hidden), logits.data_ptr()
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
            self._logits = self._logits.new_empty(num_rows, self.matrix.out_features)
        return self._logits[:num_rows]


_NO_ROWS = ctypes.c_int64(0)
