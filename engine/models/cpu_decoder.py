"""The decoder as a list of C calls: the fast path of a CPU.

It computes what `models.decoder.Decoder` specifies, with weights packed for the kernels. The list
is recorded once; a step fills in one structure and runs it, so no Python stands between the
operations. Every sum runs in an order that depends on its own row alone, so neither batch nor
chunking nor a warm cache changes a bit of a result. Not known here: checkpoints, sampling.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, addressof

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary, RecordedCalls
from penstock.kernels.cpu.structures import (
    AttentionArgs,
    EmbedArgs,
    LinearArgs,
    RmsNormArgs,
    RopeStoreArgs,
    SiluMulArgs,
    Step,
)

# What a thread reads and multiplies in a second, for the decision whether to wake the others. T of
# load/peers (0.1 million weights in layers) is slower on two threads with 128 rows, S (27) faster.
_READ_BYTES_PER_S, _PRODUCTS_PER_S = 20e9, 100e9
_MIN_SHARED_S = 0.3e-3


def can_run(config: DecoderConfig) -> bool:
    """Whether the kernels take its shapes."""
    is_even = config.hidden_size % 2 == 0 and config.intermediate_size % 2 == 0
    return is_even and config.head_dim % LANES == 0 and config.head_dim <= MAX_HEAD_DIM


class PackedLinear:
    """A matrix as the kernels read it."""

    def __init__(self, library: CpuLibrary, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = library.pack(weight)
        self.bias = bias

    def args(
        self, y: Tensor, x: Tensor, num_rows: int, *, residual: Tensor | None = None
    ) -> LinearArgs:
        """num_rows: the address of the number of rows."""
        return LinearArgs(
            y=y.data_ptr(),
            x=x.data_ptr(),
            weight=self.weight.data_ptr(),
            bias=_address(self.bias),
            residual=_address(residual),
            num_rows=num_rows,
            in_features=self.in_features,
            out_features=self.out_features,
        )


class Buffers:
    """What one layer hands to the next; [max_tokens, …], reused by all layers."""

    def __init__(self, config: DecoderConfig, max_tokens: int, dtype: torch.dtype) -> None:
        def rows(size: int) -> Tensor:
            return torch.empty(max_tokens, size, dtype=dtype)

        query_size = config.num_heads * config.head_dim
        self.stream = rows(config.hidden_size)  # the residual stream
        self.normed = rows(config.hidden_size)
        self.qkv = rows(query_size + 2 * config.num_kv_heads * config.head_dim)
        self.query, self.mixed = rows(query_size), rows(query_size)
        self.gate_up = rows(2 * config.intermediate_size)
        self.gated = rows(config.intermediate_size)


class CpuDecoder:
    """A decoder whose weights the kernels own.

    Args:
        decoder: gives its weights away: each matrix is packed, then dropped there.
    """

    def __init__(self, decoder: Decoder, library: CpuLibrary) -> None:
        self.config = decoder.config
        self.dtype = decoder.dtype
        self._library = library
        self._rotary = RotaryTable(decoder.rotary)
        self._layers = [PackedLayer(library, layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self._norm = decoder.norm.weight
        head = decoder.embed_tokens if self.config.is_tied else decoder.lm_head
        self._head = _take(library, head.weight)
        # A tied embedding is looked up in the packed head: it is held once.
        self._embedding = None if self.config.is_tied else decoder.embed_tokens.weight
        self._num_weights = sum(layer.num_weights for layer in self._layers)
        self._step = Step()
        self._buffers = Buffers(self.config, 0, self.dtype)
        self._recorded: RecordedCalls | None = None
        self._recorded_for = (0, 0)

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    @property
    def needs_prompt_lens(self) -> bool:
        return self._rotary.needs_prompt_lens

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        return self.forward(input_ids, context)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], good until the
        next call"""
        num_tokens, layout = len(input_ids), context.layout
        recorded = self._record(num_tokens, context.kv_pool)
        cosines, sines, rows = self._rotary.rows(context)
        step = self._step
        step.num_tokens, step.num_seqs = num_tokens, layout.num_seqs
        step.table_stride = layout.block_tables.stride(0)
        step.token_ids = input_ids.data_ptr()
        step.slot_mapping = layout.slot_mapping.data_ptr()
        step.query_start_loc = layout.query_start_loc.data_ptr()
        step.seq_lens = layout.seq_lens.data_ptr()
        step.block_tables = layout.block_tables.data_ptr()
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.rotary_rows = rows.data_ptr()
        recorded.run(is_shared=self._seconds_alone(num_tokens) > _MIN_SHARED_S)
        return self._buffers.normed[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), self._head.out_features, dtype=self.dtype)
        num_rows = ctypes.c_int64(len(hidden))
        self._library.run("linear", self._head.args(logits, hidden, addressof(num_rows)))
        return logits

    def _seconds_alone(self, num_tokens: int) -> float:
        """Roughly what a pass over so many tokens takes one thread: weights have to be read, and
        multiplied."""
        read_s = self._num_weights * self.dtype.itemsize / _READ_BYTES_PER_S
        return max(read_s, self._num_weights * num_tokens / _PRODUCTS_PER_S)

    def _record(self, num_tokens: int, kv_pool: Tensor) -> RecordedCalls:
        """The calls of a forward pass over this pool with room for so many tokens."""
        capacity, pool = self._recorded_for
        if self._recorded is None or num_tokens > capacity or kv_pool.data_ptr() != pool:
            capacity = max(capacity, 1 << (num_tokens - 1).bit_length())
            self._buffers = Buffers(self.config, capacity, self.dtype)
            self._recorded = self._library.record(self._calls(kv_pool))
            self._recorded_for = (capacity, kv_pool.data_ptr())
        return self._recorded

    def _calls(self, kv_pool: Tensor) -> list[tuple[str, Structure]]:
        buffers, step = self._buffers, self._step
        embed = EmbedArgs(
            y=buffers.stream.data_ptr(),
            weight=(self._head.weight if self._embedding is None else self._embedding).data_ptr(),
            step=addressof(step),
            size=self.config.hidden_size,
            num_rows=self.config.vocab_size,
            is_packed=self._embedding is None,
        )
        calls: list[tuple[str, Structure]] = [("embed", embed)]
        for layer, cache in zip(self._layers, kv_pool, strict=True):
            calls.extend(layer.calls(self.config, buffers, step, cache))
        final = _norm_args(buffers.normed, buffers.stream, self._norm, step, self.config)
        return [*calls, ("rms_norm", final)]


class PackedLayer:
    """The weights of one layer, and its share of the list."""

    def __init__(self, library: CpuLibrary, layer: DecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm.weight
        self.post_attention_norm = layer.post_attention_layernorm.weight
        has_qk_norm = attention.has_qk_norm
        self.query_norm = attention.q_norm.weight if has_qk_norm else None
        self.key_norm = attention.k_norm.weight if has_qk_norm else None
        self.window = attention.attention.window
        self.qkv_proj, self.o_proj = (
            _take_linear(library, linear) for linear in (attention.qkv_proj, attention.o_proj)
        )
        self.gate_up_proj, self.down_proj = (
            _take_linear(library, linear) for linear in (mlp.gate_up_proj, mlp.down_proj)
        )

    @property
    def num_weights(self) -> int:
        """Values of its matrices."""
        matrices = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return sum(each.in_features * each.out_features for each in matrices)

    def calls(
        self, config: DecoderConfig, buffers: Buffers, step: Step, cache: Tensor
    ) -> list[tuple[str, Structure]]:
        """cache [2, num_blocks, block_size, num_kv_heads, head_dim]"""
        rows = addressof(step)  # num_tokens is its first field
        stream, normed = buffers.stream, buffers.normed
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
            query_norm=_address(self.query_norm),
            key_norm=_address(self.key_norm),
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
            ("linear", self.qkv_proj.args(buffers.qkv, normed, rows)),
            ("rope_store", rope_store),
            ("attention", attention),
            ("linear", self.o_proj.args(stream, buffers.mixed, rows, residual=stream)),
            ("rms_norm", _norm_args(normed, stream, self.post_attention_norm, step, config)),
            ("linear", self.gate_up_proj.args(buffers.gate_up, normed, rows)),
            ("silu_mul", silu_mul),
            ("linear", self.down_proj.args(stream, buffers.gated, rows, residual=stream)),
        ]


class RotaryTable:
    """Cosines and sines of all positions so far, grown as longer sequences come."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        self._cosines = self._sines = torch.empty(0, rotary.head_dim // 2)

    @property
    def needs_prompt_lens(self) -> bool:
        return self._rotary.needs_prompt_lens

    def rows(self, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Two tables float32 [n, head_dim / 2], and each token's row in them, int64."""
        if self.needs_prompt_lens:  # a token's angles are its own
            cosines, sines = self._rotary(context.positions, context.prompt_lens, torch.float32)
            return cosines, sines, torch.arange(len(context.positions))
        if context.layout.max_seq_len > len(self._cosines):
            positions = torch.arange(1 << (context.layout.max_seq_len - 1).bit_length())
            self._cosines, self._sines = self._rotary(positions, None, torch.float32)
        return self._cosines, self._sines, context.positions


def _take(library: CpuLibrary, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a matrix and let go of the original."""
    packed = PackedLinear(library, weight.data, bias)
    weight.data = torch.empty(0, dtype=weight.dtype)
    return packed


def _take_linear(library: CpuLibrary, linear: Linear) -> PackedLinear:
    return _take(library, linear.weight, linear.bias)


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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
