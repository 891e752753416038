"""The one decoder: a configurable transformer that every supported architecture maps to.

Pre-norm blocks of rotary, grouped-query attention and a gated MLP (Touvron et al., "LLaMA",
2023). `DecoderConfig` holds what varies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.engine.layers.adapters import LayerAdapters
from penstock.engine.layers.attention import Attention, ForwardContext
from penstock.engine.layers.linear import Embedding, Linear, MatrixLayer, weight_bytes
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.language_model import LayerKV
from penstock.kernels import int8_cache
from penstock.kernels.gated_activation import silu_and_mul
from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.rotary_store_kv import rotary_store_kv


class SelfAttention(nn.Module):
    """
    Args:
        num_inputs: of queries, keys and values; None: hidden_size.
    """

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
        self.has_qk_norm = config.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.sinks = (
            nn.Parameter(torch.empty(self.num_heads), requires_grad=False)
            if config.has_sinks
            else None
        )
        self.attention = Attention(
            layer=layer,
            head_dim=self.head_dim,
            window=config.windows[layer],
            soft_cap=config.attention_soft_cap,
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        num_tokens = x.shape[0]
        query = rotary_store_kv(
            self.qkv_proj(x).view(num_tokens, -1, self.head_dim),
            rotary,
            *context.cache(self.attention.layer),
            context.layout.slot_mapping,
            qk_norm=self._qk_norm,
            key_scale=self.attention.key_scale,
            value_scale=self.attention.value_scale,
        )  # [num_tokens, num_heads, head_dim]
        mixed = self.attention(query, context, sinks=self.sinks)
        output: Tensor = self.o_proj(mixed.reshape(num_tokens, -1))
        return output

    @property
    def _qk_norm(self) -> QKNorm | None:
        if not self.has_qk_norm:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, has_bias = config.intermediate_size, config.has_mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, (size, size), has_bias=has_bias)
        self.down_proj = Linear(size, (config.hidden_size,), has_bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each adding to the residual stream.

    The next norm adds a block's output to the stream, in one operation with the norm; so a layer
    passes on the stream and, separately, what must still be added.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """x must still be added to the stream `residual` (None: x starts it); returns the same
        pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, context)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """A `TorchModel`.

    Attributes:
        feature_layers: layers, ascending from 1 on, whose inputs are wanted besides the result.
        features: these inputs in the last forward pass, [num_tokens, hidden_size] each.
        head_adapters: what adapters add to the logits of sampled rows.
    """

    can_be_captured = True
    head_adapters: LayerAdapters | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.context_len = config.vocab_size, config.context_len
        self.quantization = "none"
        self.feature_layers: tuple[int, ...] = ()
        self.features: tuple[Tensor, ...] = ()
        self._kv_dtype: torch.dtype | None = None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        if not config.is_tied:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size]"""
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        rotary = self.rotary(context.positions, context.prompt_lens, x.dtype)
        features = []
        for number, layer in enumerate(self.layers):
            if number in self.feature_layers:
                features.append(x if residual is None else x + residual)
            x, residual = layer(x, residual, rotary, context)
        self.features = tuple(features)
        hidden, _ = self.norm.add(x, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        head = self.embed_tokens if self.config.is_tied else self.lm_head
        return head.logits(hidden)

    @property
    def kv_spec(self) -> tuple[LayerKV, ...]:
        head_size = self.config.head_dim
        if self._kv_dtype == torch.int8:
            head_size += int8_cache.SCALE_BYTES
        return tuple(
            LayerKV(
                num_heads=self.config.num_kv_heads,
                head_size=head_size,
                dtype=self._kv_dtype or self.dtype,
                window=window,
            )
            for window in self.config.windows
        )

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
        for module in self.modules():
            if isinstance(module, MatrixLayer | Attention):
                module.is_invariant = True

    @property
    def matrix_layers(self) -> list[MatrixLayer]:
        return [module for module in self.modules() if isinstance(module, MatrixLayer)]

    @property
    def weight_bytes(self) -> int:
        """Size of all weights, as they are held."""
        return weight_bytes(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    @property
    def needs_prompt_lens(self) -> bool:
        return self.rotary.needs_prompt_lens
