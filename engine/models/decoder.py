"""The one decoder: a configurable transformer that every supported architecture maps to.

Blocks of grouped-query attention and an MLP that read a residual stream and add to it (with norms
before each, rotary positions and a gate: Touvron et al., "LLaMA", 2023). `DecoderConfig` holds what
varies.
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.engine.layers.attention import Attention
from penstock.engine.layers.experts import ExpertMatrices, MixtureOfExperts
from penstock.engine.layers.linear import (
    Embedding,
    Linear,
    MatrixLayer,
    constant,
    weight_bytes,
)
from penstock.engine.layers.norm import HeadNorm, LayerNorm, Norm, RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.lora.layer_adapters import LayerAdapters, StepRows
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.language_model import ImageEncoder, LayerKV, PagedKV, StateSpec
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.parallel.shard import Shard
from penstock.kernels import int8_cache


def _norm(config: DecoderConfig) -> Norm:
    """Of the residual stream, or of what is added to it."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps, has_bias=config.has_norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps, offset=config.norm_offset)


def _head_norm(config: DecoderConfig, num_heads: int) -> Norm:
    """Of the queries or the keys of a token."""
    if config.qk_norm == "layer":
        return HeadNorm(
            num_heads, config.head_dim, config.norm_eps, has_bias=config.has_qk_norm_bias
        )
    size = num_heads * config.head_dim if config.qk_norm == "row" else config.head_dim
    return RMSNorm(size, config.norm_eps, offset=config.norm_offset)


class SelfAttention(nn.Module):
    """
    Args:
        num_inputs: of queries, keys and values; None: hidden_size.

    Attributes:
        shard, kv_shard: which of the query's and key's heads these are; None: all.
    """

    shard: Shard | None = None
    kv_shard: Shard | None = None

    def __init__(self, config: DecoderConfig, layer: int, *, num_inputs: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        query_size, kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.qkv_proj = Linear(
            num_inputs or config.hidden_size,
            (query_size, kv_size, kv_size),
            has_bias=config.has_qkv_bias,
        )
        self.o_proj = Linear(query_size, (config.hidden_size,), has_bias=config.has_output_bias)
        self.has_qk_norm, self.qk_norm = config.has_qk_norm, config.qk_norm
        if self.has_qk_norm:
            self.q_norm = _head_norm(config, self.num_heads)
            self.k_norm = _head_norm(config, self.num_kv_heads)
        self.qkv_limit = config.qkv_limit
        self.sinks = (
            nn.Parameter(torch.empty(self.num_heads), requires_grad=False)
            if config.has_sinks
            else None
        )
        self.attention = Attention(
            layer=layer - config.layer_numbers.start,
            head_dim=self.head_dim,
            window=config.windows[layer],
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            alibi_slopes=config.alibi_slopes,
        )


class GatedMLP(nn.Module):
    """activation(gate(x)) · up(x), projected (Shazeer, "GLU Variants Improve Transformer",
    2020)."""

    def __init__(self, config: DecoderConfig, *, size: int | None = None) -> None:
        """size: None: intermediate_size."""
        super().__init__()
        size, has_bias = size or config.intermediate_size, config.has_mlp_bias
        self.activation = config.activation
        self.gate_up_proj = Linear(config.hidden_size, (size, size), has_bias=has_bias)
        self.down_proj = Linear(size, (config.hidden_size,), has_bias=has_bias)


class PlainMLP(nn.Module):
    """activation(up(x)), projected (Vaswani et al., "Attention Is All You Need", 2017, §3.3)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, has_bias = config.intermediate_size, config.has_mlp_bias
        self.activation = config.activation
        self.up_proj = Linear(config.hidden_size, (size,), has_bias=has_bias)
        self.down_proj = Linear(size, (config.hidden_size,), has_bias=has_bias)


def make_mlp(config: DecoderConfig, layer: int) -> GatedMLP | PlainMLP | MixtureOfExperts:
    experts = config.experts
    if experts is None or not experts.layers[layer]:
        return GatedMLP(config) if config.is_gated else PlainMLP(config)
    shared = GatedMLP(config, size=experts.shared_size) if experts.shared_size else None
    return MixtureOfExperts(experts, config.hidden_size, shared)


class DecoderLayer(nn.Module):
    """Attention and MLP, each adding to the residual stream.

    The next norm adds a block's output to the stream, in one operation with the norm; so a layer
    passes on the stream and, separately, what must still be added.

    Attributes:
        input_layernorm, post_attention_layernorm: of what attention and the MLP read; None: they
            read the stream, or the MLP what attention reads.
        attention_post_norm, mlp_post_norm: of what they add to the stream.
        rope: the layer's number among the decoder's rotary positions.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        has_mlp_norm = config.has_pre_norms and config.has_mlp_norm
        self.is_parallel, self.residual_scale = config.is_parallel, config.residual_scale
        self.rope = config.ropes.index(config.rope_of(layer))
        self.input_layernorm = _norm(config) if config.has_pre_norms else None
        self.self_attn = SelfAttention(config, layer)
        self.attention_post_norm = _norm(config) if config.has_post_norms else None
        self.post_attention_layernorm = _norm(config) if has_mlp_norm else None
        self.mlp = make_mlp(config, layer)
        self.mlp_post_norm = _norm(config) if config.has_post_norms else None


class PositionTable(nn.Module):
    """A learned vector for each position: Vaswani et al., 2017, §3.5.

    Args:
        first_position: the checkpoint's row for position 0.
    """

    def __init__(self, num_positions: int, hidden_size: int, *, first_position: int) -> None:
        super().__init__()
        self.first_position = first_position
        self.weight = constant(torch.empty(num_positions, hidden_size))


class Decoder(nn.Module):
    """The weights of a model, and what varies: a `LoadedModel`. `writer` says what it computes.

    Attributes:
        feature_layers: layers, ascending from 1 on, whose inputs are wanted besides the result.
        adapter_rows: of each step, where its layers have room for adapters.
        head_adapters: what adapters add to the logits of sampled rows.
        ranks: that have the other parts of its tables.
        whole_config: of the model of which this may be a part.
        num_tower_bytes: size of what encodes images.
        is_invariant: a token's results do not depend on the batch, to the bit.
    """

    is_invariant = False
    adapter_rows: StepRows | None = None
    num_tower_bytes = 0
    head_adapters: LayerAdapters | None = None
    ranks: Ranks = ALONE

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = self.whole_config = config
        self.vocab_size, self.context_len = config.vocab_size, config.context_len
        self.quantization = "none"
        self.images: ImageEncoder | None = None
        self.feature_layers: tuple[int, ...] = ()
        self._kv_dtype: torch.dtype | None = None
        if config.has_embedding or (config.has_head and config.is_tied):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.has_position_table and config.has_embedding:
            self.embed_positions = PositionTable(
                config.context_len, config.hidden_size, first_position=config.first_position
            )
        if config.has_embedding_norm and config.has_embedding:
            self.embed_norm = _norm(config)
        own = config.layer_numbers
        # By their numbers in the model; others are empty.
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) if layer in own else nn.Identity()
            for layer in range(config.num_layers)
        )
        self.norm = _norm(config)
        self.rotaries = rotary_embeddings(config)
        if config.has_head and not config.is_tied:
            self.lm_head = Embedding(
                config.vocab_size, config.hidden_size, has_bias=config.has_head_bias
            )

    @property
    def state_spec(self) -> StateSpec:
        head_size = self.config.head_dim
        if self._kv_dtype == torch.int8:
            head_size += int8_cache.SCALE_BYTES
        layers = tuple(
            LayerKV(
                num_heads=self.config.num_kv_heads,
                head_size=head_size,
                dtype=self._kv_dtype or self.dtype,
                window=window,
            )
            for window in (self.config.windows[layer] for layer in self.config.layer_numbers)
        )
        return (PagedKV(layers),)

    def use_fp8_cache(self) -> None:
        """Store keys and values in FP8."""
        self._kv_dtype = torch.float8_e4m3fn
        for module in self.modules():
            if isinstance(module, Attention):
                module.use_fp8_cache(self.config.num_kv_heads, self.device)

    def use_int8_cache(self) -> None:
        """Store keys and values in bytes, with a scale for each token and head; on a CPU."""
        self._kv_dtype = torch.int8

    def use_invariant_kernels(self) -> None:
        """Make a token's results, to the bit, depend only on the tokens before it; on a GPU.

        Norms, activations and positions already do: one program computes a row.
        """
        self.is_invariant = True
        for module in self.matrix_layers:
            module.is_invariant = True

    @property
    def sends_on(self) -> bool:
        return not self.config.has_head

    @property
    def head(self) -> Embedding:
        """Which the last stage has."""
        return self.embed_tokens if self.config.is_tied else self.lm_head

    @property
    def own_layers(self) -> list[DecoderLayer]:
        """Those that this process has."""
        return [each for each in self.layers if isinstance(each, DecoderLayer)]

    def absent_matrices(self) -> dict[str, MatrixLayer]:
        """By name, those of the whole model that other stages have."""
        if self.config.has_embedding and self.config.has_head:
            return {}
        own = dict(self.named_modules())
        with torch.device("meta"):
            whole = Decoder(self.whole_config)
        return {
            name: module
            for name, module in whole.named_modules()
            if isinstance(module, MatrixLayer) and name not in own
        }

    @property
    def matrix_layers(self) -> list[MatrixLayer]:
        return [module for module in self.modules() if isinstance(module, MatrixLayer)]

    @property
    def expert_matrices(self) -> list[ExpertMatrices]:
        return [module for module in self.modules() if isinstance(module, ExpertMatrices)]

    @property
    def expected_bytes(self) -> int:
        """Size of the experts that are still to be read."""
        return sum(each.expected_bytes for each in self.expert_matrices if each.read is not None)

    @property
    def weight_bytes(self) -> int:
        """Size of all weights, as they are held."""
        return weight_bytes(self) + self.num_tower_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def needs_prompt_lens(self) -> bool:
        return any(each.needs_prompt_lens for each in self.rotaries)


def rotary_embeddings(config: DecoderConfig) -> nn.ModuleList:
    """One for each of the decoder's `ropes`."""
    return nn.ModuleList(RotaryEmbedding(rope, config.head_dim) for rope in config.ropes)
