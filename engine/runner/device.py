"""Start-up choices: the device, and the context a model is run with."""

from __future__ import annotations

import os

import torch

from penstock.engine.config import DeviceConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.models.decoder_config import DecoderConfig


def select_device(config: DeviceConfig) -> torch.device:
    """The device to run on; sets the number of CPU threads of this process.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if config.num_threads is not None and config.num_threads < 1:
        raise ConfigError(f"the number of CPU threads must be positive: {config.num_threads}")
    torch.set_num_threads(config.num_threads or _default_num_threads())
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def settle_max_model_len(config: ModelConfig, decoder: DecoderConfig) -> int:
    """Tokens of a sequence at most: as configured, or all the model can see.

    Raises:
        ConfigError: more is asked for than the model was made for.
    """
    if config.max_model_len is None:
        return decoder.context_len
    if not 1 <= config.max_model_len <= decoder.context_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is not between 1 and the model's "
            f"{decoder.context_len} positions (max_position_embeddings with rope scaling)"
        )
    return config.max_model_len


def _default_num_threads() -> int:
    """All cores but one, which is the gateway's and its clients'.

    torch's threads spin at every barrier of a step: where one of them shares its core with another
    process, all wait for it. On two idle cores a second thread gains a small model little;
    beside one busy process it costs most of the speed.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, num_cores - 1)
