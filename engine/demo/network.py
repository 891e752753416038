"""A small Llama for training, with Hugging Face's parameter names.

Its state dict is the checkpoint: `train` writes it unchanged; any Llama implementation reads it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The shape of the network; the defaults are the shipped model's."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def rotary_tables(config: NetworkConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [num_positions, head_dim], in the half-split layout."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Norm(nn.Module):
    """RMS norm; its weight follows the dtype of its input, which keeps the fused kernel."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        queries, keys, values = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # each [batch, heads, length, head_dim]
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        group = queries.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """Attention, then the feed-forward, each on a normalised residual stream."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config)
        self.post_attention_layernorm = Norm(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model.`"""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config)


class Network(nn.Module):
    """A causal language model whose output head is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(config)

    def _initialise(self, config: NetworkConfig) -> None:
        residual_scale = (2 * config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 * (residual_scale if is_residual else 1.0))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return hidden states [batch, length, hidden] for token_ids [batch, length]."""
        length = token_ids.shape[1]
        x = self.model.embed_tokens(token_ids)
        cos, sin = self.cos[:length], self.sin[:length]
        if torch.is_autocast_enabled("cpu"):
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab_size] of hidden states [..., hidden]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
