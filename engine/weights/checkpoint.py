"""The tensors of a model's directory, by name."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.config_fields import read_model_fields
from penstock.engine.model_files.json_file import check_file, is_present, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I64": 8}
FLOATS = ("BF16", "F16", "F32")  # as safetensors names them


class Checkpoint:
    """The tensors of a directory, by name: one safetensors file, or several with an index.

    Files are memory-mapped, so a tensor is read only when it is copied.

    Raises:
        ModelLoadError: on construction if files are missing or corrupt; on reading if a
            tensor is missing or has an unexpected shape or dtype.

    Attributes:
        config: the fields of `config.json`.
        unread: the names of the tensors that were not read so far.
        stacks_experts: a tensor has a module of all experts of a layer.
    """

    stacks_experts = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_model_fields(path)
        index = path / INDEX_FILE
        if is_present(path / SINGLE_FILE):
            self._files = {SINGLE_FILE: _open(path / SINGLE_FILE)}
            self._where = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        elif is_present(index):
            self._where = _read_index(index)
            self._files = {name: _open(path / name) for name in sorted(set(self._where.values()))}
            self._check_index(index)
        else:
            raise ModelLoadError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        self.unread = set(self._where)
        self._sorted: list[str] = []

    def read(
        self, name: str, shape: tuple[int, ...], *, dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        """The tensor `name`, which must have `shape` and one of `dtypes`; mapped from the file,
        read-only."""
        view = self._slice(name)
        place = f"{self.path / self._where[name]}: tensor {name}"
        if tuple(view.get_shape()) != shape:
            raise ModelLoadError(
                f"{place} has shape {view.get_shape()}, expected {list(shape)} by config.json"
            )
        if view.get_dtype() not in dtypes:
            raise ModelLoadError(f"{place} is {view.get_dtype()}; supported: {', '.join(dtypes)}")
        try:
            tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        except (SafetensorError, OSError, MemoryError) as error:
            raise ModelLoadError(f"{place} cannot be read: {error}") from error
        self.unread.discard(name)
        return tensor

    def shape(self, name: str, *, num_dims: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor, for formats whose tensors' shapes follow from others'.

        Raises:
            ModelLoadError: there is no such tensor, or it has not so many dimensions.
        """
        shape = tuple(self._slice(name).get_shape())
        if num_dims not in (None, len(shape)):
            raise self.fault(name, f"has shape {list(shape)}, expected {num_dims} dimensions")
        return shape

    def group_size(self, name: str, size: int, num_groups: int) -> int:
        """How many of `size` inputs have one scale of the tensor `name`.

        Raises:
            ModelLoadError: the groups differ in size, so which input is in which is not known.
        """
        if num_groups < 1 or size % num_groups:
            raise self.fault(name, f"has {num_groups} groups for {size} inputs, which do not fit")
        return size // num_groups

    def dtype(self, name: str) -> str:
        """The dtype of a tensor that is there, as safetensors names it."""
        found: str = self._slice(name).get_dtype()
        return found

    def num_bytes(self, name: str) -> int:
        """Size of a tensor that is there."""
        view = self._slice(name)
        return int(math.prod(view.get_shape())) * _ITEM_BYTES.get(view.get_dtype(), 4)

    def within(self, prefix: str) -> list[str]:
        """The names of all tensors that start so."""
        if not self._sorted:
            self._sorted = sorted(self._where)
        first = bisect_left(self._sorted, prefix)
        return list(takewhile(lambda name: name.startswith(prefix), self._sorted[first:]))

    def fault(self, name: str, what: str) -> ModelLoadError:
        """An error that names a tensor and its file."""
        return ModelLoadError(f"{self.path / self._where[name]}: tensor {name} {what}")

    def ignore(self, *names: str) -> None:
        """Take tensors for read that say nothing about the numbers."""
        self.unread -= set(names)

    def check_all_read(self, is_redundant: Callable[[str], bool]) -> None:
        """
        Args:
            is_redundant: whether a tensor need not be read.

        Raises:
            ModelLoadError: another one was not.
        """
        surplus = [name for name in self.unread if not is_redundant(name)]
        if surplus:
            raise ModelLoadError(
                f"{self.path}: {len(surplus)} tensors do not belong to the architecture named in "
                f"config.json, such as {min(surplus)}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            raise ModelLoadError(f"{self.path}: the checkpoint has no tensor {name}")
        return self._files[self._where[name]].get_slice(name)

    def _check_index(self, index: Path) -> None:
        names = {file: set(opened.keys()) for file, opened in self._files.items()}
        for tensor, file in self._where.items():
            if tensor not in names[file]:
                raise ModelLoadError(f"{index}: {file} has no tensor {tensor}")


def _open(path: Path) -> Any:  # safetensors' handle, which has no usable types
    check_file(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, MemoryError) as error:
        raise ModelLoadError(f"{path} is corrupt or incomplete: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ModelLoadError(f"{path}: weight_map: expected an object of file names")
    if any(Path(file).name != file for file in where.values()):
        raise ModelLoadError(f"{path}: weight_map: files must be in the index's directory")
    return where
