"""GGUF, llama.cpp's format: matrices in blocks of one of its types, by `ggml-quants.c`.

`gguf.directory` wrote the directory: links to the files, and an index of their tensors, which also
says what transformers calls these, and in which order it has their rows. A block's scale times a
sub-block's is a scale of ours, so that K-quants become affine blocks of 16 or 32 columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.model_files.gguf.architectures import ROPE_TENSORS
from penstock.engine.model_files.json_file import (
    GGUF_FILE,
    GGUF_INDEX,
    check_file,
    gguf_part,
    read_json,
)
from penstock.engine.weights.checkpoint import FLOATS, Checkpoint
from penstock.engine.weights.formats.packing import FP4, e8m0
from penstock.engine.weights.matrix import DenseMatrix, Matrix, QuantizedMatrix

_ALIGNMENT = 4  # of the largest numbers
_NUM_ROWS = 1024  # that are decoded at once
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file by the names that they have in safetensors.

    Raises:
        ModelLoadError: the index or the file is missing, or too short.
    """

    stacks_experts = True

    def __init__(self, path: Path) -> None:
        # Not by the base class, which opens safetensors.
        self._sorted = []
        self.path, self.config = path, read_model_fields(path)
        self._index = ConfigFields(read_json(path / GGUF_INDEX), path=path / GGUF_INDEX)
        self._tensors = self._index.section("tensors")
        self._parts = [
            _mapped(path / gguf_part(number))
            for number in range(self._index.integer("num_parts", 1))
        ]
        self._layers = self._index.text("layers")
        self._names: dict[str, str] = self._index.raw("names") or {}
        self._own_names = {stored: name for name, stored in reversed(self._names.items())}
        self._norm_offset = self._index.number("norm_offset", 0.0, minimum=0.0)
        self.unread = set(self._tensors) - set(ROPE_TENSORS)  # which are in the config

    def read(
        self, name: str, shape: tuple[int, ...], *, dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        """A tensor that is not quantized."""
        rows, kind = self.rows(name, shape)
        if kind not in dtypes:
            raise self.fault(name, f"is {kind}; supported: {', '.join(dtypes)}")
        values = rows.view(_DTYPES[kind]).view(shape)
        if self._norm_offset and name.endswith("norm.weight"):
            values = values.float() - self._norm_offset
        return values

    def shape(self, name: str, *, num_dims: int | None = None) -> tuple[int, ...]:
        shape = self._entry(name).integers("shape")
        if num_dims not in (None, len(shape)):
            raise self.fault(name, f"has shape {list(shape)}, expected {num_dims} dimensions")
        return shape

    def rows(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, str]:
        """The bytes of a tensor's rows, [rows, bytes], in the order of transformers, and its type.
        Of a vector a number is a row, if transformers has them in another order."""
        stored, tensor = self.stored_name(name), self._entry(name)
        found = tensor.integers("shape")
        if found != shape and (1, *found) != shape:
            raise self.fault(name, f"has shape {list(found)}, expected {list(shape)} by its config")
        part = self._parts[tensor.integer("part", 0, minimum=0, maximum=len(self._parts) - 1)]
        start = tensor.integer("offset", minimum=0, maximum=1 << 62)
        size = tensor.integer("size", maximum=1 << 62)
        if start + size > len(part):
            raise self.fault(name, "ends after the file")
        if start % _ALIGNMENT:
            raise self.fault(name, f"begins at byte {start}, no multiple of {_ALIGNMENT}")
        self.unread.discard(stored)
        order = self._order(name, shape[0])
        num_rows = math.prod(shape[:-1]) if order is None or len(shape) > 1 else shape[0]
        rows = part[start : start + size].view(num_rows, -1)
        return rows if order is None else rows[order], tensor.text("type")

    def _order(self, name: str, num_rows: int) -> Tensor | None:
        """Which stored row is each row of transformers'; None: they are in the same order."""
        order, module = self._index.text("order", ""), name.rpartition(".")[0]
        part = self._names.get(module.removeprefix(self._layers).partition(".")[2])
        if order == "interleaved" and part in ("attn_q", "attn_k"):
            heads = self._index.integers("heads")
            return _order_of_halves(num_rows, heads[0] if part == "attn_q" else heads[1])
        if order == "by head" and part == "attn_qkv":
            return _order_by_head(num_rows, *self._index.integers("heads"))
        return None

    def _entry(self, name: str) -> ConfigFields:
        stored = self.stored_name(name)
        if stored not in self._tensors:
            raise ModelLoadError(f"{self.path / GGUF_FILE}: the file has no tensor {stored}")
        return self._tensors.section(stored)

    def stored_name(self, name: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`"""
        start, name = ("", name)
        if name.startswith(self._layers):
            layer, _, name = name.removeprefix(self._layers).partition(".")
            start = f"blk.{layer}."
        if name in self._names:
            return start + self._names[name]
        module, _, kind = name.rpartition(".")
        return f"{start}{self._names.get(module, module)}.{kind}"

    def _name(self, stored: str) -> str:
        """The other way round."""
        start, rest = "", stored
        if stored.startswith("blk."):
            layer, _, rest = stored.removeprefix("blk.").partition(".")
            start = f"{self._layers}{layer}."
        module, _, kind = rest.rpartition(".")
        return f"{start}{self._own_names.get(module, module)}.{kind}"

    def check_all_read(self, is_redundant: Callable[[str], bool]) -> None:
        self.unread = {each for each in self.unread if not is_redundant(self._name(each))}
        super().check_all_read(lambda _: False)

    def check_types(self) -> None:
        """
        Raises:
            ModelLoadError: a tensor has a type that is not supported.
        """
        for stored in sorted(self.unread):
            kind = self._tensors.section(stored).text("type", "F32")
            if kind not in _DTYPES and kind not in _TYPES:
                raise self._of_wrong_type(stored, kind)

    def _of_wrong_type(self, stored: str, kind: str) -> ModelLoadError:
        supported = ", ".join((*_DTYPES, *_TYPES))
        return ModelLoadError(
            f"{self.path / GGUF_FILE}: tensor {stored} is {kind}; supported: {supported}"
        )

    @property
    def types(self) -> tuple[str, ...]:
        """Those that a tenth of the bytes or more have, the largest first."""
        sizes: Counter[str] = Counter()
        for tensor in map(self._tensors.section, self._tensors):
            sizes[tensor.text("type")] += tensor.integer("size", maximum=1 << 62)
        return tuple(kind for kind, size in sizes.most_common() if 10 * size >= sizes.total())

    def num_bytes(self, name: str) -> int:
        return self._entry(name).integer("size", maximum=1 << 62)

    def ignore(self, *names: str) -> None:
        super().ignore(*map(self.stored_name, names))

    def fault(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path / GGUF_FILE}: tensor {self.stored_name(name)} {what}")

    def __contains__(self, name: str) -> bool:
        return self.stored_name(name) in self._tensors


def _mapped(file: Path) -> Tensor:
    check_file(file)
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def read_gguf(checkpoint: Checkpoint, prefix: str, shape: tuple[int, ...]) -> Matrix:
    """shape: of a matrix, or of as many as the first number says, one below the other."""
    assert isinstance(checkpoint, GgufCheckpoint)
    rows, kind = checkpoint.rows(f"{prefix}.weight", shape)
    if kind in _DTYPES:
        return DenseMatrix(rows.view(_DTYPES[kind]).view(-1, shape[-1]))
    return _TYPES[kind].decode(rows)


def _order_of_halves(num_rows: int, num_heads: int) -> Tensor:
    """Which stored row is each row of ours."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _order_by_head(num_rows: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """The order of rows where the file has all queries, all keys, all values, and each key head's
    belong together here."""
    group = num_heads // num_kv_heads
    rows = torch.arange(num_rows).view((group + 2) * num_kv_heads, -1)
    parts = torch.split(rows, [num_heads, num_kv_heads, num_kv_heads])
    by_head = [part.view(num_kv_heads, -1, rows.shape[1]) for part in parts]
    return torch.cat(by_head, dim=1).flatten()


# Codes, scales and offsets of blocks [num_blocks, bytes].
Decoded = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Type:
    """A kind of blocks.

    Attributes:
        decode_blocks: gives codes [num_blocks, num_columns], scales and offsets
            [num_blocks, num_columns / columns_per_scale].
    """

    num_bytes: int
    columns_per_scale: int
    decode_blocks: Callable[[Tensor], Decoded]
    codebook: Tensor | None = None

    def decode(self, rows: Tensor) -> QuantizedMatrix:
        """rows: uint8 [num_rows, bytes]"""
        parts = list(self._parts(rows))
        codes, scales, _ = zip(*parts, strict=True)
        offsets = [part[2] for part in parts if part[2] is not None]
        return QuantizedMatrix(
            codes=_below_each_other(codes),
            scales=_below_each_other(scales),
            offsets=_below_each_other(offsets) if offsets else None,
            codebook=self.codebook,
            columns_per_scale=self.columns_per_scale,
        )

    def _parts(self, rows: Tensor) -> Iterator[Decoded]:
        for part in torch.split(rows, _NUM_ROWS):
            decoded = self.decode_blocks(part.reshape(-1, self.num_bytes))
            codes, scales, offsets = (
                None if each is None else each.reshape(len(part), -1) for each in decoded
            )
            assert codes is not None
            assert scales is not None
            yield codes.contiguous(), scales, offsets


def _below_each_other(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _half(blocks: Tensor, start: int) -> Tensor:
    """float32 [num_blocks, 1]"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(values: Tensor, bits: int, width: int) -> Tensor:
    """The fields of so many bits in bytes: of each `width` bytes first the lowest of all, then the
    next; uint8 [num_blocks, -1, fields, width]"""
    at_once = 8 if width % 8 == 0 else 1  # bytes: as one number, where its bits stay theirs
    mask = int.from_bytes(bytes([(1 << bits) - 1] * at_once), "little")
    numbers = values.clone(memory_format=torch.contiguous_format)
    numbers = numbers.view(torch.int64 if at_once == 8 else torch.uint8)
    numbers = numbers.view(len(values), -1, width // at_once)
    fields = numbers.new_empty(*numbers.shape[:2], 8 // bits, numbers.shape[2])
    for number, field in enumerate(fields.unbind(2)):
        torch.bitwise_right_shift(numbers, number * bits, out=field)
    return fields.bitwise_and_(mask).view(torch.uint8)


def _q4(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, -16:], 4, 16).flatten(1)


def _q5(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, -20:-16], 1, 1).flatten(1)
    return _q4(blocks) | high << 4


def _decode_q4_0(blocks: Tensor) -> Decoded:
    return _q4(blocks).view(torch.int8) - 8, _half(blocks, 0), None


def _decode_q4_1(blocks: Tensor) -> Decoded:
    return _q4(blocks), _half(blocks, 0), -_half(blocks, 2)


def _decode_q5_0(blocks: Tensor) -> Decoded:
    return _q5(blocks).view(torch.int8) - 16, _half(blocks, 0), None


def _decode_q5_1(blocks: Tensor) -> Decoded:
    return _q5(blocks), _half(blocks, 0), -_half(blocks, 2)


def _decode_q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _decode_iq4_nl(blocks: Tensor) -> Decoded:
    return _q4(blocks), _half(blocks, 0), None


def _decode_iq4_xs(blocks: Tensor) -> Decoded:
    low = _fields(blocks[:, 4:8], 4, 1).flatten(1)
    high = _fields(blocks[:, 2:4], 2, 1).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return _fields(blocks[:, 8:], 4, 16).flatten(1), _half(blocks, 0) * scales, None


def _decode_mxfp4(blocks: Tensor) -> Decoded:
    return _q4(blocks), e8m0(blocks[:, :1]), None


def _decode_q2_k(blocks: Tensor) -> Decoded:
    scales, least = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _fields(blocks[:, 16:80], 2, 32).flatten(1)
    return codes, _half(blocks, 80) * scales, _half(blocks, 82) * least


def _decode_q3_k(blocks: Tensor) -> Decoded:
    low = _fields(blocks[:, 32:96], 2, 32).flatten(1)
    high = _fields(blocks[:, :32], 1, 32).flatten(1)
    codes = (low | high << 2).view(torch.int8) - 4
    scales = _fields(blocks[:, 96:104], 4, 8).flatten(1)
    scales = scales | _fields(blocks[:, 104:108], 2, 4).flatten(1) << 4
    return codes, _half(blocks, 108) * (scales.view(torch.int8) - 32), None


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K, float32 [num_blocks, 8]: of 6 bits each in 12 bytes."""
    scales, least, high = (blocks[:, start : start + 4] for start in (4, 8, 12))
    first = torch.cat([scales & 63, (high & 15) | (scales >> 2 & 48)], dim=1)
    second = torch.cat([least & 63, (high >> 4) | (least >> 2 & 48)], dim=1)
    return _half(blocks, 0) * first, _half(blocks, 2) * second


def _decode_q4_k(blocks: Tensor) -> Decoded:
    return _fields(blocks[:, 16:], 4, 32).flatten(1), *_scales_of_k(blocks)


def _decode_q5_k(blocks: Tensor) -> Decoded:
    high = _fields(blocks[:, 16:48], 1, 32).flatten(1)
    return _fields(blocks[:, 48:], 4, 32).flatten(1) | high << 4, *_scales_of_k(blocks)


def _decode_q6_k(blocks: Tensor) -> Decoded:
    low = _fields(blocks[:, :128], 4, 64).flatten(1)
    high = _fields(blocks[:, 128:192], 2, 32).flatten(1)
    scales = blocks[:, 192:208].view(torch.int8)
    return (low | high << 4).view(torch.int8) - 32, _half(blocks, 208) * scales, None


_NON_LINEAR = torch.tensor(
    [-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
_TYPES = {
    "Q4_0": _Type(18, 32, _decode_q4_0),
    "Q4_1": _Type(20, 32, _decode_q4_1),
    "Q5_0": _Type(22, 32, _decode_q5_0),
    "Q5_1": _Type(24, 32, _decode_q5_1),
    "Q8_0": _Type(34, 32, _decode_q8_0),
    "Q2_K": _Type(84, 16, _decode_q2_k),
    "Q3_K": _Type(110, 16, _decode_q3_k),
    "Q4_K": _Type(144, 32, _decode_q4_k),
    "Q5_K": _Type(176, 32, _decode_q5_k),
    "Q6_K": _Type(210, 16, _decode_q6_k),
    "IQ4_NL": _Type(18, 32, _decode_iq4_nl, _NON_LINEAR),
    "IQ4_XS": _Type(136, 32, _decode_iq4_xs, _NON_LINEAR),
    "MXFP4": _Type(17, 32, _decode_mxfp4, FP4),
}
