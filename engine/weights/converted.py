"""Quantized matrices kept on disk, so that a dense checkpoint is quantized once.

A file per matrix, in a folder per checkpoint, kind and dtype. A file appears when it is complete.
Whoever needs the space may delete any of it at any time.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.weights.formats.packing import unpack_nibbles
from penstock.engine.weights.matrix import QuantizedMatrix
from penstock.kernels.cpu.build import BuildError, cache_dir

_log = logging.getLogger(__name__)
_VERSION = 1  # of the numbers that quantizing gives; a change makes other folders
_MIN_VALUES = 1 << 16  # smaller matrices are quantized anew in milliseconds


class ConvertedMatrices:
    """
    Args:
        fingerprint: of the checkpoint (`weights_fingerprint`, with times).
        dtype: to which its numbers were rounded before they were quantized.
    """

    def __init__(self, fingerprint: bytes, dtype: torch.dtype) -> None:
        self._root: Path | None = None
        self._name = f"{fingerprint.hex()[:24]}-{{}}-{str(dtype).removeprefix('torch.')}-{_VERSION}"
        try:
            self._root = cache_dir() / "weights"
        except BuildError as error:
            _log.warning("weights are quantized again at each start: %s", error)

    def find(self, name: str, kind: Quantization, shape: torch.Size) -> QuantizedMatrix | None:
        """The matrix of a module, if it is there; its tensors are mapped from the file."""
        folder = self._folder(kind)
        path = None if folder is None else folder / f"{name}.safetensors"
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                codes = tensors.get("codes")
                if codes is None:
                    codes = unpack_nibbles(tensors["nibbles"])[:, : shape[1]].view(torch.int8) - 8
                scales = tensors["scales"]
                columns = int(file.metadata()["columns_per_scale"])
            found = QuantizedMatrix(codes=codes, scales=scales, columns_per_scale=columns)
        except Exception as error:  # whatever a damaged file leads to
            _log.warning("%s cannot be read: %s", path, error)
            return None
        dtypes = (torch.float8_e4m3fn if kind == "fp8" else torch.int8, torch.float32)
        is_whole = codes.shape == shape and (codes.dtype, scales.dtype) == dtypes
        return found if is_whole else None

    def add(self, name: str, kind: Quantization, matrix: QuantizedMatrix) -> None:
        """Keep the matrix of a module, unless it is small or cannot be written."""
        folder = self._folder(kind)
        if folder is None or matrix.codes.numel() < _MIN_VALUES:
            return
        tensors = {"scales": matrix.scales, **_stored_codes(matrix.codes)}
        metadata = {"columns_per_scale": str(matrix.columns_per_scale)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                fresh = Path(unfinished) / "matrix.safetensors"
                save_file(tensors, fresh, metadata)
                fresh.replace(folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            _log.warning("weights are quantized again at each start: %s", error)
            self._root = None

    def _folder(self, kind: Quantization) -> Path | None:
        return None if self._root is None else self._root / self._name.format(kind)


def _stored_codes(codes: Tensor) -> dict[str, Tensor]:
    """Two in a byte where they are integers of 4 bits."""
    if codes.dtype != torch.int8 or codes.shape[1] % 2 or codes.min() < -8 or codes.max() > 7:
        return {"codes": codes}
    pairs = (codes + 8).view(torch.uint8).view(len(codes), -1, 2)
    return {"nibbles": pairs[..., 0] | pairs[..., 1] << 4}
