"""The operations of a program in torch. Each takes the step and its record's arguments, which
`cpu/ops.h` describes; a matrix is an object that multiplies.

Those with a Triton kernel pick it on a GPU. A record's sizes and strides are for C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from penstock.kernels.activation import Activation, activate_and_mul
from penstock.kernels.activation import activate as activate_rows
from penstock.kernels.experts import SlotGroups
from penstock.kernels.experts import combine_slots as combine
from penstock.kernels.experts import group_slots as group
from penstock.kernels.experts import route as choose
from penstock.kernels.layer_norm import layer_norm as normalize
from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.reference.experts import clamped_swiglu_reference
from penstock.kernels.rms_norm import add_rms_norm
from penstock.kernels.rms_norm import rms_norm as root_mean_square
from penstock.kernels.rotary_store_kv import rotary_store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep:
    """The inputs that change from step to step.

    Attributes:
        token_ids: int64 [num_tokens]
        rotary: of each kind of rotary positions, cosines and sines by `rotary_store_kv`.
        feature_rows, features: int64 [num_features] and [num_features, size], of the rows that
            have these in place of their embeddings; None: none has.
        is_invariant: a row's bits do not depend on the other rows.
    """

    token_ids: Tensor
    layout: PagedLayout
    positions: Tensor
    rotary: tuple[tuple[Tensor, Tensor], ...] = ()
    is_invariant: bool = False
    feature_rows: Tensor | None = None
    features: Tensor | None = None


# Of a program whose records do not look at it.
_NOTHING = torch.empty(0, dtype=torch.int32)
NO_STEP = TorchStep(
    token_ids=_NOTHING,
    layout=PagedLayout(
        query_start_loc=_NOTHING,
        seq_lens=_NOTHING,
        block_tables=_NOTHING[None],
        slot_mapping=_NOTHING,
        max_query_len=0,
        max_seq_len=0,
    ),
    positions=_NOTHING,
)


class Sum:
    """x + residual, both [num_rows, size], added when it is needed."""

    __slots__ = ("residual", "total", "x")

    def __init__(self, x: Tensor, residual: Tensor) -> None:
        self.x, self.residual = x, residual
        self.total: Tensor | None = None

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.x + self.residual
        return self.total


@dataclass(frozen=True, slots=True)
class TorchOperation:
    """
    Attributes:
        run: takes the step, and arguments of the record by their names, where a buffer stands for
            what it holds. Returns what the operation writes; a tuple of several.
        writes: by which arguments the buffers are named that it writes.
        takes_sums: arguments that may be a `Sum`.
        accepts: the names of `run`'s arguments. A record has others, which C needs.
    """

    run: Callable[..., Any]
    writes: tuple[str, ...]
    takes_sums: tuple[str, ...]
    accepts: tuple[str, ...]


OPERATIONS: dict[str, TorchOperation] = {}


def operation(
    *writes: str, takes_sums: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let programs run a function by its name."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        accepts = tuple(inspect.signature(run).parameters)[1:]
        OPERATIONS[run.__name__] = TorchOperation(run, writes, takes_sums, accepts)
        return run

    return declare


_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# -- matrices ------------------------------------------------------------------------------------


@operation("y")
def linear(_: TorchStep, x: Tensor, weight: Any) -> Tensor:
    """weight: multiplies (`MatrixLayer.multiply`), and adds its bias."""
    product: Tensor = weight.multiply(x)
    return product


@operation("y")
def embed(step: TorchStep, weight: Any) -> Tensor:
    """weight: a table (`Embedding.look_up`)."""
    found: Tensor = weight.look_up(step.token_ids)
    return found


@operation()
def place_features(step: TorchStep, y: Tensor) -> None:
    if step.features is not None:
        y[step.feature_rows] = step.features


# -- adapters ------------------------------------------------------------------------------------


@operation("h")
def lora_shrink(_: TorchStep, x: Tensor, pairs: Any) -> list[Tensor]:
    """pairs: the matrices of the step's rows (`TorchAdapters`)."""
    hidden: list[Tensor] = pairs.shrink(x)
    return hidden


@operation("h")
def lora_lookup(step: TorchStep, pairs: Any) -> list[Tensor]:
    hidden: list[Tensor] = pairs.look_up(step.token_ids)
    return hidden


@operation(takes_sums=("y",))
def lora_expand(_: TorchStep, y: Tensor | Sum, h: list[Tensor], pairs: Any) -> None:
    pairs.expand(y.x if isinstance(y, Sum) else y, h)


# -- norms and numbers by themselves -------------------------------------------------------------


@operation("y", takes_sums=("x",))
def rms_norm(
    _: TorchStep, x: Tensor | Sum, weight: Tensor, eps: float, offset: float = 0.0
) -> Tensor:
    if not isinstance(x, Sum):
        return root_mean_square(x[:, : len(weight)].contiguous(), weight, eps, offset)
    if x.total is not None:
        return root_mean_square(x.total, weight, eps, offset)
    normed, x.total = add_rms_norm(x.x, x.residual, weight, eps, offset)
    return normed


@operation("y")
def layer_norm(
    _: TorchStep, x: Tensor, weight: Tensor, eps: float, num_groups: int,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return normalize(x[:, : len(weight)].contiguous(), weight, bias, eps, num_groups)


@operation("y")
def scale_add(_: TorchStep, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


@operation("y")
def clamp(_: TorchStep, x: Tensor, size: int, limit: float) -> Tensor:
    return x[:, :size].clamp(-limit, limit)


@operation("y")
def add_positions(step: TorchStep, x: Tensor, table: Tensor) -> Tensor:
    return x + torch.nn.functional.embedding(step.positions, table)


@operation("y")
def cap_logits(_: TorchStep, x: Tensor, factor: float, soft_cap: float) -> Tensor:
    scaled = x if factor == 1.0 else x * factor
    return scaled if not soft_cap else (scaled / soft_cap).tanh() * soft_cap


@operation("y")
def silu_mul(_: TorchStep, x: Tensor) -> Tensor:
    return activate_and_mul(x, "silu")


@operation("y")
def activate(_: TorchStep, x: Tensor, kind: int, *, is_gated: bool) -> Tensor:
    run = activate_and_mul if is_gated else activate_rows
    return run(x, _ACTIVATIONS[kind])


@operation("y")
def clamped_swiglu(_: TorchStep, x: Tensor, alpha: float, limit: float) -> Tensor:
    return clamped_swiglu_reference(x, alpha=alpha, limit=limit)


# -- attention -----------------------------------------------------------------------------------


@operation("query")
def rope_store(
    step: TorchStep, qkv: Tensor, key_cache: Tensor, value_cache: Tensor, rope: int, head_dim: int,
    num_heads: int, num_kv_heads: int, values: Tensor | None = None,
    query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[num_tokens, num_heads, head_dim]"""
    if values is not None:
        first = (num_heads + num_kv_heads) * head_dim
        qkv = torch.cat((qkv[:, :first], values[:, first:]), dim=1)
    norm = None
    if query_norm is not None and key_norm is not None:
        norm = QKNorm(query_norm, key_norm, eps, norm_offset)
    return rotary_store_kv(
        qkv.view(len(qkv), -1, head_dim), step.rotary[rope], key_cache, value_cache,
        step.layout.slot_mapping, qk_norm=norm, key_scale=key_scales, value_scale=value_scales,
    )  # fmt: skip


@operation("out")
def attention(
    step: TorchStep, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float,
    window: int, soft_cap: float, sinks: Tensor | None = None, alibi: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[num_tokens, num_heads · head_dim]"""
    mixed = paged_attention(
        query, key_cache, value_cache, step.layout, scale=scale, window=window or None,
        soft_cap=soft_cap or None, sinks=sinks, alibi=alibi, key_scale=key_scales,
        value_scale=value_scales, is_invariant=step.is_invariant,
    )  # fmt: skip
    return mixed.reshape(len(mixed), -1)


# -- experts -------------------------------------------------------------------------------------


@operation("experts", "weights")
def route(
    _: TorchStep, logits: Tensor, num_experts: int, experts_per_token: int, *, is_normalized: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    own = logits[:, :num_experts]
    own = own if bias is None else own + bias.float()
    return choose(own.contiguous(), experts_per_token, is_normalized=is_normalized)


@operation("slots", "places", "tiles")
def group_slots(
    _: TorchStep, experts: Tensor, num_experts: int
) -> tuple[SlotGroups, SlotGroups, SlotGroups]:
    """One object has what C keeps in several buffers."""
    groups = group(experts, num_experts)
    return groups, groups, groups


@operation("y")
def gather_slots(_: TorchStep, x: Tensor, slots: SlotGroups) -> Tensor:
    return x[slots.tokens]


@operation("y")
def experts_linear(_: TorchStep, x: Tensor, weights: Any, tiles: SlotGroups) -> Tensor:
    """weights: multiply, and add their biases (`ExpertMatrices.multiply`)."""
    product: Tensor = weights.multiply(x, tiles)
    return product


@operation("y")
def combine_slots(
    _: TorchStep, x: Tensor, places: SlotGroups, weights: Tensor, shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    others = None
    if shared is not None and shared_logits is not None:
        others = shared_logits[:, :1].sigmoid() * shared.float()
    return combine(x, places, weights, others)


# -- ranks ---------------------------------------------------------------------------------------


@operation("y")
def sum_ranks(_: TorchStep, parts: Tensor, ranks: Any) -> Tensor:
    """parts: this rank's (`Ranks`)."""
    total: Tensor = ranks.sum(parts)
    return total


@operation("y")
def gather_ranks(_: TorchStep, parts: Tensor, ranks: Any, size: int) -> Tensor:
    part_size = -(-size // ranks.size)
    padded = torch.nn.functional.pad(parts, (0, part_size - parts.shape[1])).contiguous()
    whole: Tensor = ranks.gather(padded)[:, :size].contiguous()
    return whole


@operation("y")
def query_key_squares(_: TorchStep, x: Tensor, query_size: int, key_size: int) -> Tensor:
    query, key, _values = _query_key(x.float(), query_size, key_size)
    return torch.stack((query.square().sum(dim=1), key.square().sum(dim=1)), dim=1)


@operation("y")
def query_key_norm(
    _: TorchStep, x: Tensor, parts: Tensor, ranks: Any, query_weight: Tensor, key_weight: Tensor,
    query_size: int, key_size: int, eps: float, offset: float,
) -> Tensor:  # fmt: skip
    # Ranks exchange numbers of the model's dtype; gathered, these stay what they are.
    squares = ranks.gather(parts.view(x.dtype)).view(torch.float32)
    totals = squares.view(-1, ranks.size, 2).sum(dim=1)
    *rows, values = _query_key(x, query_size, key_size)
    normed = []
    for number, (each, weight) in enumerate(zip(rows, (query_weight, key_weight), strict=True)):
        mean = totals[:, number, None] / (ranks.size * each.shape[1])
        y = each.float() * torch.rsqrt(mean + eps) * (weight.float() + offset)
        normed.append(y.to(x.dtype))
    return torch.cat((*normed, values), dim=1)


def _query_key(x: Tensor, query_size: int, key_size: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, values = torch.split(
        x, [query_size, key_size, x.shape[1] - query_size - key_size], dim=1
    )
    return query, key, values


@operation()
def send_rows(_: TorchStep, x: Tensor, ranks: Any) -> None:
    ranks.send(x)


@operation("y")
def receive_rows(step: TorchStep, ranks: Any, size: int) -> Tensor:
    """ranks: a link (`TorchLink`)."""
    received: Tensor = ranks.receive(len(step.token_ids), size)
    return received
