"""Picks the implementation of a model: C on a CPU where it can run, otherwise torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.models.cpu_model import CpuModel, can_run
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import LanguageModel, LoadedModel
from penstock.engine.models.torch_model import TorchModel
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import CpuLibrary, load_library

if TYPE_CHECKING:
    from penstock.engine.models.through_transformers.backend import TransformersModel


def cpu_kernels(
    model: Decoder | TransformersModel,
    block_size: int,
    *,
    num_threads: int | None = None,
    num_ranks: int = 1,
) -> CpuLibrary | None:
    """The kernels for a model on a CPU; None on a GPU or without a compiler.

    Args:
        block_size: of the KV cache.
        num_threads: None uses one per core.
        num_ranks: that share the cores.
    """
    library = load_library(model.dtype) if model.device.type == "cpu" else None
    if library is None or (isinstance(model, Decoder) and not can_run(model.config, block_size)):
        return library
    library.start_threads(num_threads or max(1, num_usable_cores() // num_ranks))
    if isinstance(model, Decoder) or not model.has_fused_experts:
        torch.set_num_threads(1)  # torch computes little now, and must not wake a second pool
    return library


def check_deterministic(
    model: Decoder | TransformersModel, block_size: int, library: CpuLibrary | None
) -> None:
    """Refuse a model that the C kernels cannot run: the order of torch's sums depends on the
    batch. Of a model through `transformers`, `fastest` sees what they leave to torch.

    Raises:
        ConfigError: with the reason why the kernels cannot run.
    """
    if library is None:
        reason = "they could not be compiled (see the log)"
    elif not isinstance(model, Decoder):
        return
    elif not can_run(config := model.config, block_size):
        reason = (
            f"they do not support head size {config.head_dim}, hidden size {config.hidden_size}, "
            f"intermediate size {config.intermediate_size} and block size {block_size} together"
        )
    else:
        return
    raise ConfigError(f"--deterministic needs the CPU kernels, and {reason}")


def fastest(
    model: Decoder | TransformersModel,
    block_size: int,
    library: CpuLibrary | None,
    *,
    deterministic: bool = False,
) -> LanguageModel:
    """The fastest implementation of the model on its device; takes over the weights.

    Raises:
        ConfigError: in deterministic mode, names an operation that depends on the batch.
        ModelLoadError: of experts that were still to be read.
    """
    if isinstance(model, Decoder):
        if library is not None and can_run(model.config, block_size):
            return CpuModel(model, library)
        _load_experts(model)
        return TorchModel(model)
    if library is not None:
        model.use_cpu_kernels(library, block_size, deterministic=deterministic)
    model.check_rows(block_size)
    return model


def _load_experts(decoder: Decoder) -> None:
    expected, free = decoder.expected_bytes, free_cpu_bytes() if decoder.expected_bytes else 0
    if expected > free:
        raise ModelLoadError(
            f"the experts take {expected:,} bytes, and memory has {free:,} free: without the CPU "
            "kernels all of them must be in it"
        )
    for experts in decoder.expert_matrices:
        experts.load()


def running_library(model: LoadedModel, block_size: int) -> CpuLibrary | None:
    """The kernels if they will run a model that is a decoder."""
    if not isinstance(model, Decoder) or not can_run(model.config, block_size):
        return None
    return load_library(model.dtype) if model.device.type == "cpu" else None


def in_torch(model: LoadedModel) -> LanguageModel:
    """The model as torch runs it, whose weights stay where they are."""
    return TorchModel(model) if isinstance(model, Decoder) else cast("LanguageModel", model)
