"""The decoder as a list of C calls: the fast path on a CPU.

It computes what `models.decoder.Decoder` specifies, with weights packed for the kernels, and draws
the next tokens (`CpuHead`). The list is recorded once; a step fills in one structure and runs the
list without Python between the operations, and a step like the last one fills in nothing. The order
of a sum depends only on its own row, so neither batch nor chunking nor a warm cache changes a bit
of a result.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.packed_linear import (
    Calls,
    CpuLinear,
    PackedLinear,
    address,
    pack_linear,
)
from penstock.kernels.cpu.int8 import Int8Rows
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary
from penstock.kernels.cpu.structures import (
    AttentionArgs,
    DrawUniformsArgs,
    EmbedArgs,
    GatherRowsArgs,
    RmsNormArgs,
    RopeStoreArgs,
    SampleTokensArgs,
    SiluMulArgs,
    Step,
)

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


class Buffers:
    """Activations, [max_tokens, …] each, reused by all layers."""

    def __init__(self, config: DecoderConfig, max_tokens: int, dtype: torch.dtype) -> None:
        def rows(size: int) -> Tensor:
            return torch.empty(max_tokens, size, dtype=dtype)

        query_size = config.num_heads * config.head_dim
        # The residual stream, before and after attention: no operation writes to what it reads.
        self.stream, self.attended = rows(config.hidden_size), rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.qkv = rows(query_size + 2 * config.num_kv_heads * config.head_dim)
        self.query, self.mixed = rows(query_size), rows(query_size)
        self.gate_up = rows(2 * config.intermediate_size)
        self.gated = rows(config.intermediate_size)
        largest = max(config.hidden_size, query_size, config.intermediate_size)
        self.int8 = Int8Rows(max_tokens, largest)  # inputs of int8 products


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
        self._rotary = RotaryTable(decoder.rotary)
        self._layers = [
            PackedLayer(library, layer)  # type: ignore[arg-type]
            for layer in decoder.layers
        ]
        self._norm = decoder.norm.weight
        head = decoder.embed_tokens if self.config.is_tied else decoder.lm_head
        self._step = Step()
        self._head = CpuHead(library, _move_out(head.weight), self._step)
        # A tied embedding is looked up in the packed head, so it is stored once.
        self._embedding = None if self.config.is_tied else decoder.embed_tokens.weight
        self._num_weights = sum(layer.num_weights for layer in self._layers)
        self._num_bytes = sum(layer.num_bytes for layer in self._layers)
        self._buffers = Buffers(self.config, 0, self.dtype)
        self._block_tables = torch.zeros(0, 0, dtype=torch.int32)
        self._recorded = library.record([])
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
        self._recorded.run(is_shared=self._is_worth_sharing(len(input_ids)))
        return self._buffers.normed[: len(input_ids)]

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None,
        parameters: Tensor | None,
        draws: Tensor | None,
    ) -> StepOutput:
        """A forward pass, logits and the next tokens; valid until the next call.

        If the context is the last step's, its tensors are the same (their values may differ), so
        the recorded pointers are reused.

        Args:
            input_ids: int64 [num_tokens]
            context: its block tables must stay in place as long as this decoder lives, since a
                descheduled thread may read them late.
            sampled_tokens: int64 [num_sampled], indices of the tokens to sample after; None: all.
            parameters, draws: as in `sample_tokens` and `draw_uniforms`. Without parameters
                nothing is drawn; without draws every temperature is 0.
        """
        if context is not self._context or self._output is None or self.needs_prompt_lens:
            self._fill(input_ids, context, context.layout.block_tables)
            self._output = self._head.bind(len(input_ids), sampled_tokens, parameters, draws)
            self._is_shared = self._is_worth_sharing(len(input_ids))
            self._context = context
        self._recorded.run(is_shared=self._is_shared)
        return self._output

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        return self._head.logits(hidden, is_shared=self._is_worth_sharing(len(hidden)))

    def _fill(self, input_ids: Tensor, context: ForwardContext, block_tables: Tensor) -> None:
        """Point the calls of a forward pass at its inputs."""
        step, layout = self._step, context.layout
        self._record(len(input_ids), context.kv_pool)
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
        """Record the calls for this pool with room for `num_tokens`, unless already recorded."""
        capacity, pool = self._recorded_for
        if num_tokens > capacity or kv_pool.data_ptr() != pool:
            self._library.settle()
            capacity = max(capacity, 1 << (num_tokens - 1).bit_length())
            self._buffers = Buffers(self.config, capacity, self.dtype)
            self._recorded = self._library.record(self._calls(kv_pool))
            self._recorded_for = (capacity, kv_pool.data_ptr())

    def _calls(self, kv_pool: Tensor) -> list[tuple[str, Structure]]:
        buffers, step = self._buffers, self._step
        embed = EmbedArgs(
            y=buffers.stream.data_ptr(),
            weight=self._head.matrix.weight.data_ptr()
            if self._embedding is None
            else self._embedding.data_ptr(),
            step=addressof(step),
            size=self.config.hidden_size,
            num_rows=self.config.vocab_size,
            is_packed=self._embedding is None,
        )
        calls: list[tuple[str, Structure]] = [("embed", embed)]
        for layer, cache in zip(self._layers, kv_pool, strict=True):
            calls.extend(layer.calls(self.config, buffers, step, cache))
        final = _norm_args(buffers.normed, buffers.stream, self._norm, step, self.config)
        return [*calls, ("rms_norm", final), *self._head.calls(buffers.normed)]


class PackedLayer:
    """The weights of one layer, and its calls."""

    def __init__(self, library: CpuLibrary, layer: DecoderLayer) -> None:
        def pack(linear: Linear) -> CpuLinear:
            return pack_linear(library, linear.take(), linear.bias)

        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm.weight
        self.post_attention_norm = layer.post_attention_layernorm.weight
        has_qk_norm = attention.has_qk_norm
        self.query_norm = attention.q_norm.weight if has_qk_norm else None
        self.key_norm = attention.k_norm.weight if has_qk_norm else None
        self.window = attention.attention.window
        self.qkv_proj, self.o_proj = pack(attention.qkv_proj), pack(attention.o_proj)
        self.gate_up_proj, self.down_proj = pack(mlp.gate_up_proj), pack(mlp.down_proj)

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
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj

    def calls(
        self, config: DecoderConfig, buffers: Buffers, step: Step, cache: Tensor
    ) -> list[tuple[str, Structure]]:
        """cache [2, num_blocks, block_size, num_kv_heads, head_dim]"""
        rows = addressof(step)  # num_tokens is its first field
        stream, attended, normed = buffers.stream, buffers.attended, buffers.normed
        room = buffers.int8
        heads = {
            "query": buffers.query.data_ptr(),
            "key_cache": cache[0].data_ptr(),
            "value_cache": cache[1].data_ptr(),
            "step": addressof(step),
            "block_size": cache.shape[2],
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }
        rope_store = RopeStoreArgs(
            **heads,
            qkv=buffers.qkv.data_ptr(),
            query_norm=address(self.query_norm),
            key_norm=address(self.key_norm),
            eps=config.rms_norm_eps,
        )
        attention = AttentionArgs(
            **heads,
            out=buffers.mixed.data_ptr(),
            window=self.window or 0,
            scale=config.head_dim**-0.5,
        )
        silu_mul = SiluMulArgs(
            y=buffers.gated.data_ptr(),
            x=buffers.gate_up.data_ptr(),
            num_rows=rows,
            size=config.intermediate_size,
        )
        return [
            ("rms_norm", _norm_args(normed, stream, self.input_norm, step, config)),
            *self.qkv_proj.calls(buffers.qkv, normed, rows, room),
            ("rope_store", rope_store),
            ("attention", attention),
            *self.o_proj.calls(attended, buffers.mixed, rows, room, residual=stream),
            ("rms_norm", _norm_args(normed, attended, self.post_attention_norm, step, config)),
            *self.gate_up_proj.calls(buffers.gate_up, normed, rows, room),
            ("silu_mul", silu_mul),
            *self.down_proj.calls(stream, buffers.gated, rows, room, residual=attended),
        ]


def _move_out(weight: Tensor) -> Tensor:
    """Take the values out of a parameter, which is empty afterwards."""
    values = weight.data
    weight.data = torch.empty(0, dtype=weight.dtype)
    return values


def _norm_args(
    y: Tensor, x: Tensor, weight: Tensor, step: Step, config: DecoderConfig
) -> RmsNormArgs:
    return RmsNormArgs(
        y=y.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        num_rows=addressof(step),
        size=config.hidden_size,
        eps=config.rms_norm_eps,
    )


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
    """

    hidden: Tensor
    logits: Tensor
    drawn: DrawnTokens | None = None


class CpuHead:
    """The end of a step: logits of the sampled rows, and a token drawn from each.

    Args:
        weight: [vocab_size, hidden_size]
        step: holds how many rows are sampled, and which.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, step: Step) -> None:
        self.matrix = PackedLinear(library, weight)
        self._library = library
        self._step = step
        self._logits = torch.empty(0, self.matrix.out_features, dtype=weight.dtype)
        self._hidden = self._gathered = self._logits
        self._num_rows = addressof(step) + Step.num_sampled.offset
        self._product = self.matrix.args(self._logits, self._hidden, self._num_rows)
        self._draw = DrawUniformsArgs()
        self._sample = SampleTokensArgs(vocab_size=self.matrix.out_features)
        self._uniforms = torch.empty(0)
        self._given: tuple[Tensor | None, ...] = ()

    def calls(self, hidden: Tensor) -> Calls:
        """The calls after all rows of a step are in `hidden` [max_tokens, hidden_size]."""
        self._hidden, self._gathered = hidden, torch.empty_like(hidden)
        gather = GatherRowsArgs(
            y=self._gathered.data_ptr(),
            x=hidden.data_ptr(),
            step=addressof(self._step),
            size=hidden.shape[1],
        )
        return [
            ("gather_rows", gather),
            ("linear", self._product),
            ("draw_uniforms", self._draw),
            ("sample_tokens", self._sample),
        ]

    def skip(self) -> None:
        """Make the calls do nothing."""
        self._step.num_sampled = self._step.num_gathered = 0
        self._draw.num_rows = self._sample.num_rows = addressof(_NO_ROWS)

    def bind(
        self,
        num_tokens: int,
        sampled_tokens: Tensor | None,
        parameters: Tensor | None,
        draws: Tensor | None,
    ) -> StepOutput:
        """Point the calls at their inputs; the tensors that they will write.

        Args:
            sampled_tokens, parameters, draws: as in `CpuDecoder.step`.
        """
        step = self._step
        num_rows = num_tokens if sampled_tokens is None else len(sampled_tokens)
        logits = self._room(num_rows)
        step.num_sampled, step.num_gathered = num_rows, 0
        if sampled_tokens is not None:
            step.num_gathered = num_rows
            step.sampled_tokens = sampled_tokens.data_ptr()
        rows = self._hidden if sampled_tokens is None else self._gathered
        self._product.x, self._product.y = rows.data_ptr(), logits.data_ptr()
        self._given = (sampled_tokens, parameters, draws)  # keeps the memory alive
        return StepOutput(
            hidden=self._hidden[:num_tokens],
            logits=logits,
            drawn=self._bind_draw(logits, parameters, draws),
        )

    def logits(self, hidden: Tensor, *, is_shared: bool) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        hidden, logits = hidden.contiguous(), self._room(len(hidden))
        num_rows = ctypes.c_int64(len(hidden))
        args = self.matrix.args(logits, hidden, addressof(num_rows))
        self._library.run("linear", args, is_shared=is_shared)
        return logits

    def _bind_draw(
        self, logits: Tensor, parameters: Tensor | None, draws: Tensor | None
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
        return drawn

    def _room(self, num_rows: int) -> Tensor:
        """Rows for logits; the memory is kept, since fresh pages cost more than small products."""
        if num_rows > len(self._logits):
            self._logits = self._logits.new_empty(num_rows, self.matrix.out_features)
        return self._logits[:num_rows]


_NO_ROWS = ctypes.c_int64(0)
