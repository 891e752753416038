"""The decoder as a program of C operations: the fast path on a CPU.

It computes what `models.decoder.Decoder` specifies, with weights packed for the kernels, and draws
the next tokens (`CpuHead`). Each part of the decoder writes its operations into the program, which
is recorded once for a KV pool; a step fills in one structure and runs the program without Python
between the operations, and a step like the last one fills in nothing. The order of a sum depends
only on its own row, so neither batch nor chunking nor a warm cache changes a bit of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.experts import MixtureOfExperts
from penstock.engine.layers.linear import Embedding, Linear
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.lora.cpu_adapters import CpuAdapters, as_cpu
from penstock.engine.models.decoder import (
    Decoder,
    DecoderLayer,
    GatedMLP,
    Norm,
    PlainMLP,
    SelfAttention,
)
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.language_model import DrawnTokens, StepOutput
from penstock.engine.models.packed_experts import PackedMixture, memory_for_experts
from penstock.engine.models.packed_linear import (
    CpuLinear,
    CpuTable,
    RankGather,
    RankSums,
    StageLink,
    pack_linear,
    pack_table,
)
from penstock.engine.parallel.ranks import Ranks, SharedRanks
from penstock.kernels.activation import Activation
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary
from penstock.kernels.cpu.program import Buffer, Place, Program
from penstock.kernels.cpu.weight_memory import WeightMemory
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
        self._rotary = RotaryTable(list(decoder.rotaries))  # type: ignore[arg-type]
        ranks = decoder.ranks.layers
        self._sums = RankSums(library, ranks) if isinstance(ranks, SharedRanks) else None
        self._before, self._after = _stage_links(library, decoder.ranks)
        self._squares: RankSums | None = None
        is_over_heads = self.config.has_qk_norm and self.config.qk_norm == "row"
        if is_over_heads and isinstance(ranks, SharedRanks):
            self._squares = RankSums(library, ranks, torch.float32)
        expert_memory = memory_for_experts(library, decoder.expected_bytes)
        self._layers = [
            PackedLayer(library, layer, expert_memory, self._sums, self._squares)
            for layer in decoder.own_layers
        ]
        self._norm = decoder.norm
        tables: set[CpuTable | _PlainTable] = set()
        self._head: CpuHead | NoHead = NoHead(self.dtype)
        if self.config.has_head:
            gather = None
            if isinstance(ranks, SharedRanks):
                gather = RankGather(library, ranks, decoder.vocab_size)
            self._head = CpuHead(
                library,
                pack_table(library, decoder.head, decoder.head.bias),
                self.dtype,
                as_cpu(decoder.head_adapters),
                scale=self.config.logit_scale,
                soft_cap=self.config.logit_soft_cap or 0.0,
                gather=gather,
            )
            tables.add(self._head.matrix)
        self._embedding: CpuEmbedding | None = None
        if self.config.has_embedding:
            # A tied embedding is looked up in the packed head, so it is stored once.
            matrix: CpuTable | _PlainTable
            if self.config.is_tied and isinstance(self._head, CpuHead):
                matrix = self._head.matrix
            else:
                matrix = _pack_table(library, decoder.embed_tokens)
            self._embedding = CpuEmbedding(decoder, matrix, self._sums)
            tables.add(matrix)
        # What one token takes, which decides how many threads do.
        self._num_weights = sum(layer.num_active_weights for layer in self._layers)
        self._num_bytes = sum(layer.num_active_bytes for layer in self._layers)
        self.weight_bytes = sum(each.num_bytes for each in (*self._layers, *tables))
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
        self._run(is_shared=self._is_worth_sharing(len(input_ids)))
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
        self._run(is_shared=self._is_shared)
        return self._output

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        return self._head.logits(hidden, is_shared=self._is_worth_sharing(len(hidden)))

    def _run(self, *, is_shared: bool) -> None:
        if self._before is None:
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
            for shared in (self._sums, self._before, self._after):
                if shared is not None:
                    shared.begin(capacity, self.config.hidden_size)
            if self._squares is not None:
                self._squares.begin(capacity, 2)
            self._program = self._write(kv_pool)
            self._program.record(capacity)
            self._recorded_for = (capacity, kv_pool.data_ptr())

    def _write(self, kv_pool: Tensor) -> Program:
        """The program of a step, part by part as in `Decoder.forward`."""
        program, size = Program(self._library), self.config.hidden_size
        stream, normed = program.buffer("stream", size), program.buffer("normed", size)
        kept = {layer: program.buffer(f"input {layer}", size) for layer in self._feature_layers}
        self._features = tuple(kept.values())
        x = stream
        if self._embedding is not None:
            x = self._embedding.write(program, stream)
        elif self._before is not None:
            self._before.write_receive(program, stream)
        for number, (layer, cache) in enumerate(zip(self._layers, kv_pool, strict=True)):
            y = kept.get(number + 1, stream)
            layer.write(program, y, x, cache)
            x = y
        if self.config.has_head:
            _write_norm(program, normed, x, self._norm)
            x = normed
        elif self._after is not None:
            self._after.write_send(program, x)
        self._head.write(program, x)
        return program


def _stage_links(library: CpuLibrary, ranks: Ranks) -> tuple[StageLink | None, StageLink | None]:
    """From the stage before, and to the next one."""
    if not isinstance(ranks, SharedRanks):
        return None, None
    before, after = (
        None if link is None else StageLink(library, link) for link in (ranks.before, ranks.after)
    )
    return before, after


class CpuEmbedding:
    """What is before the layers, and its part of the program.

    Args:
        decoder: has the rest of `Decoder._embed`.
        sums: over the ranks that have parts of the table.
    """

    def __init__(
        self, decoder: Decoder, table: CpuTable | _PlainTable, sums: RankSums | None
    ) -> None:
        config, embedding = decoder.config, decoder.embed_tokens
        self._table, self._sums = table, sums
        self._own_ids = {"first_id": embedding.first_id, "num_ids": embedding.num_ids}
        self._adapters = as_cpu(embedding.adapters)
        self._scale = config.embedding_scale
        self._factor = torch.tensor(self._scale).to(decoder.dtype).item()
        self._positions = decoder.embed_positions if config.has_position_table else None
        self._norm = decoder.embed_norm if config.has_embedding_norm else None

    def write(self, program: Program, stream: Buffer) -> Buffer:
        """Add the operations of `Decoder._embed`; the buffer that then holds the embedding."""
        # Each operation writes to another buffer than it reads: they take turns.
        x, y = (
            stream,
            program.buffer("embedded", stream.size) if self._changes_rows else stream,
        )
        if self._sums is None:
            self._table.write_lookup(program, x)
        else:
            part = self._sums.part(x.size)
            self._table.write_lookup(program, part, **self._own_ids)
            self._sums.write(program, x, x.size)
        if self._adapters is not None:
            self._adapters.write_lookup(program, x)
        if self._scale != 1.0:
            program.add("scale_add", y=y, x=x, factor=self._factor, size=x.size)
            x, y = y, x
        if self._positions is not None:
            table = self._positions.weight
            program.add("add_positions", y=y, x=x, table=table, size=x.size)
            x, y = y, x
        if self._norm is not None:
            _write_norm(program, y, x, self._norm)
            x, y = y, x
        return x

    @property
    def _changes_rows(self) -> bool:
        has_more = self._positions is not None or self._norm is not None
        return self._scale != 1.0 or has_more


class PackedLayer:
    """The weights of one layer, and its part of the program.

    Attributes:
        num_bytes: of its matrices.
        num_active_weights, num_active_bytes: of those that one token needs.
    """

    def __init__(
        self,
        library: CpuLibrary,
        layer: DecoderLayer,
        expert_memory: WeightMemory,
        sums: RankSums | None,
        squares: RankSums | None,
    ) -> None:
        def pack(linear: Linear) -> CpuLinear:
            return pack_linear(library, linear, linear.bias, sums=sums)

        self.input_norm = layer.input_layernorm
        self.post_attention_norm = layer.post_attention_layernorm
        self.is_parallel = layer.is_parallel
        self.attention = PackedAttention(layer.self_attn, pack, rope=layer.rope, squares=squares)
        self.mlp: PackedMLP | PackedMixture
        if isinstance(layer.mlp, MixtureOfExperts):
            shared = layer.mlp.shared_expert
            packed = PackedMLP(shared, pack) if isinstance(shared, GatedMLP) else None
            self.mlp = PackedMixture(library, layer.mlp, packed, expert_memory, sums)
        else:
            self.mlp = PackedMLP(layer.mlp, pack)
        self._attention_end = _End(layer.attention_post_norm, layer.residual_scale)
        self._mlp_end = _End(layer.mlp_post_norm, layer.residual_scale)
        linears = self.attention.linears
        self.num_bytes = self.num_active_bytes = sum(each.num_bytes for each in linears)
        self.num_active_weights = sum(each.in_features * each.out_features for each in linears)
        self.num_bytes += self.mlp.num_bytes
        self.num_active_bytes += self.mlp.num_active_bytes
        self.num_active_weights += self.mlp.num_active_weights

    def write(self, program: Program, y: Buffer, x: Buffer, cache: Tensor) -> None:
        """y = the residual stream x with this layer added to it; y may be x. Another buffer holds
        the stream in between, since no operation writes to what it reads.

        Args:
            cache: [2, num_blocks, block_size, num_kv_heads, head_size], as in `LayerKV`
        """
        attended = program.buffer("attended", x.size)
        normed = _write_normed(program, "normed", x, self.input_norm)
        attend = partial(self.attention.write, program, x=normed, cache=cache)
        self._attention_end.write(program, attended, x, attend)
        if not self.is_parallel:
            normed = _write_normed(program, "normed", attended, self.post_attention_norm)
        elif self.post_attention_norm is not None:
            normed = _write_normed(program, "normed", x, self.post_attention_norm)
        self._mlp_end.write(program, y, attended, partial(self.mlp.write, program, x=normed))


class _End:
    """The end of attention and of the MLP: its output, normalised and scaled where the model does
    that, is added to the stream.

    Args:
        norm: None: none.
    """

    def __init__(self, norm: Norm | None, scale: float) -> None:
        self._norm, self._scale = norm, scale

    def write(
        self, program: Program, y: Buffer, residual: Buffer, write: Callable[..., None]
    ) -> None:
        """y = the output, and so on, + residual

        Args:
            write: adds the operations that give the output (y=…, residual=…).
        """
        if self._norm is None and self._scale == 1.0:
            write(y=y, residual=residual)
            return
        product = program.buffer("product", y.size)
        write(y=product, residual=None)
        added = _write_normed(program, "normed", product, self._norm)
        program.add("scale_add", y=y, x=added, residual=residual, factor=self._scale, size=y.size)


class PackedAttention:
    """The matrices of `SelfAttention`, and its part of the program.

    Args:
        squares: of queries and keys, which are normalised over the heads of all ranks.
    """

    def __init__(
        self,
        attention: SelfAttention,
        pack: Callable[[Linear], CpuLinear],
        *,
        rope: int,
        squares: RankSums | None,
    ) -> None:
        self._module, self._rope, self._squares = attention, rope, squares
        self._qkv_proj, self._o_proj = pack(attention.qkv_proj), pack(attention.o_proj)
        self.linears = (self._qkv_proj, self._o_proj)

    def write(
        self, program: Program, *, y: Buffer, x: Buffer, cache: Tensor, residual: Buffer | None
    ) -> None:
        """y = attention(x) (+ residual)"""
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
        if module.has_qk_norm and module.qk_norm == "head":
            weights = {"query_norm": module.q_norm.weight, "key_norm": module.k_norm.weight}
            norms = {**weights, "eps": module.q_norm.eps, "norm_offset": module.q_norm.offset}
        attention = module.attention
        options: dict[str, Any] = {
            "window": attention.window or 0, "scale": attention.scale,
            "soft_cap": attention.soft_cap or 0.0, "sinks": module.sinks, "alibi": attention.alibi,
        }  # fmt: skip
        self._qkv_proj.write(program, qkv, x)
        if module.has_qk_norm and module.qk_norm != "head":
            norms = {"values": qkv}
            qkv = self._write_norms(program, qkv)
        if module.qkv_limit is not None:
            qkv = self._write_limit(program, qkv, norms.pop("values", qkv), module.qkv_limit)
        program.add("rope_store", qkv=qkv, rope=self._rope, **norms, **heads)
        program.add("attention", out=mixed, **options, **heads)
        self._o_proj.write(program, y, mixed, residual=residual)

    def _write_norms(self, program: Program, qkv: Buffer) -> Buffer:
        """Add the norms of queries and keys; the buffer that then has them."""
        module = self._module
        normed = program.buffer("normed_qkv", qkv.size)
        if self._squares is not None:
            self._write_norms_over_ranks(program, normed, qkv, self._squares)
            return normed
        for start, norm in (
            (0, module.q_norm),
            (module.num_heads * module.head_dim, module.k_norm),
        ):
            _write_norm(program, normed.columns(start), qkv.columns(start), norm, stride=qkv.size)
        return normed

    def _write_norms_over_ranks(
        self, program: Program, y: Buffer, x: Buffer, squares: RankSums
    ) -> None:
        query, key = self._module.q_norm, self._module.k_norm
        assert isinstance(query, RMSNorm)
        sizes = {
            "query_size": len(query.weight), "key_size": len(key.weight), "stride": x.size,
        }  # fmt: skip
        program.add("query_key_squares", y=squares.part(2), x=x, **sizes)
        program.add(
            "query_key_norm", y=y, x=x, query_weight=query.weight, key_weight=key.weight,
            eps=query.eps, offset=query.offset, **sizes, **squares.parts(),
        )  # fmt: skip

    def _write_limit(self, program: Program, qkv: Buffer, values: Buffer, limit: float) -> Buffer:
        """Add what bounds queries, keys and values; the buffer that then has them.

        Args:
            values: where the values are.
        """
        module, limited = self._module, program.buffer("limited_qkv", qkv.size)
        start = (module.num_heads + module.num_kv_heads) * module.head_dim
        for x, first, last in ((qkv, 0, start), (values, start, qkv.size)):
            program.add(
                "clamp", y=limited.columns(first), x=x.columns(first), size=last - first,
                stride=qkv.size, limit=limit,
            )  # fmt: skip
        return limited


class PackedMLP:
    """The matrices of `GatedMLP` or `PlainMLP`, and its part of the program."""

    def __init__(self, mlp: GatedMLP | PlainMLP, pack: Callable[[Linear], CpuLinear]) -> None:
        self._is_gated = isinstance(mlp, GatedMLP)
        self._kind = get_args(Activation).index(mlp.activation)
        self._up_proj = pack(mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj)
        self._down_proj = pack(mlp.down_proj)
        self.linears = (self._up_proj, self._down_proj)
        self.num_bytes = self.num_active_bytes = sum(each.num_bytes for each in self.linears)
        self.num_active_weights = sum(each.in_features * each.out_features for each in self.linears)

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None) -> None:
        """y = MLP(x) (+ residual)"""
        up = program.buffer("gate_up", self._up_proj.out_features)
        active = program.buffer("gated", self._down_proj.in_features)
        self._up_proj.write(program, up, x)
        if self._is_gated and self._kind == 0:
            program.add("silu_mul", y=active, x=up, size=active.size)
        else:
            program.add(
                "activate", y=active, x=up, size=active.size, kind=self._kind,
                is_gated=self._is_gated,
            )  # fmt: skip
        self._down_proj.write(program, y, active, residual=residual)


def _write_normed(program: Program, name: str, x: Buffer, norm: Norm | None) -> Buffer:
    """The norm of x in the buffer `name`; without a norm x itself."""
    if norm is None:
        return x
    normed = program.buffer(name, x.size)
    _write_norm(program, normed, x, norm)
    return normed


def _write_norm(program: Program, y: Place, x: Place, norm: Norm, *, stride: int = 0) -> None:
    """
    Args:
        stride: from row to row of both; 0: as many values as the norm has weights.
    """
    size = len(norm.weight)
    places: dict[str, Any] = {"y": y, "x": x}
    if stride:
        places |= {"stride": stride}
    if isinstance(norm, RMSNorm):
        if norm.offset:
            places |= {"offset": norm.offset}
        program.add("rms_norm", **places, weight=norm.weight, size=size, eps=norm.eps)
        return
    program.add(
        "layer_norm", **places, weight=norm.weight, bias=norm.bias, size=size // norm.num_groups,
        num_groups=norm.num_groups, eps=norm.eps,
    )  # fmt: skip


class _PlainTable:
    """An embedding that is no output head, as it is."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def write_lookup(self, program: Program, y: Buffer, **ids: int) -> None:
        program.add("embed", y=y, weight=self._table, size=y.size, **ids)


def _pack_table(library: CpuLibrary, embedding: Embedding) -> _PlainTable | CpuTable:
    if embedding.quantized:
        return pack_table(library, embedding)
    return _PlainTable(embedding.weight)


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


@dataclass(frozen=True, slots=True)
class _WrittenLogits:
    """Arguments of operations that end in logits.

    Attributes:
        product: `y` is where they end, before `change`; a structure of its own where ranks have
            parts of them (`gathered`), in which adapters look that up.
        change: None: they are not scaled or capped.
    """

    product: Structure
    change: Structure | None
    gathered: tuple[Structure, Structure] | None


class CpuHead:
    """The end of a step: logits of the sampled rows, and a token drawn from each.

    Args:
        matrix: [vocab_size, hidden_size]
        dtype: of hidden states and logits.
        adapters: of the sampled rows.
        scale, soft_cap: of the logits; 0: no cap.
        gather: of the logits of the ranks, of which each has some tokens'.

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
        *,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        gather: RankGather | None = None,
    ) -> None:
        self.matrix, self._gather = matrix, gather
        self._vocab_size = matrix.out_features if gather is None else gather.size
        self._adapters = adapters
        self._scale, self._soft_cap = scale, soft_cap
        self._library = library
        self._logits = torch.empty(0, self._vocab_size, dtype=dtype)
        self._raw = self._logits  # products that are still to be scaled or capped
        self._uniforms = torch.empty(0)
        self._given: tuple[Tensor | None, ...] = ()

    def write(self, program: Program, hidden: Buffer) -> None:
        """Add the operations after all rows of a step are in `hidden`."""
        step = program.step
        gathered = program.buffer("gathered", hidden.size)
        self.hidden = hidden
        self._step, self._num_rows = step, addressof(step) + type(step).num_sampled.offset
        program.add("gather_rows", y=gathered, x=hidden, size=hidden.size)
        self._product = self._write_logits(program, gathered, self._num_rows)
        if self._adapters is not None:
            self._adapters.write(program, None, gathered, self._product.product)
        self._draw = program.add("draw_uniforms", num_rows=_NO_ROWS)
        self._sample = program.add("sample_tokens", num_rows=_NO_ROWS, vocab_size=self._vocab_size)

    def _write_logits(self, program: Program, x: Buffer, num_rows: int) -> _WrittenLogits:
        """Add the product and, if there is anything, what is done to it."""
        size = self._vocab_size
        gathered = None
        if self._gather is None:
            product = self.matrix.write(program, None, x, num_rows=num_rows)
        else:
            gathered = self._gather.write(program, self.matrix, x, num_rows)
            product = self._library.structure("linear_args", num_rows=num_rows)
        if self._scale == 1.0 and not self._soft_cap:
            return _WrittenLogits(product, None, gathered)
        change = program.add(
            "cap_logits", num_rows=num_rows, size=size, factor=self._scale, soft_cap=self._soft_cap
        )
        return _WrittenLogits(product, change, gathered)

    def _point(self, written: _WrittenLogits, logits: Tensor) -> None:
        """Let the operations of `_write_logits` end in these rows."""
        products, change = logits, written.change
        if change is not None:
            if len(logits) > len(self._raw):
                self._raw = torch.empty_like(logits)
            products = self._raw[: len(logits)]
            change.x, change.y = products.data_ptr(), logits.data_ptr()
        written.product.y = products.data_ptr()
        if self._gather is not None and written.gathered is not None:
            self._gather.point(written.gathered, products)

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
        self._point(self._product, logits)
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
        written = self._write_logits(program, x, addressof(program.step))
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
            self._logits = self._logits.new_empty(num_rows, self._vocab_size)
        return self._logits[:num_rows]


class NoHead:
    """Stands in for `CpuHead` in a stage that is not the last: what it gives is sent on."""

    hidden: Buffer

    def __init__(self, dtype: torch.dtype) -> None:
        self._logits = torch.empty(0, 0, dtype=dtype)

    def write(self, program: Program, hidden: Buffer) -> None:  # noqa: ARG002
        self.hidden = hidden

    def skip(self) -> None:
        """There is nothing to skip."""

    def bind(self, num_tokens: int, *_: object) -> StepOutput:
        return StepOutput(hidden=self.hidden.rows[:num_tokens], logits=self._logits)

    def logits(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("the last stage has the head")


_NO_ROWS = ctypes.c_int64(0)
