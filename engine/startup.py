"""Builds a core from settings: the one place that creates policy and device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.engine.blocks import BlockManager
from penstock.engine.blocks.block_keys import root_key
from penstock.engine.blocks.lasting_pool import LastingPool
from penstock.engine.config import EngineConfig, LoraConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore, Executor
from penstock.engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from penstock.engine.executor.in_process import InProcessExecutor
from penstock.engine.executor.ranks import RanksExecutor
from penstock.engine.lora.files import find_adapter
from penstock.engine.lora.quarantine import Quarantine
from penstock.engine.model_files.resolve import (
    read_generation_defaults,
    resolve_model,
    weights_fingerprint,
)
from penstock.engine.model_files.users_files import named_as_users_do
from penstock.engine.models.language_model import ImageEncoder
from penstock.engine.models.registry import is_native, read_model_config
from penstock.engine.pooling.encoder_runner import EncoderRunner
from penstock.engine.pooling.settings import read_pooling
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import Adapter
from penstock.engine.runner.model_runner import ModelRunner, RunnerInfo
from penstock.engine.scheduling import Scheduler
from penstock.kernels.cache_folder import NoCacheError, cache_dir


def build_core(
    config: EngineConfig, *, lasting_pool: LastingPool | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model, allocate its KV cache, and join both to a scheduler.

    Args:
        lasting_pool: where the KV cache lies and outlives the engine, if it can.

    Raises:
        ConfigError: a setting that cannot work, or a model that cannot be loaded.
    """
    path = resolve_model(config.model, weights=True)
    with named_as_users_do(config.model.model, path):
        return _build_core(config, path, lasting_pool)


def _build_core(
    config: EngineConfig, path: Path, lasting_pool: LastingPool | None
) -> tuple[EngineCore, EngineInfo]:
    eos_token_ids = read_generation_defaults(
        path, config.model.generation_config, config.model.generation_overrides
    ).eos_token_ids
    pooling = read_pooling(path, config.model.model)
    executor: Executor
    images: ImageEncoder | None = None
    if pooling.is_encoder:
        if config.device.num_ranks > 1:
            raise ConfigError(
                "--tensor-parallel-size and --pipeline-parallel-size are not supported for an "
                "encoder"
            )
        encoder = EncoderRunner(config, path, pooling=pooling)
        device, executor = encoder.info, InProcessExecutor(encoder)
        config = _for_encoder(config, device.max_model_len)
    elif config.device.num_ranks > 1:
        executor = RanksExecutor(config, path, eos_token_ids=eos_token_ids, pooling=pooling)
        device = executor.info
    else:
        runner = ModelRunner(
            config, path, eos_token_ids=eos_token_ids, pooling=pooling, lasting_pool=lasting_pool
        )
        device, images = runner.info, runner.images
        executor = InProcessExecutor(runner)
    cache_root = _cache_root(config, path, device)
    kv_root = root_key(cache_root, device.kv_layout.encode())
    max_steps_in_flight = _max_steps_in_flight(config, device)
    scheduler = Scheduler(
        _scheduling(config, device),
        BlockManager(
            num_blocks=device.num_blocks,
            block_size=device.block_size,
            num_host_blocks=device.num_host_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            cache_root=cache_root,
            kv_depends_on_prompt_len=device.needs_prompt_lens,
            records=None if lasting_pool is None else lasting_pool.records(kv_root),
        ),
        eos_token_ids=eos_token_ids,
        max_model_len=device.max_model_len,
        block_move_s=device.block_move_s,
        num_verify_rows=device.num_verify_rows,
        pooling=pooling,
        has_bidirectional_images=images is not None and images.has_bidirectional_images,
        num_microbatches=max_steps_in_flight if device.sends_on else 1,
    )
    core = EngineCore(
        scheduler,
        executor,
        max_steps_in_flight=max_steps_in_flight,
        lora=config.lora,
        quarantine=_quarantine(),
        images=images,
        max_image_bytes=config.cache.mm_encoder_cache_bytes,
    )
    max_adapter_bytes = executor.adapters.max_bytes
    adapters = _load_adapters(core, config.lora, max_bytes=max_adapter_bytes)
    num_block_bytes = executor.block_bytes.num_block_bytes
    info = EngineInfo(
        model=config.model.model,
        model_path=str(path),
        max_model_len=device.max_model_len,
        vocab_size=device.vocab_size,
        num_blocks=device.num_blocks,
        block_size=device.block_size,
        num_host_blocks=device.num_host_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        scheduling_policy=config.scheduler.scheduling_policy,
        dtype=device.dtype,
        device=device.device,
        eos_token_ids=eos_token_ids,
        pid=os.getpid(),
        bytes_per_block=device.bytes_per_block,
        num_threads=device.num_threads,
        quantization=device.quantization,
        weight_bytes=device.weight_bytes,
        adapters=adapters,
        max_adapter_bytes=max_adapter_bytes,
        cache_root=cache_root,
        kv_depends_on_prompt_len=device.needs_prompt_lens,
        # What engines that exchange blocks have in common; empty where nothing could be exchanged.
        kv_root=kv_root if num_block_bytes and config.cache.enable_prefix_caching else b"",
        num_block_bytes=num_block_bytes,
    )
    return core, info


def _scheduling(config: EngineConfig, device: RunnerInfo) -> SchedulerConfig:
    """The settings, with drafts that start by themselves if nothing is said of drafts, but never
    where such drafts might lose."""
    scheduling, speculation = config.scheduler, config.scheduler.speculation
    cost_little = device.drafts_cost_little
    if scheduling.speculative_config is None:
        method = "auto" if cost_little and config.device.num_ranks == 1 else "none"
    elif speculation is not None and speculation.method == "auto" and not cost_little:
        method = "none"
    else:
        return scheduling
    return replace(scheduling, speculative_config={"method": method})


def _max_steps_in_flight(config: EngineConfig, device: RunnerInfo) -> int:
    speculation = config.scheduler.speculation
    if device.sends_on and speculation is not None and speculation.model is not None:
        return 1  # every rank guesses alike only if all know the same tokens
    if config.scheduler.max_steps_in_flight is not None:
        return config.scheduler.max_steps_in_flight
    if device.sends_on:
        return config.device.pipeline_parallel_size
    return 1 + device.async_scheduling


def _for_encoder(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The settings with which each text is computed whole, and leaves nothing to share."""
    most = max(config.scheduler.max_num_batched_tokens, max_model_len)
    return replace(
        config,
        scheduler=replace(
            config.scheduler, enable_chunked_prefill=False, max_num_batched_tokens=most
        ),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def _quarantine() -> Quarantine | None:
    try:
        return Quarantine(cache_dir() / "adapters-being-read")
    except NoCacheError:  # no place for it
        return None


def _load_adapters(core: EngineCore, lora: LoraConfig, *, max_bytes: int) -> tuple[Adapter, ...]:
    """Check the adapters of the command line by reading each; the latest stay in memory.

    Raises:
        ConfigError: one cannot be used.
    """
    found = []
    for name, path in lora.modules.items():
        try:
            rank = lora.max_lora_rank
            found.append(find_adapter(name, path, max_rank=rank, max_bytes=max_bytes))
            core.preparation.load(core.adapters.need(found[-1]))
        except (ModelLoadError, InvalidRequestError) as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error
    return tuple(found)


def _cache_root(config: EngineConfig, path: Path, device: RunnerInfo) -> bytes:
    """Everything that a KV block depends on besides its tokens; the same in every process."""
    weights = (
        f"dummy {config.model.seed or 0}".encode()
        if config.model.load_format == "dummy"
        else weights_fingerprint(path)
    )
    model = config.model
    types = (
        f"{device.dtype} {device.kv_cache_dtype} {model.quantization} "
        f"{model.quantization_rules} {model.quantize_activations}"
    )
    if not is_native(model, path):  # other code rounds elsewhere
        types += " transformers"
    elif read_model_config(path, max_model_len=model.wanted_max_model_len)[1].has_long_rope:
        types += " longrope"  # the same weights turn other keys for shorter sequences
    return weights + f" {types} {device.block_size}".encode()
