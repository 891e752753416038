"""The matrices of a layer's experts, from a checkpoint.

Either each expert has modules of its own, in whatever format, or one tensor holds a projection of
all of them, which is dense, or blocks of a GGUF file:

    ….experts.7.gate_proj.weight [out, in]      ….experts.gate_up_proj [num_experts, out, in]
                                                ….input_linear.weight  [num_experts, out, in]
                                                blk.3.ffn_gate_exps.weight

gpt-oss has inputs before outputs, and gate and up in turns; or `….gate_up_proj_blocks` and
`….gate_up_proj_scales` in MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats import FORMATS, format_of, read_stacked
from penstock.engine.weights.matrix import (
    DenseMatrix,
    Matrix,
    QuantizedMatrix,
    StackedMatrix,
    concatenate,
    rows_of,
    stack,
)

# Names of modules in the checkpoint, and their matrices: the parts of one expert's matrix.
NamedParts = tuple[tuple[str, ...], tuple[Matrix, ...]]


class CheckpointExperts:
    """One projection of a layer's experts.

    Its tensors count as read from now on, until they are.

    Args:
        module: of the decoder: the projection is its last name.
        names: of the modules in the checkpoint that make up one expert's, without its number.
        part_sizes: outputs of each.
        is_transposed: the tensors are as gpt-oss's.

    Attributes:
        names: of each expert's modules.
        num_bytes: of the tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: str,
        names: Sequence[str],
        *,
        num_experts: int,
        part_sizes: Sequence[int],
        in_features: int,
        is_transposed: bool,
    ) -> None:
        self._checkpoint, self._part_sizes = checkpoint, tuple(part_sizes)
        self._num_experts, self._in_features = num_experts, in_features
        parent, projection = names[0].rpartition(".")[0], module.rpartition(".")[2]
        wholes = (f"{parent}.{projection}", f"{names[0]}.weight")
        self._wholes: tuple[str, ...] = tuple(name for name in wholes if name in checkpoint)[:1]
        self._is_transposed, self._stem = is_transposed, wholes[0]
        self._order: Tensor | None = None  # of an expert's rows
        self._biases: tuple[str, ...] = (f"{self._stem}_bias",)
        if checkpoint.stacks_experts:
            self._wholes = tuple(f"{name}.weight" for name in names)
            self._biases = tuple(f"{name}.bias" for name in names)
        elif is_transposed:
            self._wholes, names = (self._stem,), (self._stem,)
            self._part_sizes = (sum(part_sizes),)
            if len(part_sizes) > 1:  # their outputs take turns
                self._order = torch.arange(sum(part_sizes)).view(-1, len(part_sizes)).T.flatten()
        elif self._wholes:
            self._part_sizes = (sum(part_sizes),)
            names = (f"{parent}.{projection}",)
        self.names = [numbered(names, expert) for expert in range(num_experts)]
        own = {*self._wholes, f"{self._stem}_blocks", f"{self._stem}_scales"}
        own = {name for name in own if name in checkpoint}
        if not self._wholes:
            lasts = (name.rpartition(".")[2] for name in names)
            own = {name for last in lasts for name in _of(checkpoint, parent, last)}
        self.num_bytes = sum(map(checkpoint.num_bytes, own))
        self._tensors = frozenset(checkpoint.unread)
        checkpoint.ignore(*own)
        self._tensors -= checkpoint.unread

    def read(self) -> Iterator[NamedParts]:
        """Expert by expert.

        Raises:
            ModelLoadError: names the tensor that is missing, or wrong, or of no expert.
        """
        checkpoint = self._checkpoint
        checkpoint.unread |= self._tensors
        read_parts = self._parts_of_wholes if self._wholes else self._parts_of_modules
        yield from zip(self.names, read_parts(), strict=True)
        surplus = checkpoint.unread & self._tensors
        if surplus:
            raise ModelLoadError(
                f"{checkpoint.path}: {len(surplus)} tensors belong to no expert of the "
                f"{self._num_experts} that config.json says, such as {min(surplus)}"
            )

    def _parts_of_modules(self) -> Iterator[tuple[Matrix, ...]]:
        read_matrix = FORMATS[format_of(self._checkpoint)]
        shapes = [(size, self._in_features) for size in self._part_sizes]
        for names in self.names:
            yield tuple(map(read_matrix, repeat(self._checkpoint), names, shapes))

    def _parts_of_wholes(self) -> Iterator[tuple[Matrix, ...]]:
        wholes = list(map(self._read_whole, self._wholes, self._part_sizes))
        for expert in range(self._num_experts):
            yield tuple(map(self._rows_of, wholes, repeat(expert), self._part_sizes))

    def _read_whole(self, name: str, size: int) -> Matrix:
        """All experts' rows."""
        shape = (self._num_experts, size, self._in_features)
        return read_stacked(self._checkpoint, name, shape, is_transposed=self._is_transposed)

    def _rows_of(self, whole: Matrix, expert: int, size: int) -> Matrix:
        """One expert's."""
        start = expert * size
        rows = slice(start, start + size) if self._order is None else self._order + start
        return rows_of(whole, rows)

    def read_bias(self) -> Tensor:
        """[num_experts, outputs]"""
        values = torch.cat(
            [
                self._checkpoint.read(name, (self._num_experts, size))
                for name, size in zip(self._biases, self._part_sizes, strict=True)
            ],
            dim=1,
        )
        return values if self._order is None else values[:, self._order]


class DummyExperts:
    """Experts of random numbers: those of one expert, whose rows each other expert has in another
    order, since drawing and rounding billions takes minutes.

    Args:
        draw: gives one expert's matrix.
        quantize: as a `Quantizer`.
    """

    num_bytes = 0

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_experts: int,
        part_sizes: Sequence[int],
        draw: Callable[[], Tensor],
        quantize: Callable[[Sequence[str], Sequence[Matrix]], Matrix],
    ) -> None:
        self.names = [numbered(names, expert) for expert in range(num_experts)]
        self._part_sizes, self._draw, self._quantize = list(part_sizes), draw, quantize

    def read(self) -> Iterator[NamedParts]:
        parts = torch.split(self._draw(), self._part_sizes)
        first = [
            self._quantize((name,), (DenseMatrix(part),))
            for name, part in zip(self.names[0], parts, strict=True)
        ]
        for expert, names in enumerate(self.names):
            yield names, tuple(_rolled(part, expert) for part in first)


def numbered(names: Sequence[str], expert: int) -> tuple[str, ...]:
    """`….experts.gate_proj` → `….experts.7.gate_proj`"""
    parts = (name.rpartition(".") for name in names)
    return tuple(f"{parent}.{expert}.{last}" for parent, _, last in parts)


def _of(checkpoint: Checkpoint, parent: str, last: str) -> Iterator[str]:
    """The tensors of `parent.<number>.last`."""
    for name in checkpoint.within(f"{parent}."):
        number, _, rest = name.removeprefix(f"{parent}.").partition(".")
        if number.isdigit() and rest.startswith(f"{last}."):
            yield name


def stack_experts(matrices: Sequence[Matrix], like: Tensor) -> tuple[Matrix, Tensor | None]:
    """The experts' matrices as one with one layout, dense if there is none for all.

    Args:
        like: as in `stack`.

    Returns:
        The matrix, and the order of each expert's inputs, int64 [num_experts, in_features], if it
        is not that of the columns.
    """
    plain, orders = list(matrices), None
    if any(isinstance(each, QuantizedMatrix) and each.permutation is not None for each in matrices):
        plain = [
            replace(each, permutation=None) if isinstance(each, QuantizedMatrix) else each
            for each in matrices
        ]
        orders = torch.stack([_order(each) for each in matrices])
    whole = stack(plain, like)
    if isinstance(whole, StackedMatrix) or (isinstance(whole, DenseMatrix) and orders is not None):
        values = concatenate([each.dequantize() for each in matrices], like)
        return DenseMatrix(values), None
    return whole, orders


def _order(matrix: Matrix) -> Tensor:
    if isinstance(matrix, QuantizedMatrix) and matrix.permutation is not None:
        return matrix.permutation
    return torch.arange(matrix.dequantize().shape[1])


def _rolled(matrix: Matrix, num_rows: int) -> Matrix:
    """The rows of a matrix, starting with another one."""
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.values.roll(num_rows, 0))
    assert isinstance(matrix, QuantizedMatrix), "one part is one matrix"
    scales, _ = matrix.block_values()
    codes = matrix.codes.roll(num_rows, 0)
    return replace(matrix, codes=codes, scales=scales.roll(num_rows, 0), rows_per_scale=1)
