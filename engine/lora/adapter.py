"""The matrices of a PEFT adapter, by the base model's modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.adapters import LowRank
from penstock.engine.lora.files import WEIGHTS_FILE, AdapterConfig

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:(?P<plain>[AB])\.weight|embedding_(?P<table>[AB]))"
)
# PEFT stores the base model's own table beside updates of it.
_COPY = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")
_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """A module of the base model that may have an adapter's matrices.

    Attributes:
        is_table: an embedding, from which rows are looked up.
        is_linear: neither this nor the output head: what 'all-linear' means.
    """

    in_features: int
    out_features: int
    is_table: bool = False
    is_linear: bool = True


def read_matrices(
    path: Path, config: AdapterConfig, modules: Mapping[str, ModuleShape], dtype: torch.dtype
) -> dict[str, LowRank]:
    """A and B of the modules that the adapter changes, with their scales.

    Args:
        modules: the base model's, by their names in its checkpoint.

    Raises:
        ModelLoadError: names the tensor that is missing, damaged, or of a module that cannot have
            one.
    """
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return _Matrices(file, tensors, config, modules, dtype).read()
    except (SafetensorError, OSError, MemoryError) as error:
        raise ModelLoadError(f"{file} is corrupt or incomplete: {error}") from error


class _Matrices:
    def __init__(
        self,
        file: Path,
        tensors: Any,  # safetensors' handle, which has no usable types
        config: AdapterConfig,
        modules: Mapping[str, ModuleShape],
        dtype: torch.dtype,
    ) -> None:
        self._file, self._tensors, self._config = file, tensors, config
        self._modules, self._dtype = modules, dtype

    def read(self) -> dict[str, LowRank]:
        names: dict[str, dict[str, str]] = {}  # by module and matrix
        for name in self._tensors.keys():  # noqa: SIM118 (no mapping)
            self._sort(name, names)
        for module in self._config.expected(
            {name: shape.is_linear for name, shape in self._modules.items()}
        ):
            names.setdefault(module, {})
        if not names:
            raise ModelLoadError(f"{self._file} has no matrices of adapters")
        return {module: self._pair(module, found) for module, found in names.items()}

    def _sort(self, name: str, names: dict[str, dict[str, str]]) -> None:
        copied, found = _COPY.fullmatch(name), _TENSOR.fullmatch(name)
        if copied is not None and copied["module"] in self._modules:
            shape = self._modules[copied["module"]]
            self._check(name, (shape.out_features, shape.in_features), is_table=shape.is_table)
            return
        if found is None:
            raise self._fault(name, "is not supported: neither lora_A nor lora_B")
        shape_of = self._modules.get(found["module"])
        if shape_of is None:
            raise self._fault(name, f"is of {found['module']}, where this model takes no adapter")
        if shape_of.is_table != (found["table"] is not None):
            raise self._fault(name, "is not of the kind that its module has")
        names.setdefault(found["module"], {})[found["plain"] or found["table"]] = name

    def _pair(self, module: str, names: Mapping[str, str]) -> LowRank:
        shape, rank = self._modules[module], self._config.rank(module)
        kind = "embedding_{}" if shape.is_table else "{}.weight"
        for letter in "AB":
            if letter not in names:
                missing = f"base_model.model.{module}.lora_{kind.format(letter)}"
                raise ModelLoadError(f"{self._file}: tensor {missing} is missing")
        return LowRank(
            a=self._tensor(names["A"], (rank, shape.in_features)),
            b=self._tensor(names["B"], (shape.out_features, rank)),
            scale=self._config.scale(module),
        )

    def _tensor(self, name: str, shape: tuple[int, int]) -> Tensor:
        self._check(name, shape)
        tensor: Tensor = self._tensors.get_tensor(name)
        if not tensor.isfinite().all():
            raise self._fault(name, "has numbers that are not finite")
        return tensor.to(self._dtype)

    def _check(self, name: str, shape: tuple[int, int], *, is_table: bool = False) -> None:
        view = self._tensors.get_slice(name)
        expected = shape[::-1] if is_table else shape
        if tuple(view.get_shape()) != expected:
            raise self._fault(name, f"has shape {view.get_shape()}, expected {list(expected)}")
        if view.get_dtype() not in _DTYPES:
            raise self._fault(name, f"is {view.get_dtype()}; supported: {', '.join(_DTYPES)}")

    def _fault(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file}: tensor {name} {what}")
