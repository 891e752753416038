"""What a GGUF file declares: its keys as plain Python values, and where its tensors are.

One pass checks and reads: nothing is believed before it is known to be there, so that a damaged
file is refused in one line, in little memory. Source: docs/gguf.md of ggml, and `ggml.c` for the
types. The numbers of tensors are not read here.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.json_file import GGUF_MAGIC, check_file

# What a file may declare before its tensors. The largest vocabularies, of 262,144 tokens with
# 515,000 merges, have 1.3 million elements in 20 MB; an element takes up to 100 bytes here.
MAX_KEYS = 4096
MAX_ELEMENTS = 2 << 20
MAX_METADATA_BYTES = 64 << 20
MAX_TENSORS = 1 << 16
MAX_PARTS = 1 << 10
_MAX_DIMS = 4
_MAX_TENSOR_BYTES = 1 << 50
_BOOL, _STRING, _ARRAY = 7, 8, 9
# `struct`'s letters for the numbers of a value's type.
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_DEFAULT_ALIGNMENT = 32
_SIZE = struct.Struct("<Q")


class BlockType(NamedTuple):
    """A type of tensors: `columns` numbers of a row take `num_bytes` together."""

    name: str
    columns: int
    num_bytes: int


# By their numbers in a file.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34), 10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110), 12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74), 18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136), 24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8), 28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56), 30: BlockType("BF16", 1, 2), 34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36), 41: BlockType("Q1_0", 128, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is.

    Attributes:
        type: the name of a block type.
        shape: rows before columns.
        offset: of its first byte in the part's file.
        size: in bytes.
        part: the number of the part that has it.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    size: int
    part: int = 0

    def rows(self, first: int, count: int) -> GgufTensor:
        """Some rows of a matrix, or numbers of a vector."""
        size = self.size // self.shape[0]
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + first * size,
            size=count * size,
        )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """
    Attributes:
        parts: the files; one, unless the model is split.
        keys: of the first part: numbers, texts, booleans, and lists of one of them.
    """

    parts: tuple[Path, ...]
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def numbers(self, name: str) -> tuple[float, ...]:
        """Those of a tensor in F32 that is small enough to be read at once."""
        tensor = self.tensors[name]
        if tensor.type != "F32" or tensor.size > 1 << 20:
            raise ModelLoadError(f"{self.parts[tensor.part]}: tensor {name} is not a few F32")
        with self.parts[tensor.part].open("rb") as data:
            data.seek(tensor.offset)
            return struct.unpack(f"<{tensor.size // 4}f", data.read(tensor.size))


def read_gguf(file: Path) -> GgufFile:
    """A file, or with the others all parts of a split model.

    Args:
        file: of a split model, the first part: `…-00001-of-00003.gguf`.

    Raises:
        ModelLoadError: with what is wrong with the file.
    """
    first = _read_part(file, 0)
    num_parts = first.keys.get("split.count", 1)
    if not isinstance(num_parts, int) or num_parts <= 1:
        return first
    if num_parts > MAX_PARTS:
        raise ModelLoadError(f"{file}: split.count: {num_parts:,} parts, more than {MAX_PARTS:,}")
    name = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if name is None:
        raise ModelLoadError(
            f"{file} is one of {num_parts} parts, and not called …-00001-of-{num_parts:05}.gguf"
        )
    paths = [file.with_name(f"{name[1]}-{number:05}-of-{num_parts:05}.gguf")
             for number in range(1, num_parts + 1)]  # fmt: skip
    if file != paths[0] or first.keys.get("split.no", 0) != 0:
        raise ModelLoadError(f"{file} is one of {num_parts} parts: give the first, {paths[0]}")
    tensors = dict(first.tensors)
    for number, path in enumerate(paths[1:], 1):
        part = _read_part(path, number)
        if part.keys.get("split.no") != number or part.keys.get("split.count") != num_parts:
            raise ModelLoadError(f"{path} is not part {number + 1} of {num_parts} of {file}")
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelLoadError(f"{path}: another part has tensor {min(twice)}, too")
        tensors |= part.tensors
    expected = first.keys.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelLoadError(f"{file}: the parts have {len(tensors)} tensors, not {expected}")
    return GgufFile(tuple(paths), first.keys, tensors)


def _read_part(file: Path, number: int) -> GgufFile:
    check_file(file)
    try:
        with file.open("rb") as data:
            if data.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ModelLoadError(f"{file} is not a GGUF file")
            content = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
        with content:
            keys, tensors = _Declared(content, number).read()
    except _DamagedError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from error
    return GgufFile((file,), keys, tensors)


class _DamagedError(Exception):
    """What is wrong with a file."""


class _Declared:
    """What stands before the tensors' numbers: keys and values, then names, shapes and places.

    Args:
        content: of the file.
        part: its number.
    """

    def __init__(self, content: mmap.mmap, part: int) -> None:
        self._content, self._part = content, part
        self._end = min(len(content), MAX_METADATA_BYTES)
        self._at = len(GGUF_MAGIC)
        self._num_elements = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        (version,) = self._take("<I")
        if version not in (2, 3):
            raise _DamagedError(f"its version is {version}, not 2 or 3 (little-endian)")
        num_tensors, num_keys = self._take("<QQ")
        self._bound(num_keys, MAX_KEYS, "keys")
        self._bound(num_tensors, MAX_TENSORS, "tensors")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._text("a key")
            if name in keys:
                raise _DamagedError(f"key {_shown(name)} is there twice")
            keys[name] = self._value(name)
        alignment = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise _DamagedError(f"general.alignment is {alignment!r}")
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self._text("the name of a tensor")
            if name in tensors:
                raise _DamagedError(f"tensor {_shown(name)} is there twice")
            tensors[name] = self._tensor(name, alignment)
        return keys, self._placed(tensors, -(-self._at // alignment) * alignment)

    def _value(self, name: str) -> Any:
        (kind,) = self._take("<I")
        if kind == _ARRAY:
            kind, num = self._take("<IQ")
            self._num_elements += num
            self._bound(self._num_elements, MAX_ELEMENTS, "elements of arrays")
            if kind == _STRING:
                return self._texts(name, num)
            return list(self._numbers(name, kind, num))
        if kind == _STRING:
            return self._text(f"key {_shown(name)}")
        return self._numbers(name, kind, 1)[0]

    def _numbers(self, name: str, kind: int, num: int) -> tuple[Any, ...]:
        if kind not in _LETTERS:
            raise _DamagedError(f"key {_shown(name)} has values of type {kind}")
        return self._take(f"<{num}{_LETTERS[kind]}")

    def _texts(self, name: str, num: int) -> list[str]:
        """Texts of a list: a tight loop, since vocabularies have hundreds of thousands."""
        content, at, size_of = self._content, self._at, _SIZE.unpack_from
        last = self._end - _SIZE.size
        texts = []
        try:
            for _ in range(num):
                if at > last:
                    raise self._cut()
                start = at + 8
                at = start + size_of(content, at)[0]
                if at > self._end:
                    raise self._cut()
                texts.append(content[start:at].decode())
        except UnicodeDecodeError as error:
            raise _DamagedError(
                f"element {len(texts)} of key {_shown(name)} is not UTF-8"
            ) from error
        self._at = at
        return texts

    def _tensor(self, name: str, alignment: int) -> GgufTensor:
        """With its offset among the tensors."""
        (num_dims,) = self._take("<I")
        self._bound(num_dims, _MAX_DIMS, f"dimensions of tensor {_shown(name)}")
        shape = self._take(f"<{num_dims}Q")[::-1] or (1,)
        kind, offset = self._take("<IQ")
        if kind not in BLOCK_TYPES:
            raise _DamagedError(f"tensor {_shown(name)} has type {kind}, which is not known")
        block, num_blocks = BLOCK_TYPES[kind], 1
        for size in (*shape[:-1], -(-shape[-1] // block.columns)):
            num_blocks *= size
            if not 0 < num_blocks * block.num_bytes <= _MAX_TENSOR_BYTES:
                raise _DamagedError(f"tensor {_shown(name)} has shape {list(shape)}")
        if shape[-1] % block.columns:
            raise _DamagedError(
                f"tensor {_shown(name)} has rows of {shape[-1]}, no multiple of {block.columns}, "
                f"the numbers of a block of {block.name}"
            )
        if offset % alignment:
            raise _DamagedError(
                f"tensor {_shown(name)} begins at byte {offset}, which is no multiple of "
                f"{alignment}, the file's alignment"
            )
        return GgufTensor(block.name, shape, offset, num_blocks * block.num_bytes, self._part)

    def _placed(self, tensors: dict[str, GgufTensor], start: int) -> dict[str, GgufTensor]:
        """Tensors with their offsets in the file; start: where tensors begin."""
        placed, end = {}, start
        for name, each in sorted(tensors.items(), key=lambda item: item[1].offset):
            offset = start + each.offset
            if offset < end:
                raise _DamagedError(f"tensor {_shown(name)} begins within another one")
            end = offset + each.size
            if end > len(self._content):
                raise _DamagedError(f"tensor {_shown(name)} ends after the file")
            placed[name] = replace(each, offset=offset)
        return placed

    def _text(self, what: str) -> str:
        (size,) = self._take("<Q")
        start = self._at
        self._skip(size)
        try:
            return self._content[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise _DamagedError(f"{what} is not UTF-8") from error

    def _take(self, form: str) -> tuple[Any, ...]:
        start = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._content, start)

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > self._end:
            raise self._cut()

    def _cut(self) -> _DamagedError:
        if self._end == len(self._content):
            return _DamagedError("it ends within its metadata")
        return _DamagedError(f"its metadata has more than {MAX_METADATA_BYTES:,} bytes")

    def _bound(self, number: int, most: int, what: str) -> None:
        if number > most:
            raise _DamagedError(f"it declares {number:,} {what}, more than {most:,}")


def _shown(name: str) -> str:
    return repr(name[:100])
