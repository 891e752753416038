"""Rotary positions: from a `RopeConfig` to the cosines and sines of a step's tokens.

Each kind of frequencies follows the paper named at its function and agrees with Hugging Face
transformers' `modeling_rope_utils`, so that checkpoints give the same results. Queries and keys are
rotated in `kernels.rotary_store_kv`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles for all layers, computed once per step in float32.

    Dynamic NTK derives its frequencies from the length of the sequence. Libraries that run
    one sequence at a time use the longest length so far; here batches, chunks and resumption
    must not matter, so the token at position p uses max(prompt length, p + 1): the length at
    which a plain prefill followed by single steps would have computed it.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.rotary_dim = head_dim if config.rotary_dim is None else config.rotary_dim
        self.scale = attention_factor(config)
        # On the CPU, whatever the default device: under "meta" this would import for a second.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(config, self.rotary_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @property
    def needs_prompt_lens(self) -> bool:
        return self.config.rope_type == "dynamic"

    def forward(
        self, positions: Tensor, prompt_lens: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [num_tokens, 1, head_dim / 2], one for all heads.

        Args:
            positions: int64 [num_tokens]
            prompt_lens: int64 [num_tokens], the prompt length of each token's sequence; required
                if `needs_prompt_lens`.
        """
        frequencies = self.inverse_frequencies  # [rotary_dim / 2]
        if self.needs_prompt_lens:
            lengths = torch.maximum(cast("Tensor", prompt_lens), positions + 1)
            frequencies = dynamic_frequencies(self.config, self.rotary_dim, lengths)
        angles = (positions[:, None].float() * frequencies)[:, None]
        cosines, sines = angles.cos() * self.scale, angles.sin() * self.scale
        num_still = (self.head_dim - self.rotary_dim) // 2  # pairs that are not turned
        if num_still:
            cosines, sines = F.pad(cosines, (0, num_still), value=1.0), F.pad(sines, (0, num_still))
        return cosines.to(dtype), sines.to(dtype)


RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one model.

    Attributes:
        rotary_dim: how many dimensions of a head are turned, the first ones in a checkpoint; None:
            all of them, 0: none, whatever the kind.
        is_interleaved: a checkpoint's pairs are dimensions 2i and 2i + 1, not i and
            i + rotary_dim / 2. Rows are reordered at load (`rotary_order`), so that here a pair is
            always i and i + head_dim / 2.
        original_max_position_embeddings: the context before scaling (dynamic, yarn, llama3,
            longrope).
        factor: by which the context is extended (all except default).
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
        attention_factor: yarn, longrope; None: as `attention_factor` computes it.
        short_factors, long_factors: longrope: what each pair's frequency is divided by.
        is_long: longrope: sequences may exceed the original context, so the long factors count.
    """

    rope_type: RopeType = "default"
    rotary_dim: int | None = None
    is_interleaved: bool = False
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def within(self, num_tokens: int) -> RopeConfig:
        """That of sequences of at most so many tokens."""
        if self.rope_type != "longrope":
            return self
        return replace(self, is_long=num_tokens > self.original_max_position_embeddings)


NO_ROPE = RopeConfig(rotary_dim=0)


def rotary_order(config: RopeConfig, head_dim: int) -> Tensor | None:
    """Which of a checkpoint's dimensions of a head is at each place here: int64 [head_dim]; None:
    they are in this order already. Scores do not depend on it, as long as queries and keys have
    the same."""
    rotary_dim = head_dim if config.rotary_dim is None else config.rotary_dim
    half, dimensions = head_dim // 2, torch.arange(head_dim)
    turned, still = dimensions[:rotary_dim], dimensions[rotary_dim:]
    pairs = turned.view(-1, 2).T if config.is_interleaved else turned.view(2, -1)
    num_still = half - rotary_dim // 2
    order = torch.cat((pairs[0], still[:num_still], pairs[1], still[num_still:]))
    return None if torch.equal(order, dimensions) else order


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    frequencies = theta_frequencies(config.theta, head_dim)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "yarn":
        return _yarn(config, head_dim)
    if config.rope_type == "llama3":
        return _llama3(config, frequencies)
    if config.rope_type == "longrope":
        return _longrope(config, head_dim)
    return frequencies


def theta_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta^(-2i/d), [head_dim / 2]: Su et al., "RoFormer", 2021, §3.2.2."""
    powers: Tensor = theta ** _exponents(head_dim)
    return 1.0 / powers


def dynamic_frequencies(config: RopeConfig, head_dim: int, lengths: Tensor) -> Tensor:
    """NTK-aware frequencies of tokens that see `lengths` [n] positions: [n, head_dim / 2].

    theta grows with the length once that exceeds the original context (Peng et al., "YaRN",
    2023, §3.1 and appendix B.1, after the posts of bloc97 and emozilla). Powers are computed by
    exponentials: the last bit of torch's powers depends on how many are computed at once.
    """
    original = config.original_max_position_embeddings
    stretch = config.factor * lengths.double().clamp(min=original) / original - (config.factor - 1)
    log_theta = math.log(config.theta) + stretch.log() * (head_dim / (head_dim - 2))
    # Created on their device: CUDA graphs cannot capture a copy that the host waits for.
    exponents = _exponents(head_dim, lengths.device)
    return (-log_theta[:, None] * exponents).exp().float()


def _exponents(head_dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def attention_factor(config: RopeConfig) -> float:
    """Factor of cosines and sines; 1 except for yarn (Peng et al., §3.4) and longrope (Ding et al.,
    "LongRoPE", 2024), which has it for short sequences too."""
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type == "longrope":
        original = config.original_max_position_embeddings
        return math.sqrt(1 + math.log(config.factor) / math.log(original))
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(
            config.factor, config.mscale_all_dim
        )
    return _yarn_scale(config.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al., §3.2)."""
    low = _yarn_dimension(config, head_dim, config.beta_fast)
    high = _yarn_dimension(config, head_dim, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((dimensions - low) / (high - low)).clamp(0, 1)
    frequencies = theta_frequencies(config.theta, head_dim)
    return frequencies / config.factor * (1 - kept) + frequencies * kept


def _yarn_dimension(config: RopeConfig, head_dim: int, num_rotations: float) -> float:
    """The dimension that makes num_rotations turns over the original context."""
    context = config.original_max_position_embeddings
    return (head_dim * math.log(context / (num_rotations * 2 * math.pi))) / (
        2 * math.log(config.theta)
    )


def _longrope(config: RopeConfig, head_dim: int) -> Tensor:
    """Each pair of dimensions is stretched by a factor of its own (Ding et al., 2024, §3).

    Other libraries choose the factors by the longest sequence so far. Here the keys of a block
    serve every sequence that starts with its tokens, so one choice holds for all sequences.
    """
    factors = config.long_factors if config.is_long else config.short_factors
    powers: Tensor = torch.tensor(factors) * config.theta ** _exponents(head_dim)
    return 1.0 / powers


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Stretch long waves, keep short ones, blend between ("The Llama 3 Herd of Models",
    2024, §3.4; formula from Meta's llama-models repository, `apply_scaling`)."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / config.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)
