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

from penstock.engine.weights.formats.packing import unpack_nibbles
from penstock.engine.weights.matrix import QuantizedMatrix
from penstock.kernels.cpu.build import BuildError, cache_dir

_log = logging.getLogger(__name__)
_VERSION = 1  # of the numbers that quantizing gives; a change makes other folders
_MIN_VALUES = 1 << 16  # smaller matrices are quantized anew in milliseconds


class ConvertedMatrices:
    """
    Args:
        fingerprint: of the checkpoint (`weights_fingerprint`).
        kind: all else that the matrices depend on.
    """

    def __init__(self, fingerprint: bytes, kind: str) -> None:
        self._folder: Path | None = None
        try:
            name = f"{fingerprint.hex()[:24]}-{kind}-{_VERSION}"
            self._folder = cache_dir() / "weights" / name
        except BuildError as error:
            _log.warning("weights are quantized again at each start: %s", error)

    def find(self, name: str, shape: torch.Size) -> QuantizedMatrix | None:
        """The matrix of a module, if it is there; its tensors are mapped from the file."""
        path = None if self._folder is None else self._folder / f"{name}.safetensors"
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
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            _log.warning("%s cannot be read: %s", path, error)
            return None
        if codes.shape != shape:
            return None
        return QuantizedMatrix(codes=codes, scales=scales, columns_per_scale=columns)

    def add(self, name: str, matrix: QuantizedMatrix) -> None:
        """Keep the matrix of a module, unless it is small or cannot be written."""
        if self._folder is None or matrix.codes.numel() < _MIN_VALUES:
            return
        tensors = {"scales": matrix.scales, **_stored_codes(matrix.codes)}
        metadata = {"columns_per_scale": str(matrix.columns_per_scale)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                fresh = Path(folder) / "matrix.safetensors"
                save_file(tensors, fresh, metadata)
                fresh.replace(self._folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            _log.warning("weights are quantized again at each start: %s", error)
            self._folder = None


def _stored_codes(codes: Tensor) -> dict[str, Tensor]:
    """Two in a byte where they are integers of 4 bits."""
    if codes.dtype != torch.int8 or codes.shape[1] % 2 or codes.min() < -8 or codes.max() > 7:
        return {"codes": codes}
    pairs = (codes + 8).view(torch.uint8).view(len(codes), -1, 2)
    return {"nibbles": pairs[..., 0] | pairs[..., 1] << 4}
