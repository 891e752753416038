"""Loads a checkpoint's files into a decoder, in its dtype and on its device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.json_file import read_json
from penstock.engine.layers.linear import Linear
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.families import is_ignorable
from penstock.engine.models.registry import Architecture, read_model_config

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_DUMMY_STD = 0.02
_NUM_DUMMY = 1_048_583  # a prime, so that the rows of a matrix that repeats the numbers differ


def load_model(config: ModelConfig, path: Path, device: torch.device) -> Decoder:
    """The model in directory `path`, with the checkpoint's weights or, for `dummy`, random ones.

    Raises:
        ModelLoadError: names the invalid file, field or tensor.
        ConfigError: int8 is requested on a GPU.
    """
    if config.quantization == "int8" and device.type != "cpu":
        raise ConfigError("--quantization int8 needs a CPU: leave it out, or use --device cpu")
    architecture, decoder_config = read_model_config(path)
    dtype = _resolve_dtype(config, decoder_config, path)
    with torch.device("meta"):
        model = Decoder(decoder_config).to(dtype)
    # Rotary frequencies follow from the config and stay float32; weights are filled below.
    rotary = type(model.rotary)(decoder_config.rope, decoder_config.head_dim)
    model = model.to_empty(device=device)
    model.rotary = rotary.to(device)
    if config.load_format == "dummy":
        _fill_random(model, config.seed)
    else:
        _fill_from(Checkpoint(path), model, architecture)
    return model.eval()


def _resolve_dtype(config: ModelConfig, decoder: DecoderConfig, path: Path) -> torch.dtype:
    name = decoder.dtype.removeprefix("torch.") if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ModelLoadError(
            f"{path / 'config.json'}: dtype {name!r} is not supported; "
            f"choose --dtype from {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _fill_random(model: Decoder, seed: int) -> None:
    """Small normal numbers; norms are ones and biases zeros, as in a fresh model.

    Every device gets the same. A large matrix repeats its numbers: drawing billions takes minutes.
    """
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed((seed << 16) + index)
        period = min(parameter.numel(), _NUM_DUMMY)
        numbers = torch.randn(period, generator=generator).mul(_DUMMY_STD).to(parameter)
        for part in torch.split(parameter.data.flatten(), period):
            part.copy_(numbers[: len(part)])


def _fill_from(checkpoint: Checkpoint, model: Decoder, architecture: Architecture) -> None:
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        sources = architecture.weight_names(name)
        used.update(sources)
        for source, part in zip(sources, _parts(model, name, parameter), strict=True):
            part.copy_(checkpoint.read(source, tuple(part.shape)))
    ignored = {"lm_head.weight"} if model.config.is_tied else set()
    surplus = [
        name for name in checkpoint.names if name not in used | ignored and not is_ignorable(name)
    ]
    if surplus:
        raise ModelLoadError(
            f"{checkpoint.path}: {len(surplus)} tensors do not belong to the architecture named in "
            f"config.json, such as {min(surplus)}"
        )


def _parts(model: Decoder, name: str, parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """The slices of a parameter that come from separate tensors of the checkpoint."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, Linear):
        return torch.split(parameter.data, list(module.part_sizes))
    return (parameter.data,)


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_STORED_DTYPES = ("BF16", "F16", "F32")


class Checkpoint:
    """The tensors of a directory, by name: one safetensors file, or several with an index.

    Files are memory-mapped, so a tensor is read only when it is copied.

    Raises:
        ModelLoadError: on construction if files are missing or corrupt; on reading if a
            tensor is missing or has an unexpected shape or dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / INDEX_FILE
        if (path / SINGLE_FILE).is_file():
            self._files = {SINGLE_FILE: _open(path / SINGLE_FILE)}
            self._where = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        elif index.is_file():
            self._where = _read_index(index)
            self._files = {name: _open(path / name) for name in sorted(set(self._where.values()))}
            self._check_index(index)
        else:
            raise ModelLoadError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")

    @property
    def names(self) -> Iterable[str]:
        return self._where.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must have `shape`; mapped from the file, read-only."""
        if name not in self._where:
            raise ModelLoadError(f"{self.path}: the checkpoint has no tensor {name}")
        file = self._files[self._where[name]]
        place = f"{self.path / self._where[name]}: tensor {name}"
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise ModelLoadError(f"{place} has shape {view.get_shape()}, expected {list(shape)}")
        if view.get_dtype() not in _STORED_DTYPES:
            raise ModelLoadError(
                f"{place} is {view.get_dtype()}; supported: {', '.join(_STORED_DTYPES)}"
            )
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{place} cannot be read: {error}") from error
        return tensor

    def _check_index(self, index: Path) -> None:
        names = {file: set(opened.keys()) for file, opened in self._files.items()}
        for tensor, file in self._where.items():
            if tensor not in names[file]:
                raise ModelLoadError(f"{index}: {file} has no tensor {tensor}")


def _open(path: Path) -> Any:  # safetensors' handle, which has no usable types
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is corrupt or incomplete: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ModelLoadError(f"{path}: weight_map: expected an object of file names")
    if any(Path(file).name != file for file in where.values()):
        raise ModelLoadError(f"{path}: weight_map: files must be in the index's directory")
    return where
