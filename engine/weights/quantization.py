"""Quantization at load: what `--quantization` makes of the matrices of a dense checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.weights.calibrated_rounding import (
    fit_blocks,
    nearest_codes,
    round_columns,
    shorten,
)
from penstock.engine.weights.converted import ConvertedMatrices
from penstock.engine.weights.matrix import (
    BLOCK,
    CODE_KINDS,
    DenseMatrix,
    Matrix,
    QuantizedMatrix,
    join,
    stack,
)
from penstock.kernels.quantized_codes import BYTE

_NUM_VALUES = 1 << 17  # at once: their copies in float32 stay in the cache
_SMALL_COLUMN = 32.0  # times smaller than the median: its codes would be zeros beside the others
# Modules that `int4` gives 8 bits: errors in values and logits cost the most for their bytes.
_EIGHT_BITS = ("*.v_proj", "lm_head", "embed_out")


def _to_int8(rows: Tensor) -> QuantizedMatrix:
    blocks = _blocks(rows, BLOCK)
    scales = shorten(blocks.abs().amax(2, keepdim=True) / BYTE)
    codes = (blocks / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-BYTE, BYTE)
    scales[~blocks.isfinite().all(2)] = torch.nan
    return _joined(codes.to(torch.int8), scales.squeeze(2), rows)


def _to_int4(rows: Tensor) -> QuantizedMatrix:
    """A scale and an offset for each block, with the least squared error, weighted by the numbers'
    squares, since large ones matter more."""
    blocks = _blocks(rows, BLOCK)
    # Exactly, to numbers around 1: errors are of their fourth power.
    exponent = torch.frexp(blocks.abs().amax(2, keepdim=True)).exponent.clamp(-100, 100)
    blocks = torch.ldexp(blocks, -exponent)
    flat = blocks.flatten(0, 1)
    scales, offsets = fit_blocks(flat, flat.square())
    codes = nearest_codes(flat, scales, offsets).to(torch.uint8).view_as(blocks)
    scales, offsets = (torch.ldexp(each.view_as(exponent), exponent) for each in (scales, offsets))
    scales[~blocks.isfinite().all(2)] = torch.nan
    return _joined(codes, scales.squeeze(2), rows, offsets.squeeze(2))


def _blocks(rows: Tensor, size: int) -> Tensor:
    """float32 [num_rows, blocks, size], with zeros past the end"""
    padded = F.pad(rows.float(), (0, -rows.shape[1] % size))
    return padded.view(len(rows), -1, size)


def _joined(
    codes: Tensor, scales: Tensor, rows: Tensor, offsets: Tensor | None = None
) -> QuantizedMatrix:
    """The matrix of such blocks of rows."""
    whole = codes.flatten(1)[:, : rows.shape[1]].contiguous()
    return QuantizedMatrix(
        codes=whole, scales=scales, offsets=offsets, columns_per_scale=codes.shape[2]
    )


def _to_fp8(rows: Tensor) -> QuantizedMatrix:
    """A scale for each row."""
    rows = rows.float()
    scales = rows.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (rows / scales).nan_to_num(nan=0.0).to(torch.float8_e4m3fn)
    return QuantizedMatrix(codes=codes, scales=scales, columns_per_scale=rows.shape[1])


_ROUND: dict[Quantization, Callable[[Tensor], QuantizedMatrix]] = {
    "int8": _to_int8,
    "int4": _to_int4,
    "fp8": _to_fp8,
}


class LostCodesError(ModelLoadError):
    """Codes that had been chosen are gone or damaged."""


@dataclass(slots=True)
class Quantizer:
    """Makes one matrix of a layer's parts.

    Args:
        default: of modules that no rule names.
        rules: the quantization of modules by patterns of their names, as in a shell; the first that
            matches counts.
        kept: where to look for, and put, what was quantized.

    Attributes:
        aliases: second names of modules.
        unused: patterns that no module matched so far.
        calibrated: modules whose codes have been chosen by their inputs, and are kept.
    """

    default: Quantization = "none"
    rules: Mapping[str, Quantization] = field(default_factory=dict)
    kept: ConvertedMatrices | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    unused: set[str] = field(init=False)
    calibrated: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unused = set(self.rules)

    @property
    def wants_inputs(self) -> bool:
        """Whether some codes are to be chosen by what the modules read."""
        return self.kept is not None and "int4" in (self.default, *self.rules.values())

    def __call__(
        self, names: Sequence[str], parts: Sequence[Matrix], like: Tensor, *,
        may_scale_columns: bool = False,
    ) -> Matrix:  # fmt: skip
        """
        Args:
            may_scale_columns: as in `quantize_rows`.
            names: of the modules in the checkpoint that the parts are; matched by the patterns.
            like: has the device and the dtype of the model.
        """
        made = [
            self._part(name, part, like, may_scale_columns=may_scale_columns)
            for name, part in zip(names, parts, strict=True)
        ]
        return stack(made, like)

    def kind(self, name: str) -> Quantization:
        """What a module becomes; the pattern that says so has been used."""
        modules = (name, self.aliases.get(name, name))
        matched = [
            pattern for pattern in self.rules if any(_matches(each, pattern) for each in modules)
        ]
        self.unused.difference_update(matched)
        if matched:
            return self.rules[matched[0]]
        needs_more = any(fnmatchcase(each, rule) for each in modules for rule in _EIGHT_BITS)
        return "int8" if self.default == "int4" and needs_more else self.default

    def check_patterns(self) -> None:
        """
        Raises:
            ConfigError: a pattern matched nothing.
        """
        if self.unused:
            pattern = min(self.unused)
            is_excluded = self.rules[pattern] == "none"
            flag = "exclude" if is_excluded else "override"
            raise ConfigError(f"--quantization-{flag} {pattern} matches no module")

    def _part(self, name: str, part: Matrix, like: Tensor, *, may_scale_columns: bool) -> Matrix:
        kind = self.kind(name)
        if kind == "none" or not isinstance(part, DenseMatrix):
            return part
        kept = self.kept
        found = None if kept is None else kept.find(name, kind, part.values.shape)
        if found is not None:
            return found
        if kept is not None and name in self.calibrated:
            kept.forget(kind)
            raise LostCodesError(name)
        made = quantize_rows(part.values, kind, like, may_scale_columns=may_scale_columns)
        if kept is not None:
            kept.add(name, kind, made)
        return made


def _matches(name: str, pattern: str) -> bool:
    """Whether it is the module, or contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def num_bytes(kind: Quantization, out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """How many bytes a matrix in `dtype` has after its quantization to `kind`: codes and scales,
    which kernels keep in half precision in a model of 16 bits, unless there is one for a row."""
    if kind == "none":
        return out_features * in_features * dtype.itemsize
    bits, _, block, has_offsets = CODE_KINDS[kind]
    num_scales = out_features * -(-in_features // (block or in_features)) * (1 + has_offsets)
    scale_bytes = 4 if block is None else dtype.itemsize
    return out_features * in_features * bits // 8 + num_scales * scale_bytes


def quantize_rows(
    values: Tensor,
    kind: Quantization,
    like: Tensor,
    second_moments: Tensor | None = None,
    *,
    may_scale_columns: bool = False,
) -> QuantizedMatrix:
    """values [out_features, in_features], rounded to the dtype of `like` first.

    Args:
        second_moments: of the inputs, as in `round_columns`; 4 bits are chosen by them.
        may_scale_columns: give columns that are far smaller than the others a factor, so that they
            keep their bits: what they multiply may be as much larger.
    """
    factors = _column_factors(values) if may_scale_columns and kind != "fp8" else None
    if factors is not None:
        values = values / factors.to(values)
        if second_moments is not None:
            second_moments = second_moments * factors * factors[:, None]
    matrix = _rounded(values, kind, like, second_moments)
    return matrix if factors is None else replace(matrix, column_factors=factors)


def _rounded(
    values: Tensor, kind: Quantization, like: Tensor, second_moments: Tensor | None
) -> QuantizedMatrix:
    if kind == "int4" and second_moments is not None:
        exact = values.to(like.dtype).float()
        if exact.isfinite().all() and second_moments.isfinite().all():
            codes, scales, offsets = round_columns(exact, second_moments, BLOCK)
            return QuantizedMatrix(
                codes=codes, scales=scales, offsets=offsets, columns_per_scale=BLOCK
            )
    size = values.shape[1]
    parts = [  # a few rows at a time
        _ROUND[kind](rows.to(like.dtype))
        for rows in torch.split(values, max(1, _NUM_VALUES // size))
    ]
    return join(parts)


def _column_factors(values: Tensor) -> Tensor | None:
    """Powers of two, float32 [in_features], that bring columns to the median of all; ones for
    those that are not `_SMALL_COLUMN` times smaller. None: all are ones."""
    largest = values.abs().amax(0).float()
    ratio = largest / largest.median()
    is_small = (ratio > 0) & (ratio < 1 / _SMALL_COLUMN)
    if not is_small.any():
        return None
    return torch.where(is_small, torch.exp2(ratio.log2().round_()).clamp_(min=2.0**-14), 1.0)
