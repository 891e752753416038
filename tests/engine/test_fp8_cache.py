"""An FP8 cache on a CPU: the kernels give what torch gives, with a checkpoint's scales too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine import ModelLoadError, SamplingParams
from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.loader import load_model
from penstock.engine.startup import build_core

from .greedy_parity import requests, run
from .quantized_models import BLOCK_SIZE, CPU, load, logits, relative_error

WEIGHTS = "model.safetensors"
SCALES = {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor([0.125, 0.5])}


@pytest.fixture
def scaled(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The tiny model with such tensors in each layer."""

    def write(scales: dict[str, Tensor]) -> Path:
        source = tiny_checkpoint("Qwen3ForCausalLM")
        tensors = load_file(source / WEIGHTS)
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            tensors |= {f"{prefix}.{name}": each.clone() for name, each in scales.items()}
        save_file(tensors, tmp_path / WEIGHTS)
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        return tmp_path

    return write


def fp8_logits(path: Path, *, in_torch: bool, dtype: str = "float32") -> Tensor:
    decoder = load_model(ModelConfig(dtype=dtype), path, CPU)  # type: ignore[arg-type]
    decoder.use_fp8_cache()
    library = None if in_torch else cpu_kernels(decoder, BLOCK_SIZE)
    return logits(fastest(decoder, BLOCK_SIZE, library))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [{}, SCALES])
def test_kernels_and_torch_agree(
    dtype: str, scales: dict[str, Tensor], scaled: Callable[..., Path]
):
    path = scaled(scales)
    exact = logits(load(path, "none", dtype=dtype))
    kernels, in_torch = (fp8_logits(path, in_torch=each, dtype=dtype) for each in (False, True))
    assert 0.005 < relative_error(kernels, exact) < 0.2
    assert relative_error(kernels, in_torch) < (0.01 if dtype == "float32" else 0.05)


def test_the_scales_of_a_checkpoint(scaled: Callable[..., Path]):
    decoder = load_model(ModelConfig(), scaled(SCALES), CPU)
    attention = decoder.layers[1].self_attn.attention
    assert attention.key_scale is None
    decoder.use_fp8_cache()
    assert attention.key_scale.tolist() == [0.25, 0.25]
    assert attention.value_scale.tolist() == [0.125, 0.5]
    path = scaled({f"{name[0]}_proj.{name}": each for name, each in SCALES.items()})
    decoder = load_model(ModelConfig(), path, CPU)
    decoder.use_fp8_cache()
    assert decoder.layers[0].self_attn.attention.value_scale.tolist() == [0.125, 0.5]


def test_scales_of_another_shape_are_refused(scaled: Callable[..., Path]):
    path = scaled({**SCALES, "v_scale": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"self_attn\.v_scale has shape \[3\]"):
        load_model(ModelConfig(), path, CPU)


def test_swapped_blocks_come_back(tiny_checkpoint: Callable[..., Path]):
    """In a pool that is too small for all at once, streams get the same tokens."""

    def tokens(num_blocks: int) -> tuple[dict[str, list[int]], int]:
        config = EngineConfig(
            model=ModelConfig(model=str(tiny_checkpoint())),
            cache=CacheConfig(kv_cache_dtype="fp8", num_blocks=num_blocks, num_host_blocks=400),
            device=DeviceConfig(device="cpu"),
        )
        core, _ = build_core(config)
        found = run(core, requests(SamplingParams(temperature=0.0, max_tokens=24)))
        return found, core.scheduler.counters.num_preemptions

    few, num_preemptions = tokens(40)
    assert num_preemptions > 0
    assert few == tokens(400)[0]
