"""Makes room for adapters in a model: in each layer that may have one, a place for every slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.errors import ConfigError
from penstock.engine.layers.linear import Linear
from penstock.engine.lora.layer_adapters import (
    CpuAdapters,
    CpuRows,
    LayerAdapters,
    LoraWeights,
    StepRows,
    TorchAdapters,
)
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import LoadedModel
from penstock.engine.models.names import WeightNames, row_orders
from penstock.engine.parallel.shard import Shard
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.weight_memory import WeightMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A layer with room for adapters.

    Attributes:
        modules: the checkpoint's names of its parts.
        row_orders: of each part, which of the checkpoint's rows is each row here; None: in order.
        shard: which part of the checkpoint's matrix it has; None: all.
    """

    modules: tuple[str, ...]
    row_orders: tuple[Tensor | None, ...]
    part_sizes: tuple[int, ...]
    in_features: int
    is_table: bool
    adapters: LayerAdapters
    shard: Shard | None = None

    def shapes(self) -> dict[str, tuple[int, int]]:
        """The sizes of each module in the checkpoint, by name: outputs and inputs."""
        sizes, size = self.part_sizes, self.in_features
        if self.shard is not None:
            sizes, size = self.shard.part_sizes, self.shard.in_features
        if len(self.modules) == 1:
            sizes = (sum(sizes),)
        return {name: (each, size) for name, each in zip(self.modules, sizes, strict=True)}

    def own(self, parts: Sequence[LoraWeights | None]) -> list[LoraWeights | None]:
        """What this layer has of the modules' updates."""
        shard = self.shard
        if shard is None:
            return list(parts)
        places = [None] if len(parts) == 1 else range(len(parts))
        return [
            part and LoraWeights(*shard.take_update(part.a, part.b, place), part.scale)
            for place, part in zip(places, parts, strict=True)
        ]


class AbsentLayer(LayerAdapters):
    """Stands for a layer that another stage has."""

    def pack(self, parts: Sequence[LoraWeights | None], _: WeightMemory) -> tuple[()] | None:
        return () if any(parts) else None

    def install(self, slot: int, packed: tuple[()] | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModel:
    """A model's layers with room for adapters.

    Attributes:
        rows: of each step, for all layers but the head.
        sampled_rows: for the head.
        roots: with what the names of those but the head may begin; the first is that of `layers`.
    """

    layers: Mapping[str, AdaptedLayer]  # by name; the embedding's is TABLE, the output head's HEAD
    rows: StepRows
    sampled_rows: StepRows
    dtype: torch.dtype
    device: torch.device
    roots: tuple[str, ...]


HEAD, TABLE = "lm_head", "embed_tokens"


def attach_lora_slots(
    model: LoadedModel,
    names: WeightNames,
    *,
    num_slots: int,
    max_rank: int,
    library: CpuLibrary | None,
) -> AdaptedModel:
    """Give each matrix of a decoder room for adapters; before its weights are packed.

    Args:
        names: as in `Architecture`.
        max_rank: the largest rank of an adapter.
        library: the CPU kernels, if they run the model.

    Raises:
        ConfigError: the model is of another kind.
    """
    if not isinstance(model, Decoder):
        raise ConfigError("--enable-lora: this model's architecture takes no adapters")
    rows, sampled_rows = (
        StepRows(num_slots) if library is None else CpuRows(num_slots, library) for _ in range(2)
    )
    layers: dict[str, AdaptedLayer] = {}

    def add(
        name: str,
        part_sizes: tuple[int, ...],
        in_features: int,
        rows: StepRows,
        *,
        is_table: bool = False,
        is_here: bool = True,
        shard: Shard | None = None,
    ) -> LayerAdapters:
        # PEFT has transformers' name of the head, whatever old checkpoints call it.
        modules = (HEAD,) if name == HEAD else names(name)
        if len(modules) == 1:  # one matrix in the checkpoint, too
            part_sizes = (sum(part_sizes),)
        room: dict[str, Any] = {"num_slots": num_slots, "max_rank": max_rank}
        adapters: LayerAdapters
        if not is_here:
            adapters = AbsentLayer()
        elif isinstance(rows, CpuRows):
            adapters = CpuAdapters(part_sizes, in_features, rows=rows, is_table=is_table, **room)
        else:
            like = torch.empty(0, dtype=model.dtype, device=model.device)
            adapters = TorchAdapters(part_sizes, in_features, rows=rows, like=like, **room)
        layers[name] = AdaptedLayer(
            modules=modules,
            row_orders=row_orders(names, model.whole_config, name),
            part_sizes=part_sizes,
            in_features=in_features,
            is_table=is_table,
            adapters=adapters,
            shard=shard,
        )
        return adapters

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            sizes, size = module.part_sizes, module.in_features
            module.adapters = add(name, sizes, size, rows, shard=module.shard)
    for name, absent in model.absent_matrices().items():
        if isinstance(absent, Linear):
            add(name, absent.part_sizes, absent.in_features, rows, is_here=False)
    config = model.config
    vocab_size, hidden_size = model.vocab_size, config.hidden_size
    table = add(
        TABLE, (hidden_size,), vocab_size, rows, is_table=True, is_here=config.has_embedding
    )
    if config.has_embedding:
        model.embed_tokens.adapters = table
    head = add(HEAD, (vocab_size,), hidden_size, sampled_rows, is_here=config.has_head)
    if config.has_head:
        model.head_adapters = head
    model.adapter_rows = rows
    return AdaptedModel(
        layers=layers,
        rows=rows,
        sampled_rows=sampled_rows,
        dtype=model.dtype,
        device=model.device,
        roots=(names.root, *(root for root, _ in names.others)),
    )
