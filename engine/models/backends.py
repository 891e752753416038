"""Picks the implementation of a model: C on a CPU where it can run, otherwise torch."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.errors import ConfigError
from penstock.engine.layers.adapters import TorchAdapters
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.cpu_decoder import CpuDecoder, StepOutput, can_run
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import LanguageModel, TorchModel
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.token_masks import TokenMasks


def cpu_kernels(
    decoder: Decoder, block_size: int, *, num_threads: int | None = None
) -> CpuLibrary | None:
    """The kernels for a decoder on a CPU; None on a GPU or without a compiler.

    Args:
        block_size: of the KV cache.
        num_threads: None uses one per core.
    """
    library = load_library(decoder.dtype) if decoder.device.type == "cpu" else None
    if library is not None and can_run(decoder.config, block_size):
        library.start_threads(num_threads or num_usable_cores())
        torch.set_num_threads(1)  # torch computes little now, and must not wake a second pool
    return library


def check_deterministic(decoder: Decoder, block_size: int, library: CpuLibrary | None) -> None:
    """Refuse a decoder that the C kernels cannot run: the order of torch's sums depends on the
    batch.

    Raises:
        ConfigError: with the reason why the kernels cannot run.
    """
    config = decoder.config
    if library is None:
        reason = "they could not be compiled (see the log)"
    elif not can_run(config, block_size):
        reason = (
            f"they do not support head size {config.head_dim}, hidden size {config.hidden_size}, "
            f"intermediate size {config.intermediate_size} and block size {block_size} together"
        )
    else:
        return
    raise ConfigError(f"--deterministic needs the CPU kernels, and {reason}")


def fastest(decoder: Decoder, block_size: int, library: CpuLibrary | None) -> LanguageModel:
    """The fastest implementation of the decoder on its device; takes over the weights."""
    if library is not None and can_run(decoder.config, block_size):
        return CpuDecoder(decoder, library)
    return decoder


def running_library(model: TorchModel, block_size: int) -> CpuLibrary | None:
    """The kernels if they will run a model that is a decoder."""
    if not isinstance(model, Decoder) or not can_run(model.config, block_size):
        return None
    return load_library(model.dtype) if model.device.type == "cpu" else None


def run_step(
    model: LanguageModel,
    input_ids: Tensor,
    context: ForwardContext,
    sampled_tokens: Tensor | None,
    parameters: Tensor | None,
    draws: Tensor | None,
    masks: TokenMasks | None = None,
) -> StepOutput:
    """One step, including drawn tokens if the model draws them; arguments as in
    `CpuDecoder.step`."""
    if isinstance(model, CpuDecoder):
        return model.step(input_ids, context, sampled_tokens, parameters, draws, masks)
    hidden = model(input_ids, context)
    rows = hidden if sampled_tokens is None else hidden[sampled_tokens]
    logits = model.logits(rows)
    if not isinstance(model, Decoder):
        return StepOutput(hidden=hidden, logits=logits)
    if isinstance(model.head_adapters, TorchAdapters):
        model.head_adapters.add(logits, rows)
    return StepOutput(hidden=hidden, logits=logits, features=model.features)
