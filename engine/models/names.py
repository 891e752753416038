"""What a checkpoint calls the decoder's modules, and in which order it has their rows.

Most checkpoints name modules as Llama's do; a fused module of the decoder is several of those,
stacked in order. A family that has other names, or fuses more, says so as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.engine.layers.rotary import rotary_order
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.weights.checkpoint import Checkpoint

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_HEAD = "lm_head"
EACH_HEAD = "*"  # in a name, of a module for each head


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """The checkpoint's modules that make up one module of the decoder.

    Attributes:
        root: before all names but the head's.
        layers: before a layer's number.
        head: of the output head, without the root.
        others: root and head of older checkpoints.
        modules: other names than Llama's: of the decoder's modules, without root and layer, the
            checkpoint's. No name: the checkpoint has no such module, a norm, whose weights are 1.
        alternatives: a layer's modules → the checkpoint's, where its first layer has not the usual
            ones.
        is_by_head: queries, keys and values are fused head by head: the queries that share a key,
            the key, the value, then those of the next key head; not all queries first.
        is_transposed: matrices are stored [in_features, out_features].
    """

    root: str = "model."
    layers: str = "layers"
    head: str = _HEAD
    others: tuple[tuple[str, str], ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alternatives: Mapping[str, str] = field(default_factory=dict)
    is_by_head: bool = False
    is_transposed: bool = False

    def __call__(self, module: str) -> tuple[str, ...]:
        """`layers.3.self_attn.qkv_proj` → `("model.layers.3.self_attn.q_proj", …)`"""
        if module == _HEAD:
            return (self.head,)
        start, _, rest = module.partition(".")
        if start != "layers":
            return tuple(f"{self.root}{name}" for name in self.modules.get(module, (module,)))
        number, _, part = rest.partition(".")
        prefix = f"{self.root}{self.layers}.{number}."
        return tuple(f"{prefix}{name}" for name in self._in_layer(part))

    def _in_layer(self, part: str) -> tuple[str, ...]:
        if part in self.modules:
            return self.modules[part]
        parent, _, name = part.rpartition(".")
        (above,) = self.modules.get(parent, (parent,))
        return tuple(f"{above}.{each}" if above else each for each in _FUSED.get(name, (name,)))

    def found_in(self, checkpoint: Checkpoint) -> WeightNames:
        """The names in this checkpoint: some lack a part of the root, as the bare model's do."""
        for root, head in self.others:
            if f"{root}embed_tokens.weight" in checkpoint:
                return replace(self, root=root, head=head, others=()).found_in(checkpoint)
        short = replace(self, root=self.root.partition(".")[2])
        has_root, lacks_root = (
            f"{each('embed_tokens')[0]}.weight" in checkpoint for each in (self, short)
        )
        names = short if lacks_root and not has_root else self
        modules = dict(self.modules)
        for module, other in self.alternatives.items():
            if f"{names(f'layers.0.{module}')[0]}.weight" not in checkpoint:
                modules[module] = (other,)
        return replace(names, modules=modules)


LLAMA_NAMES = WeightNames()


def row_orders(names: WeightNames, config: DecoderConfig, module: str) -> tuple[Tensor | None, ...]:
    """For each of the checkpoint's modules that make up `module`: which of its rows is each row
    here, int64; None: they are in order.

    Adapters of these modules have their rows in the checkpoint's order, too.
    """
    parts = names(module)
    start, _, rest = module.partition(".")
    name = module.rpartition(".")[2]
    if start != "layers" or name not in ("qkv_proj", "q_norm", "k_norm"):
        return (None,) * len(parts)
    layer = int(rest.partition(".")[0])
    order = rotary_order(config.rope_of(layer), config.head_dim)
    queries, keys = (
        None if order is None else _of_heads(order, num_heads)
        for num_heads in (config.num_heads, config.num_kv_heads)
    )
    if name != "qkv_proj":
        whole = queries if name == "q_norm" else keys
        if order is None or config.qk_norm == "head":
            return (order,)
        return (whole,)
    if len(parts) == 3:
        return queries, keys, None
    return (_of_fused(names, config, queries, keys),)


def _of_heads(order: Tensor, num_heads: int) -> Tensor:
    return (torch.arange(num_heads)[:, None] * len(order) + order).flatten()


def _of_fused(
    names: WeightNames, config: DecoderConfig, queries: Tensor | None, keys: Tensor | None
) -> Tensor | None:
    """The order of rows of one module that has all of queries, keys and values."""
    num_kv_heads, size = config.num_kv_heads, config.head_dim
    group = config.num_heads // num_kv_heads
    rows = torch.arange((config.num_heads + 2 * num_kv_heads) * size)
    if names.is_by_head:
        by_head = rows.view(num_kv_heads, group + 2, size)
        parts = [by_head[:, :group], by_head[:, group], by_head[:, group + 1]]
    elif queries is None:
        return None
    else:
        sizes = [config.num_heads * size, num_kv_heads * size, num_kv_heads * size]
        parts = list(torch.split(rows, sizes))
    query, key, value = (each.reshape(-1) for each in parts)
    if queries is not None and keys is not None:
        query, key = query[queries], key[keys]
    return torch.cat((query, key, value))


def is_ignorable(tensor: str) -> bool:
    """Whether a checkpoint's tensor is redundant, since it follows from the config, or serves
    products in FP8 that there are not."""
    return tensor.endswith(
        ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias", ".q_scale")
    )
