"""What weights a model has: one declaration for each of its modules.

A layer declares its sizes, the rank's share and whether its matrix may be quantized
(`MatrixLayer`); `WeightNames` add what a checkpoint calls it and in which order it has the rows.
Loading from every format, ranks, stages, conversion and `penstock models` read the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.engine.layers.experts import ExpertMatrices
from penstock.engine.layers.linear import Linear, MatrixLayer
from penstock.engine.layers.norm import HeadNorm
from penstock.engine.models.decoder import PositionTable, SelfAttention
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.names import EACH_HEAD, WeightNames, row_orders
from penstock.engine.parallel.shard import Shard
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.experts import numbered
from penstock.engine.weights.formats import read_module
from penstock.engine.weights.matrix import Matrix, rows_of

ModuleNames: TypeAlias = Callable[[str], tuple[str, ...]]
"""A module of a model → the checkpoint's modules that it is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Those of one module.

    Attributes:
        name: of the module.
        sources: the checkpoint's modules of which it is made, from top to bottom; none: the
            checkpoint has no such module, a norm, whose weights are 1.
        orders: of each source, which of its rows is each row here, int64; None: they are in order.
        is_transposed: a checkpoint has its matrix as [in_features, out_features].
    """

    name: str
    module: nn.Module
    sources: tuple[str, ...]
    orders: Sequence[Tensor | None]
    is_transposed: bool = False

    @property
    def shard(self) -> Shard | None:
        """What of the whole this rank has; None: all."""
        shard: Shard | None = getattr(self.module, "shard", None)
        return shard

    @property
    def sizes(self) -> list[int]:
        """How many rows of a matrix each source has; of experts, those of one."""
        assert isinstance(self.module, MatrixLayer)
        part_sizes, _ = self.module.whole_shape
        return [sum(part_sizes)] if len(self.sources) == 1 else list(part_sizes)

    @property
    def by_expert(self) -> list[tuple[str, ...]]:
        """The sources of each expert; of what has no experts, of one."""
        if not isinstance(self.module, ExpertMatrices):
            return [self.sources]
        return [numbered(self.sources, expert) for expert in range(self.module.num_experts)]

    def read_matrix(self, checkpoint: Checkpoint) -> list[Matrix]:
        """The matrix of each source, in whatever format.

        Raises:
            ModelLoadError: names a tensor that is missing, or has another shape or dtype.
        """
        assert isinstance(self.module, MatrixLayer)
        _, in_features = self.module.whole_shape
        parts = []
        for source, size, order in zip(self.sources, self.sizes, self.orders, strict=True):
            shape = (size, in_features)
            part = read_module(checkpoint, source, shape, is_transposed=self.is_transposed)
            parts.append(part if order is None else rows_of(part, order))
        return parts

    def read_others(self, checkpoint: Checkpoint) -> Iterator[tuple[str, list[Tensor]]]:
        """All parameters besides the matrix: their names, and their parts to be concatenated.

        Raises:
            ModelLoadError: as `read_matrix`.
        """
        has_matrix = isinstance(self.module, MatrixLayer)
        for kind, parameter in self.module.named_parameters(recurse=False):
            if has_matrix and kind == "weight":
                continue
            if has_matrix:
                parts = [
                    checkpoint.read(f"{source}.{kind}", (size,))
                    for source, size in zip(self.sources, self.sizes, strict=True)
                ]
            else:
                shape = tuple(parameter.shape) if self.shard is None else self.shard.part_sizes
                parts = [self._read_vector(checkpoint, kind, shape)]
            parts = [
                part if order is None else part[order]
                for part, order in zip(parts, self.orders or (None,), strict=True)
            ]
            yield kind, parts if self.shard is None else [self.shard.take_bias(torch.cat(parts))]

    def _read_vector(self, checkpoint: Checkpoint, kind: str, shape: tuple[int, ...]) -> Tensor:
        """What belongs to no matrix."""
        if not self.sources:
            return torch.ones(shape)
        ((source,), module) = self.sources, self.module
        if isinstance(module, HeadNorm):
            num_heads = module.num_groups * shape[0] // len(module.weight)
            return _read_head_norm(checkpoint, source, kind, num_heads, shape[0])
        if isinstance(module, PositionTable):
            name, first = f"{source}.{kind}", module.first_position
            return checkpoint.read(name, (first + shape[0], shape[1]))[first:]
        return checkpoint.read(f"{source}.{kind}", shape)


def _read_head_norm(
    checkpoint: Checkpoint, source: str, kind: str, num_heads: int, size: int
) -> Tensor:
    """The weights of each head: in a tensor for each, in one for all, or the same for all."""
    head_dim = size // num_heads
    name = f"{source}.{kind}"
    if EACH_HEAD in source and name not in checkpoint:
        names = [name.replace(EACH_HEAD, str(head)) for head in range(num_heads)]
        return torch.cat([checkpoint.read(each, (head_dim,)) for each in names])
    if name in checkpoint and checkpoint.shape(name) == (head_dim,):
        return checkpoint.read(name, (head_dim,)).repeat(num_heads)
    return checkpoint.read(name, (num_heads, head_dim)).flatten()


def declare(
    model: nn.Module, names: ModuleNames, config: DecoderConfig | None = None
) -> list[Parameters]:
    """The parameters of each module that has some, in the order of the modules; those of attention
    too, of which a checkpoint may have the scales of a cache.

    Args:
        names: the checkpoint's; `WeightNames` for a decoder.
        config: of a whole decoder, whose rotary positions decide the order of rows; None: all rows
            are in order.
    """
    found = []
    for name, module in model.named_modules():
        if (
            isinstance(module, SelfAttention)
            or next(module.parameters(recurse=False), None) is not None
        ):
            sources = names(name)
            orders: Sequence[Tensor | None] = (None,) * len(sources)
            is_transposed = getattr(module, "is_transposed", False)
            if isinstance(names, WeightNames):
                is_transposed = names.is_transposed and isinstance(module, Linear)
                orders = orders if config is None else row_orders(names, config, name)
            found.append(
                Parameters(
                    name=name, module=module, sources=sources, orders=orders,
                    is_transposed=is_transposed,
                )
            )  # fmt: skip
    return found
