"""From files to a decoder with weights, in its dtype and on its device.

Not known here: which architectures exist (`registry`), where files come from.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.layers.linear import Linear
from penstock.engine.models.checkpoint import Checkpoint
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.registry import Architecture, read_model_config
from penstock.engine.models.weight_names import is_ignorable

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_DUMMY_STD = 0.02
_NUM_DUMMY = 1_048_583  # a prime, so that rows of a matrix that repeats them differ


def load_model(config: ModelConfig, path: Path, device: torch.device) -> Decoder:
    """The model in directory `path`, its weights from the checkpoint or, for `dummy`, random.

    Raises:
        ModelLoadError: naming the file, field or tensor at fault.
        ConfigError: int8 is asked for on a GPU.
    """
    if config.quantization == "int8" and device.type != "cpu":
        raise ConfigError("--quantization int8 is for a CPU: leave it out, or use --device cpu")
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


def weights_num_bytes(model: nn.Module) -> int:
    """Memory of the weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


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

    The same on every device. A large matrix repeats its numbers: drawing billions takes minutes.
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
            f"{checkpoint.path}: {len(surplus)} tensors do not belong to the architecture that "
            f"config.json names, such as {min(surplus)}"
        )


def _parts(model: Decoder, name: str, parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """The slices of a parameter that come from separate tensors of the checkpoint."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, Linear):
        return torch.split(parameter.data, list(module.part_sizes))
    return (parameter.data,)
