"""Writes a decoder's program: the records of its forward pass, once for all interpreters.

    ids ─► embedding ─► [ norm ─► attention ─► + ─► norm ─► MLP ─► + ] × layers ─► norm ─► logits

No record writes to a buffer that it reads. Each part of a decoder holds its packed matrices, and
adds its records whenever a program is written; the module it is made from says what varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from penstock.engine.layers.experts import MixtureOfExperts
from penstock.engine.layers.norm import Norm, RMSNorm
from penstock.engine.models.decoder import (
    Decoder,
    DecoderLayer,
    GatedMLP,
    PlainMLP,
    SelfAttention,
)
from penstock.engine.program.operands import (
    Backend,
    Lookup,
    Operand,
    SlotBuffers,
    Sums,
    pack_linear,
    write_sum,
)
from penstock.kernels.activation import Activation
from penstock.kernels.program import Buffer, Place, Program


class DecoderWriter:
    """
    Args:
        decoder: loses the matrices that the backend takes.

    Attributes:
        features: buffers of the inputs of `feature_layers`, once it was written.
        num_bytes: of all matrices.
        num_active_weights, num_active_bytes: of those that one token needs.
    """

    def __init__(self, decoder: Decoder, backend: Backend) -> None:
        config = decoder.config
        self._size, self._meeting = config.hidden_size, backend.meeting
        self._layers = [_Layer(layer, backend) for layer in decoder.own_layers]
        self._norm = decoder.norm if config.has_head else None
        self._feature_layers = decoder.feature_layers
        self.features: tuple[Buffer, ...] = ()
        tables: list[Lookup] = []
        table: Lookup
        self.head: HeadWriter | None = None
        if config.has_head:
            self.head = HeadWriter(decoder, backend)
            tables.append(self.head.table)
        self._embedding: _Embedding | None = None
        if config.has_embedding:
            # A tied embedding is looked up in the packed head, so it is stored once.
            if config.is_tied and self.head is not None:
                table = self.head.table
            else:
                table = backend.pack_table(decoder.embed_tokens)
                tables.append(table)
            self._embedding = _Embedding(decoder, table, backend.meeting.sums)
        self.num_bytes = sum(each.num_bytes for each in self._layers)
        self.num_bytes += sum(each.num_bytes for each in tables)
        self.num_active_bytes = sum(each.num_active_bytes for each in self._layers)
        self.num_active_weights = sum(each.num_active_weights for each in self._layers)

    def write(self, program: Program, kv_pool: Tensor) -> Buffer:
        """Add all records before the head; the buffer that then has the hidden states.

        Args:
            kv_pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], as in
                `LayerKV`.
        """
        size = self._size
        stream, normed = program.buffer("stream", size), program.buffer("normed", size)
        kept = {layer: program.buffer(f"input {layer}", size) for layer in self._feature_layers}
        self.features = tuple(kept.values())
        x = stream
        if self._embedding is not None:
            x = self._embedding.write(program, stream)
        elif self._meeting.before is not None:
            self._meeting.before.write_receive(program, stream)
        for number, (layer, cache) in enumerate(zip(self._layers, kv_pool, strict=True)):
            y = kept.get(number + 1, stream)
            layer.write(program, y, x, cache)
            x = y
        if self._norm is not None:
            write_norm(program, normed, x, self._norm)
            return normed
        if self._meeting.after is not None:
            self._meeting.after.write_send(program, x)
        return x


class WrittenLogits(NamedTuple):
    """What may be changed from step to step of the records of `HeadWriter`.

    Attributes:
        product: its `y` is where the logits are, before `change`.
        change: scales or caps them; None: nothing does.
        parts: of ranks that have parts of them; None: this one has all.
    """

    product: Any
    change: Any
    parts: Any


class HeadWriter:
    """Logits of the sampled rows.

    Attributes:
        vocab_size: of all ranks' logits together.
    """

    def __init__(self, decoder: Decoder, backend: Backend) -> None:
        config = decoder.config
        self.table = backend.pack_head(decoder.head)
        self.vocab_size = decoder.vocab_size
        self._gather = backend.meeting.gather
        self._adapters = decoder.head_adapters
        self._change = {"factor": config.logit_scale, "soft_cap": config.logit_soft_cap or 0.0}
        self._is_changed = config.logit_scale != 1.0 or bool(config.logit_soft_cap)

    def write(
        self, program: Program, y: Place | None, x: Buffer, *, are_sampled: bool, **rows: Any
    ) -> WrittenLogits:
        """Add y = the logits of x.

        Args:
            y: None: to be set in the results.
            are_sampled: these are the rows that the head's adapters are for.
        """
        parts: Any = None
        given = y
        if self._is_changed and y is not None:
            given = program.buffer("raw_logits", self.vocab_size)
        if self._gather is None:
            product = self.table.write(program, given, x, **rows)
        else:
            parts, product = self._gather.write(program, given, self.table, x, **rows)
        if are_sampled and self._adapters is not None:
            self._adapters.write(program, given, x, product)
        change = None
        if self._is_changed:
            change = program.add(
                "cap_logits", y=y, x=given, size=self.vocab_size, **self._change, **rows
            )
        return WrittenLogits(product, change, parts)


class _Embedding:
    """What is before the layers.

    Args:
        sums: over the ranks that have parts of the table.
    """

    def __init__(self, decoder: Decoder, table: Lookup, sums: Sums | None) -> None:
        config, embedding = decoder.config, decoder.embed_tokens
        self._table, self._sums = table, sums
        self._own_ids = {"first_id": embedding.first_id, "num_ids": embedding.num_ids}
        self._adapters = embedding.adapters
        self._scale = config.embedding_scale
        self._factor = torch.tensor(self._scale).to(decoder.dtype).item()
        self._has_images = decoder.images is not None
        self._positions = decoder.embed_positions if config.has_position_table else None
        self._norm = decoder.embed_norm if config.has_embedding_norm else None

    def write(self, program: Program, stream: Buffer) -> Buffer:
        """Add its records; the buffer that then holds the embedding."""
        x, y = stream, stream
        if self._scale != 1.0 or self._positions is not None or self._norm is not None:
            y = program.buffer("embedded", stream.size)  # the two take turns
        if self._sums is None:
            self._table.write_lookup(program, x)
        else:
            part = self._sums.part(program, x.size)
            self._table.write_lookup(program, part, **self._own_ids)
            write_sum(self._sums, program, x, x.size)
        if self._adapters is not None:
            self._adapters.write_lookup(program, x)
        if self._has_images:
            program.add("place_features", y=x, size=x.size)
        if self._scale != 1.0:
            program.add("scale_add", y=y, x=x, factor=self._factor, size=x.size)
            x, y = y, x
        if self._positions is not None:
            table = self._positions.weight
            program.add("add_positions", y=y, x=x, table=table, size=x.size)
            x, y = y, x
        if self._norm is not None:
            write_norm(program, y, x, self._norm)
            x, y = y, x
        return x


class _Layer:
    """Attention and MLP, each adding to the residual stream."""

    def __init__(self, layer: DecoderLayer, backend: Backend) -> None:
        self._input_norm = layer.input_layernorm
        self._post_attention_norm = layer.post_attention_layernorm
        self._is_parallel = layer.is_parallel
        self._attention = AttentionWriter(layer.self_attn, backend, rope=layer.rope)
        self._mlp: MLPWriter | _Mixture
        if isinstance(layer.mlp, MixtureOfExperts):
            self._mlp = _Mixture(layer.mlp, backend)
        else:
            self._mlp = MLPWriter(layer.mlp, backend)
        self._attention_end = _End(layer.attention_post_norm, layer.residual_scale)
        self._mlp_end = _End(layer.mlp_post_norm, layer.residual_scale)
        self.num_bytes, self.num_active_bytes, self.num_active_weights = map(
            sum, zip(self._attention.counts, self._mlp.counts, strict=True)
        )

    def write(self, program: Program, y: Buffer, x: Buffer, cache: Tensor) -> None:
        """y = the residual stream x with this layer added to it; y may be x: another buffer holds
        the stream in between."""
        attended = program.buffer("attended", x.size)
        normed = _write_normed(program, x, self._input_norm)
        attend = partial(self._attention.write, program, x=normed, cache=cache)
        self._attention_end.write(program, attended, x, attend)
        if not self._is_parallel:
            normed = _write_normed(program, attended, self._post_attention_norm)
        elif self._post_attention_norm is not None:
            normed = _write_normed(program, x, self._post_attention_norm)
        self._mlp_end.write(program, y, attended, partial(self._mlp.write, program, x=normed))


class _End:
    """The end of attention and of the MLP: its output, normalised and scaled where the model does
    that, is added to the stream."""

    def __init__(self, norm: Norm | None, scale: float) -> None:
        self._norm, self._scale = norm, scale

    def write(
        self, program: Program, y: Buffer, residual: Buffer, write: Callable[..., None]
    ) -> None:
        """y = the output, and so on, + residual

        Args:
            write: adds the records that give the output (y=…, residual=…).
        """
        if self._norm is None and self._scale == 1.0:
            write(y=y, residual=residual)
            return
        product = program.buffer("product", y.size)
        write(y=product, residual=None)
        added = _write_normed(program, product, self._norm)
        program.add("scale_add", y=y, x=added, residual=residual, factor=self._scale, size=y.size)


class AttentionWriter:
    """Attention over the paged cache.

    Attributes:
        counts: bytes of its matrices; bytes and numbers of those that one token needs.
    """

    def __init__(self, attention: SelfAttention, backend: Backend, *, rope: int) -> None:
        self._module, self._rope = attention, rope
        self._squares = backend.meeting.squares
        self._qkv_proj = pack_linear(backend, attention.qkv_proj)
        self._o_proj = pack_linear(backend, attention.o_proj)
        self.counts = _counts((self._qkv_proj, self._o_proj))

    def write(
        self, program: Program, *, y: Buffer, x: Buffer, cache: Tensor, residual: Buffer | None
    ) -> None:
        """y = attention(x) (+ residual)"""
        module, attention = self._module, self._module.attention
        qkv = program.buffer("qkv", self._qkv_proj.out_features)
        query = program.buffer("query", self._o_proj.in_features)
        mixed = program.buffer("mixed", self._o_proj.in_features)
        heads: dict[str, Any] = {
            "query": query, "key_cache": cache[0], "value_cache": cache[1],
            "block_size": cache.shape[2], "num_heads": module.num_heads,
            "num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim,
            "is_int8": cache.dtype == torch.int8,
            "key_scales": attention.key_scale, "value_scales": attention.value_scale,
        }  # fmt: skip
        norms: dict[str, Any] = {}
        if module.has_qk_norm and module.qk_norm == "head":
            weights = {"query_norm": module.q_norm.weight, "key_norm": module.k_norm.weight}
            norms = {**weights, "eps": module.q_norm.eps, "norm_offset": module.q_norm.offset}
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
        module, squares = self._module, self._squares
        normed = program.buffer("normed_qkv", qkv.size)
        query, key = module.q_norm, module.k_norm
        if squares is None or not isinstance(query, RMSNorm):
            for start, norm in ((0, query), (module.num_heads * module.head_dim, key)):
                y, x = normed.columns(start), qkv.columns(start)
                write_norm(program, y, x, norm, stride=qkv.size)
            return normed
        sizes = {
            "query_size": len(query.weight), "key_size": len(key.weight), "stride": qkv.size,
        }  # fmt: skip
        program.add("query_key_squares", y=squares.part(program, 2), x=qkv, **sizes)
        program.add(
            "query_key_norm", y=normed, x=qkv, query_weight=query.weight, key_weight=key.weight,
            eps=query.eps, offset=query.offset, **sizes, **squares.parts(),
        )  # fmt: skip
        return normed

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


class MLPWriter:
    """An MLP with or without a gate."""

    def __init__(self, mlp: GatedMLP | PlainMLP, backend: Backend) -> None:
        self._is_gated = isinstance(mlp, GatedMLP)
        self._kind = get_args(Activation).index(mlp.activation)
        up_proj = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
        self._up_proj, self._down_proj = (
            pack_linear(backend, each) for each in (up_proj, mlp.down_proj)
        )
        self.operands = (self._up_proj, self._down_proj)
        self.counts = _counts(self.operands)

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None) -> None:
        """y = MLP(x) (+ residual)"""
        size = self._down_proj.in_features  # other layers' may be larger, in the same buffers
        up = program.buffer("gate_up", self._up_proj.out_features)
        active = program.buffer("gated", size)
        self._up_proj.write(program, up, x)
        if self._is_gated and self._kind == 0:
            program.add("silu_mul", y=active, x=up, size=size)
        else:
            program.add(
                "activate", y=active, x=up, size=size, kind=self._kind,
                is_gated=self._is_gated,
            )  # fmt: skip
        self._down_proj.write(program, y, active, residual=residual)


class _Mixture:
    """An MLP of many experts, of which each token uses a few."""

    def __init__(self, mixture: MixtureOfExperts, backend: Backend) -> None:
        self._config = config = mixture.config
        sums = backend.meeting.sums
        self._sums = None if mixture.ranks.size == 1 else sums
        gates = [mixture.gate]
        shared, gate = mixture.shared_expert, mixture.shared_expert_gate
        if gate is not None:
            gates.append(gate)
        self._num_logits = sum(each.out_features for each in gates)
        self._router_bias = mixture.gate.bias
        self._router = backend.pack_router(gates)
        self._gate_up_proj = backend.pack_experts(mixture.experts.gate_up_proj)
        self._down_proj = backend.pack_experts(mixture.experts.down_proj)
        self._shared_expert = MLPWriter(shared, backend) if isinstance(shared, GatedMLP) else None
        common = () if self._shared_expert is None else self._shared_expert.operands
        num_bytes, _, num_weights = _counts(common)
        num_bytes += self._router.num_bytes
        experts, count = (self._gate_up_proj, self._down_proj), config.experts_per_token
        self.counts = (
            num_bytes + sum(each.num_bytes for each in experts),
            num_bytes + count * sum(each.expert_bytes for each in experts),
            num_weights + count * sum(each.in_features * each.out_features for each in experts),
        )

    def write(self, program: Program, y: Buffer, x: Buffer, *, residual: Buffer | None) -> None:
        """y = the experts' sum of x (+ residual)"""
        config, num_logits = self._config, self._num_logits
        count = config.experts_per_token
        slots = SlotBuffers.of(program, count)
        logits = program.buffer("router_logits", num_logits, torch.float32)
        experts = program.buffer("token_experts", count, torch.int32)
        weights = program.buffer("expert_weights", count, torch.float32)
        numbers = {"num_experts": config.num_experts, "experts_per_token": count}
        self._router.write(program, logits, x)
        program.add(
            "route", experts=experts, weights=weights, logits=logits, stride=num_logits,
            is_normalized=config.is_normalized, bias=self._router_bias, **numbers,
        )  # fmt: skip
        program.add(
            "group_slots", slots=slots.slots, places=slots.places, tiles=slots.tiles,
            counts=slots.counts, experts=experts, **numbers,
        )  # fmt: skip
        size = self._down_proj.in_features
        gate_up = slots.buffer(program, "slot_gate_up", 2 * size)
        gated = slots.buffer(program, "slot_gated", size)
        output = slots.buffer(program, "slot_outputs", y.size)
        self._gate_up_proj.write(program, gate_up, x, slots, is_gathered=False)
        halves: dict[str, Any] = {"y": gated, "x": gate_up, "size": size}
        if config.swiglu is None:
            program.add("silu_mul", num_rows=slots.num_slots, **halves)
        else:
            alpha, limit = config.swiglu
            program.add(
                "clamped_swiglu", num_rows=slots.num_slots, alpha=alpha, limit=limit, **halves
            )
        self._down_proj.write(program, output, gated, slots, is_gathered=True)
        shared: dict[str, Any] = {}
        if self._shared_expert is not None:
            shared_output = program.buffer("shared_output", y.size)
            self._shared_expert.write(program, shared_output, x, residual=None)
            gate = logits.columns(config.num_experts)
            shared = {"shared": shared_output, "shared_logits": gate, "stride": num_logits}
        combined: dict[str, Any] = {"y": y, "residual": residual}
        if self._sums is not None:
            combined = {"y": self._sums.part(program, y.size)}
        program.add(
            "combine_slots", x=output, places=slots.places, weights=weights, size=y.size,
            experts_per_token=count, **combined, **shared,
        )  # fmt: skip
        if self._sums is not None:
            write_sum(self._sums, program, y, y.size, residual)


def _counts(operands: Iterable[Operand]) -> tuple[int, int, int]:
    """Bytes, the bytes that a token needs (all), and numbers."""
    own: Sequence[Operand] = list(operands)
    num_bytes = sum(each.num_bytes for each in own)
    return num_bytes, num_bytes, sum(each.in_features * each.out_features for each in own)


def _write_normed(program: Program, x: Buffer, norm: Norm | None) -> Buffer:
    """The norm of x; without a norm x itself."""
    if norm is None:
        return x
    normed = program.buffer("normed", x.size)
    write_norm(program, normed, x, norm)
    return normed


def write_norm(program: Program, y: Place, x: Place, norm: Norm, *, stride: int = 0) -> None:
    """Add y = the norm of x.

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
