"""Quantized matrices kept on disk, so that a dense checkpoint is quantized once.

A file per matrix, in a folder per checkpoint, kind and dtype. A file appears when it is complete.
Whoever needs the space may delete any of it at any time. A file that is damaged, or that another
user may have written, is made again. Folders beyond `PENSTOCK_CACHE_BYTES` are removed, the one
that was used longest ago first.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.weights.formats.packing import unpack_nibbles
from penstock.engine.weights.matrix import CODE_KINDS, QuantizedMatrix
from penstock.kernels.cache_folder import NoCacheError, cache_dir, is_private, unfinished

_log = logging.getLogger(__name__)
_VERSION = 2  # of the numbers that quantizing gives; a change makes other folders
_MIN_VALUES = 1 << 16  # smaller matrices are quantized anew in milliseconds
BYTES_VARIABLE = "PENSTOCK_CACHE_BYTES"
_MAX_BYTES = 64 << 30


class ConvertedMatrices:
    """
    Args:
        fingerprint: of the checkpoint (`weights_fingerprint`, with times).
        dtype: to which its numbers were rounded before they were quantized.
    """

    def __init__(self, fingerprint: bytes, dtype: torch.dtype) -> None:
        self._root: Path | None = None
        self._in_memory: dict[tuple[str, Quantization], QuantizedMatrix] = {}
        self._used: set[Path] = set()
        self._name = f"{fingerprint.hex()[:24]}-{{}}-{str(dtype).removeprefix('torch.')}-{_VERSION}"
        try:
            self._root = cache_dir() / "weights"
        except NoCacheError as error:
            _log.warning("weights are quantized again at each start: %s", error)

    def find(self, name: str, kind: Quantization, shape: torch.Size) -> QuantizedMatrix | None:
        """The matrix of a module, if it is there; its tensors are mapped from the file."""
        if (name, kind) in self._in_memory:
            return self._in_memory[name, kind]
        folder = self._folder(kind)
        path = None if folder is None else folder / f"{name}.safetensors"
        if path is None or not path.is_file():
            return None
        if not is_private(path):
            _log.warning("%s is made again: another user may have written it", path)
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                columns = int(file.metadata()["columns_per_scale"])
                if file.metadata()["checksum"] != _checksum(name, columns, tensors):
                    raise ValueError("its checksum is wrong")
                codes = tensors.get("codes")
                if codes is None:
                    codes = unpack_nibbles(tensors["nibbles"])[:, : shape[1]]
                scales, offsets = tensors["scales"], tensors.get("offsets")
            found = QuantizedMatrix(
                codes=codes, scales=scales, offsets=offsets, columns_per_scale=columns,
                column_factors=tensors.get("column_factors"),
            )  # fmt: skip
        except Exception as error:  # whatever a damaged file leads to
            _log.warning("%s is made again, as it cannot be read: %s", path, error)
            return None
        expected = CODE_KINDS[kind]
        dtypes = (expected.dtype, torch.float32, torch.float32 if expected.has_offsets else None)
        stored = (codes.dtype, scales.dtype, None if offsets is None else offsets.dtype)
        return found if codes.shape == shape and stored == dtypes else None

    def add(self, name: str, kind: Quantization, matrix: QuantizedMatrix) -> None:
        """Keep the matrix of a module, unless it is small or cannot be written."""
        if matrix.codes.numel() >= _MIN_VALUES:
            self._write(name, kind, matrix)

    def add_calibrated(self, name: str, kind: Quantization, matrix: QuantizedMatrix) -> None:
        """Keep what cannot be had from the matrix alone: in memory, if nowhere else."""
        self._write(name, kind, matrix)
        if self._root is None:
            self._in_memory[name, kind] = matrix

    def has(self, name: str, kind: Quantization) -> bool:
        """Whether `find` will look at a file."""
        folder = self._folder(kind)
        return folder is not None and (folder / f"{name}.safetensors").is_file()

    def forget(self, kind: Quantization) -> None:
        """Remove all files of a kind, of which one is damaged."""
        folder = self._folder(kind)
        if folder is not None:
            for path in folder.glob("*.safetensors"):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claimed(self, kind: Quantization) -> Iterator[None]:
        """While this process alone adds to them: others that would wait."""
        folder = self._folder(kind)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            folder = None
        if folder is None:
            yield
            return
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _give_up(self, error: Exception) -> None:
        _log.warning("weights are quantized again at each start: %s", error)
        self._root = None

    def _write(self, name: str, kind: Quantization, matrix: QuantizedMatrix) -> None:
        folder = self._folder(kind)
        if folder is None:
            return
        tensors = {"scales": matrix.scales, **_stored_codes(matrix.codes)}
        if matrix.offsets is not None:
            tensors["offsets"] = matrix.offsets
        if matrix.column_factors is not None:
            tensors["column_factors"] = matrix.column_factors
        columns = matrix.columns_per_scale
        metadata = {
            "columns_per_scale": str(columns),
            "checksum": _checksum(name, columns, tensors),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with unfinished(folder) as own:
                fresh = own / "matrix.safetensors"
                save_file(tensors, fresh, metadata)
                fresh.chmod(0o644)
                fresh.replace(folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            self._give_up(error)

    def _folder(self, kind: Quantization) -> Path | None:
        if self._root is None:
            return None
        folder = self._root / self._name.format(kind)
        if folder not in self._used:
            self._used.add(folder)
            with contextlib.suppress(OSError):
                os.utime(folder)
            _remove_oldest(self._root, besides=self._used, max_bytes=_max_bytes())
        return folder


def _max_bytes() -> int:
    chosen = os.environ.get(BYTES_VARIABLE, "")
    return int(chosen) if chosen.isdecimal() else _MAX_BYTES


def _remove_oldest(root: Path, *, besides: set[Path], max_bytes: int) -> None:
    """Remove the folders that were used longest ago, until all of them have at most `max_bytes`.
    What another engine has mapped stays in its memory."""
    left = max_bytes
    with contextlib.suppress(OSError):
        last_used = {each: each.stat().st_mtime for each in root.iterdir()}
        for folder in sorted(last_used, key=lambda each: (each in besides, last_used[each]))[::-1]:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if size <= left or folder in besides:
                left -= size
            else:
                _log.info("removed %s, for which %s bytes have no room", folder, max_bytes)
                shutil.rmtree(folder, ignore_errors=True)


def _checksum(name: str, columns_per_scale: int, tensors: Mapping[str, Tensor]) -> str:
    """The CRC-32 of a file's content: 15 ms for 100 MB."""
    found = zlib.crc32(f"{name} {columns_per_scale}".encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        found = zlib.crc32(f"{key} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _stored_codes(codes: Tensor) -> dict[str, Tensor]:
    """Two in a byte where they are integers of 4 bits."""
    if codes.dtype != torch.uint8 or codes.shape[1] % 2 or codes.max() > 15:
        return {"codes": codes}
    pairs = codes.view(len(codes), -1, 2)
    return {"nibbles": pairs[..., 0] | pairs[..., 1] << 4}
