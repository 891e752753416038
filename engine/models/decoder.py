"""The one decoder: a configurable transformer that every supported architecture maps to.

Pre-norm blocks of rotary, grouped-query attention and a gated MLP (Touvron et al., "LLaMA",
2023). What varies is data in `DecoderConfig`. Not known here: checkpoints, batches, sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.layers.attention import Attention, ForwardContext
from penstock.engine.layers.embedding import Embedding
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding, rotate
from penstock.engine.models.decoder_config import DecoderConfig


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        query_size, kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.qkv_proj = Linear(
            config.hidden_size, (query_size, kv_size, kv_size), has_bias=config.has_qkv_bias
        )
        self.o_proj = Linear(query_size, (config.hidden_size,), has_bias=config.has_output_bias)
        self.has_qk_norm = config.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attention = Attention(
            layer=layer, head_dim=self.head_dim, window=config.windows[layer]
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        num_tokens = x.shape[0]
        heads = self.qkv_proj(x).view(num_tokens, -1, self.head_dim)
        query, key, value = heads.split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )  # each [num_tokens, its heads, head_dim]
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        mixed = self.attention(query, key, value, context)
        output: Tensor = self.o_proj(mixed.reshape(num_tokens, -1))
        return output


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, has_bias = config.intermediate_size, config.has_mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, (size, size), has_bias=has_bias)
        self.down_proj = Linear(size, (config.hidden_size,), has_bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, context)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    """Token ids in, hidden states out; logits only for the rows that need them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
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
        rotary = self.rotary(context.positions, context.prompt_lens, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, context)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        head = self.embed_tokens if self.config.is_tied else self.lm_head
        return head.logits(hidden)

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
