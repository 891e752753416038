"""The adapters in memory, and the slots from which a step's rows take them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.lora.adapted_model import HEAD, TABLE, AdaptedModel
from penstock.engine.lora.files import (
    MAX_HEADER_BYTES,
    WEIGHTS_FILE,
    AdapterConfig,
    check_size,
    content_digest,
    read_config,
)
from penstock.engine.lora.layer_adapters import LoraWeights
from penstock.engine.request import Adapter
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.reference.lora import LoraRows

Packed = Mapping[str, Any]  # by layer
_PREFIX = "base_model.model."
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


class NoAdapters:
    """Stands for the slots of an engine without adapters."""

    max_bytes = 0

    def load(self, adapter: Adapter) -> None:
        raise InvalidRequestError(
            f"the adapter {adapter.name!r} needs an engine started with --enable-lora",
            param="model",
        )

    def drop(self, digest: str) -> None: ...

    def size(self, digest: str) -> int:
        raise AssertionError(f"{digest} cannot have been loaded")

    def has_head(self, digest: str) -> bool:
        raise AssertionError(f"{digest} cannot have been loaded")


NO_ADAPTERS = NoAdapters()


class AdapterSlots:
    """
    Args:
        max_loras: how many adapters the sequences on the device may have at once.
        max_rank: of an adapter.
    """

    def __init__(self, model: AdaptedModel, *, max_loras: int, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._modules = {
            module: ModuleShape(
                in_features=inputs,
                out_features=size,
                is_table=layer.is_table,
                is_linear=name not in (HEAD, TABLE),
            )
            for name, layer in model.layers.items()
            for module, (size, inputs) in layer.shapes().items()
        }
        self._loaded: dict[str, Packed] = {}  # by digest
        self._slots: dict[str, int] = {}  # by digest, the least recently used first
        self._free = list(reversed(range(max_loras)))
        self._last: object = None  # what the rows were made for

    @property
    def max_bytes(self) -> int:
        """The largest file that an adapter can have: in float32, with copies of the tables."""
        shapes = self._modules.values()
        num_low = sum(self._max_rank * (each.in_features + each.out_features) for each in shapes)
        num_copied = sum(
            each.in_features * each.out_features for each in shapes if not each.is_linear
        )
        return 4 * (num_low + num_copied) + MAX_HEADER_BYTES

    def load(self, adapter: Adapter) -> None:
        """Read an adapter into memory; any thread may call this.

        Raises:
            InvalidRequestError: names what is wrong with its files, or that they have changed.
        """
        try:
            packed = self._read(adapter)
        except ModelLoadError as error:
            message = f"the adapter {adapter.name!r} cannot be loaded: {error}"
            raise InvalidRequestError(message, param="model") from error
        self._loaded[adapter.digest] = packed

    def _read(self, adapter: Adapter) -> Packed:
        path = Path(adapter.path)
        config = read_config(path, max_rank=self._max_rank)
        check_size(path, max_bytes=self.max_bytes)
        if content_digest(path) != adapter.digest:
            raise ModelLoadError(f"{path} has changed since the adapter got its name")
        matrices = read_matrices(
            path, config, self._modules, self._model.dtype, roots=self._model.roots
        )
        memory = WeightMemory()
        packed = {
            name: layer.adapters.pack(
                layer.own(
                    [
                        _in_order(matrices.get(module), order)
                        for module, order in zip(layer.modules, layer.row_orders, strict=True)
                    ]
                ),
                memory,
            )
            for name, layer in self._model.layers.items()
        }
        return {name: each for name, each in packed.items() if each is not None}

    def drop(self, digest: str) -> None:
        """Forget an adapter that no sequence has."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._install(slot, {})
            self._free.append(slot)
            self._last = ()
        self._loaded.pop(digest, None)

    def size(self, digest: str) -> int:
        """The bytes of an adapter's matrices in memory, beside those of a slot."""
        pairs = (pair for each in self._loaded[digest].values() for pair in each)
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs if pair is not None)

    def has_head(self, digest: str) -> bool:
        """Whether an adapter in memory changes the output head."""
        return HEAD in self._loaded[digest]

    def use(
        self, digests: Sequence[str], *, num_tokens: Sequence[int], num_sampled: Sequence[int]
    ) -> None:
        """Give the rows of the next steps the slots of their adapters.

        Args:
            digests: of each sequence's adapter; empty if it has none.
            num_tokens, num_sampled: how many rows each has, and of those whose logits are computed.
        """
        rows = (digests, num_tokens, num_sampled) if any(digests) else None
        if self._last == rows:
            return
        self._last = rows
        self._fill({each for each in digests if each})
        slots = np.array([self._slots.get(each, -1) for each in digests])
        self._model.rows.set(self._rows(slots.repeat(num_tokens)))
        self._model.sampled_rows.set(self._rows(slots.repeat(num_sampled)))

    def _fill(self, digests: set[str]) -> None:
        """Have these adapters in slots, in place of those that were not used for longest."""
        for digest in digests & self._slots.keys():
            self._slots[digest] = self._slots.pop(digest)
        for digest in sorted(digests - self._slots.keys()):
            if self._free:
                slot = self._free.pop()
            else:
                oldest = next(iter(self._slots))
                assert oldest not in digests, "more adapters in a step than slots"
                slot = self._slots.pop(oldest)
            self._install(slot, self._loaded[digest])
            self._slots[digest] = slot

    def _install(self, slot: int, packed: Packed) -> None:
        for name, layer in self._model.layers.items():
            layer.adapters.install(slot, packed.get(name))

    def _rows(self, slots: np.typing.NDArray[np.int64]) -> LoraRows | None:
        if not len(slots) or slots.max() < 0:
            return None
        return LoraRows.of(slots).to(self._model.device)


def _in_order(update: LoraWeights | None, order: Tensor | None) -> LoraWeights | None:
    """With the rows that the model has in another order than the checkpoint."""
    return update if update is None or order is None else replace(update, b=update.b[order])


def read_matrices(
    path: Path,
    config: AdapterConfig,
    modules: Mapping[str, ModuleShape],
    dtype: torch.dtype,
    *,
    roots: Sequence[str],
) -> dict[str, LoraWeights]:
    """A and B of the modules that the adapter changes, with their scales.

    Args:
        modules: the base model's, by their names in its checkpoint.
        roots: as in `AdaptedModel`. In an adapter that was made for the model without its head no
            name begins with one.

    Raises:
        ModelLoadError: names the tensor that is missing, damaged, or of a module that cannot have
            one.
    """
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            keys = list(tensors.keys())
            starts = (each for each in roots if any(k.startswith(_PREFIX + each) for k in keys))
            root, start = roots[0], next(starts, "")
            whole = {
                start + name.removeprefix(root) if name.startswith(root) else name: name
                for name in modules
            }
            shapes = {name: modules[each] for name, each in whole.items()}
            found = _Matrices(file, tensors, config, shapes, dtype).read()
            return {whole[name]: each for name, each in found.items()}
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
        self._file, self._tensors = file, tensors
        self._modules, self._dtype = modules, dtype
        self._updates = config.updates({name: shape.is_linear for name, shape in modules.items()})

    def read(self) -> dict[str, LoraWeights]:
        names: dict[str, dict[str, str]] = {}  # by module and matrix
        for name in self._tensors.keys():  # noqa: SIM118 (no mapping)
            self._sort(name, names)
        for module, update in self._updates.items():
            if update.is_expected:
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

    def _pair(self, module: str, names: Mapping[str, str]) -> LoraWeights:
        shape, update = self._modules[module], self._updates[module]
        kind = "embedding_{}" if shape.is_table else "{}.weight"
        for letter in "AB":
            if letter not in names:
                missing = f"base_model.model.{module}.lora_{kind.format(letter)}"
                raise ModelLoadError(f"{self._file}: tensor {missing} is missing")
        return LoraWeights(
            a=self._tensor(names["A"], (update.rank, shape.in_features)),
            b=self._tensor(names["B"], (shape.out_features, update.rank)),
            scale=update.scale,
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
