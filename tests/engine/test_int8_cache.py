"""An int8 cache: the kernels give what torch gives, blocks keep their bytes, answers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.engine import SamplingParams
from penstock.engine.config import (
    KV_CACHE_DTYPES,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loader import load_model
from penstock.engine.request import Request
from penstock.engine.runner.device import check_kv_dtype
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.startup import build_core
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import engine_config, resolve_settings
from penstock.load.quality import held_out_texts

from .greedy_parity import requests
from .quantized_models import BLOCK_SIZE, CPU, NUM_TOKENS, load, logits, relative_error

SAMPLES = SamplingParams(temperature=0.9, n=2, max_tokens=24)


def decoder_with(kind: KVCacheDType, path: Path, *, dtype: str) -> Decoder:
    decoder = load_model(ModelConfig(dtype=dtype), path, CPU)  # type: ignore[arg-type]
    if kind == "int8":
        decoder.use_int8_cache()
    elif kind == "fp8":
        decoder.use_fp8_cache()
    return decoder


def int8_logits(path: Path, *, in_torch: bool, dtype: str, **how: Any) -> Tensor:
    decoder = decoder_with("int8", path, dtype=dtype)
    library = None if in_torch else cpu_kernels(decoder, BLOCK_SIZE)
    return logits(fastest(decoder, BLOCK_SIZE, library), **how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "MistralForCausalLM"])
def test_kernels_and_torch_agree(
    architecture: str, dtype: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(architecture)
    exact = logits(load(path, "none", dtype=dtype))
    kernels, in_torch = (int8_logits(path, in_torch=each, dtype=dtype) for each in (False, True))
    assert 0.0005 < relative_error(kernels, exact) < 0.03
    assert relative_error(kernels, in_torch) < (0.001 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_no_bit(dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint()
    whole = int8_logits(path, in_torch=False, dtype=dtype)
    for chunks in ((1, 15, 16, 13), (44, 1)):
        assert sum(chunks) == NUM_TOKENS
        assert torch.equal(int8_logits(path, in_torch=False, dtype=dtype, chunks=chunks), whole)


def test_logits_of_the_demo_model_are_closer_than_in_fp8() -> None:
    path = resolve_model(ModelConfig(), weights=True)
    texts = held_out_texts(path, num_texts=4, seed=1, context_len=512)
    models = {}
    for kind in KV_CACHE_DTYPES:
        decoder = decoder_with(kind, path, dtype="float32")
        models[kind] = fastest(decoder, BLOCK_SIZE, cpu_kernels(decoder, BLOCK_SIZE))
    errors: dict[KVCacheDType, list[float]] = {"int8": [], "fp8": []}
    for text in texts:
        tokens = torch.tensor(text.token_ids)
        exact = logits(models["auto"], token_ids=tokens)
        for kind, found in errors.items():
            result = logits(models[kind], token_ids=tokens)
            found.append(relative_error(result, exact))
            if kind == "int8":
                same = (result.argmax(1) == exact.argmax(1)).float().mean()
                assert same > 0.98
    print({kind: [f"{error:.4f}" for error in found] for kind, found in errors.items()})
    for int8, fp8 in zip(errors["int8"], errors["fp8"], strict=True):
        assert int8 < 0.03
        assert int8 < fp8 / 2


def core_with(path: Path, **cache: Any) -> EngineCore:
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path)),
            cache=CacheConfig(**{"kv_cache_dtype": "int8", "num_host_blocks": 400, **cache}),
            scheduler=SchedulerConfig(preemption="swap"),
            device=DeviceConfig(device="cpu"),
        )
    )
    return core


def answers(core: EngineCore, asked: list[Request]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each sample."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for request in asked:
        core.add(request)
    while core.has_work():
        for output in core.step():
            name = output.request_id.removesuffix(" again")
            tokens.setdefault((name, output.index), []).extend(output.token_ids)
        core.scheduler.blocks.check_integrity()
    return tokens


def test_swapped_blocks_come_back(tiny_checkpoint: Callable[..., Path]) -> None:
    """In a pool that is too small for all at once, streams get the same tokens."""
    many, few = (core_with(tiny_checkpoint(), num_blocks=blocks) for blocks in (400, 40))
    assert answers(few, requests(SAMPLES)) == answers(many, requests(SAMPLES))
    assert few.scheduler.counters.num_swaps > 0
    assert many.scheduler.counters.num_preemptions == 0


def test_hits_and_forks_have_the_same_tokens(tiny_checkpoint: Callable[..., Path]) -> None:
    """What continues from a block that is partly filled copies it, with its scales."""
    cached = core_with(tiny_checkpoint(), num_blocks=400)
    cold = core_with(tiny_checkpoint(), num_blocks=400, enable_prefix_caching=False)
    expected = answers(cold, requests(SAMPLES))
    assert len(expected) == 2 * len(requests(SAMPLES))
    assert answers(cached, requests(SAMPLES)) == expected
    again = [replace(each, request_id=f"{each.request_id} again") for each in requests(SAMPLES)]
    assert answers(cached, again) == expected
    counters = cached.scheduler.blocks.counters
    assert counters.num_copied > 0
    assert counters.prefix_hits > 0


def test_the_bytes_of_a_block(tiny_checkpoint: Callable[..., Path]) -> None:
    decoder = decoder_with("auto", tiny_checkpoint(), dtype="bfloat16")
    exact = KVShape.of(decoder.state_spec, BLOCK_SIZE)
    decoder.use_int8_cache()
    shape = KVShape.of(decoder.state_spec, BLOCK_SIZE)
    head_dim = decoder.config.head_dim
    assert exact.bytes_per_block * (head_dim + 4) == shape.bytes_per_block * 2 * head_dim
    pool = shape.allocate(3, CPU)
    assert pool.nbytes == 3 * shape.bytes_per_block
    assert (pool.dtype, pool.shape[-1]) == (torch.int8, head_dim + 4)


def test_kv_of_another_dtype_is_not_shared() -> None:
    roots = set()
    for kind in KV_CACHE_DTYPES:
        cache = CacheConfig(num_blocks=128, kv_cache_dtype=kind)
        core, _ = build_core(EngineConfig(cache=cache, device=DeviceConfig(device="cpu")))
        roots.add(core.scheduler.blocks._prefixes._cache_root)
        core.close()
    assert len(roots) == len(KV_CACHE_DTYPES)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype="int8"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs a CPU: use fp8, or"):
        ModelRunner(config, Path("none"))
    check_kv_dtype(config.cache, CPU)
    check_kv_dtype(CacheConfig(kv_cache_dtype="fp8"), torch.device("cuda"))


def test_it_is_a_flag() -> None:
    words = ["serve", "--kv-cache-dtype", "int8"]
    config = engine_config(resolve_settings(vars(_parser().parse_args(words)), {}))
    assert config.cache.kv_cache_dtype == "int8"
