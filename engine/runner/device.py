"""Start-up choices: device, graphs, KV dtype and context length."""

from __future__ import annotations

import torch

from penstock.engine.config import CacheConfig, CudagraphMode, DeviceConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.models.language_model import LoadedModel
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.kernels.cpu.cores import num_usable_cores


def select_device(config: DeviceConfig, ranks: Ranks = ALONE) -> torch.device:
    """The device to run on, of several GPUs that of the rank's number; sets the number of CPU
    threads of this process.

    Raises:
        ConfigError: CUDA is requested but not available.
    """
    torch.set_num_threads(
        config.num_threads or max(1, _default_num_threads() // ranks.num_on_cores)
    )
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch found no CUDA device; use --device cpu")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    if ranks.size > 1:
        num_gpus = torch.cuda.device_count()
        if ranks.size > num_gpus:
            raise ConfigError(
                f"--tensor-parallel-size {ranks.size} needs as many GPUs, and there are {num_gpus}"
            )
        torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", torch.cuda.current_device())


def resolve_cudagraph_mode(config: DeviceConfig, device: torch.device) -> CudagraphMode:
    """The graph mode for this device: `none`, `piecewise` or `full`.

    Raises:
        ConfigError: graphs are requested on a CPU.
    """
    mode = config.cudagraph_mode
    if device.type == "cuda":
        return "full" if mode == "auto" else mode
    if mode in ("piecewise", "full"):
        raise ConfigError(f"--cudagraph-mode {mode} needs a GPU: leave it out")
    return "none"


def check_kv_dtype(config: CacheConfig, device: torch.device) -> None:
    """Refuse a KV cache that the device's kernels cannot read.

    Raises:
        ConfigError: int8 on a GPU.
    """
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        raise ConfigError("--kv-cache-dtype int8 needs a CPU: use fp8, or --device cpu")


def resolve_kv_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache, for a model in `dtype`."""
    kinds = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    return kinds[config.kv_cache_dtype]


def use_kv_dtype(model: LoadedModel, dtype: torch.dtype) -> None:
    """Have a model store keys and values in this dtype."""
    if dtype == torch.float8_e4m3fn:
        model.use_fp8_cache()
    elif dtype == torch.int8:
        model.use_int8_cache()


def resolve_max_model_len(config: ModelConfig, context_len: int) -> int:
    """Maximum number of tokens of a sequence: as configured, or the model's context.

    Raises:
        ConfigError: more than the model's context.
    """
    if config.wanted_max_model_len is None:
        return context_len
    if not 1 <= config.wanted_max_model_len <= context_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is not between 1 and the model's "
            f"{context_len} positions (max_position_embeddings with rope scaling)"
        )
    return config.wanted_max_model_len


def _default_num_threads() -> int:
    """All cores but one, which is left to the gateway and its clients.

    torch's threads spin at every barrier of a step: if one of them shares its core with another
    process, all wait for it. The CPU kernels' pool does not wait, and uses all cores (`backends`).
    """
    return max(1, num_usable_cores() - 1)
