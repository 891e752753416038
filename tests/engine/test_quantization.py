"""int8 from a setting to tokens: by the C kernels, and in torch, which says what they compute.

Tolerances of int8 beside the weights as they are: logits of random models move by less than a
tenth, and those of the demo model too (`tests/load/test_quantization_bench.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine import LLM, ConfigError, SamplingParams
from penstock.engine.config import (
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Quantization,
)
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.cpu_decoder import CpuDecoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.startup import build_core
from penstock.kernels.paged_layout import PagedLayout

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_TOKENS = 45
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in ("What is paged attention?", "Spell walnut.", "Count to 12.", "Who are you?")
]


def load(
    path: Path, quantization: Quantization, *, in_torch: bool = False, dtype: str = "float32"
) -> LanguageModel:
    config = ModelConfig(dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    decoder = load_model(config, path, CPU)
    library = None if in_torch else cpu_kernels(decoder, BLOCK_SIZE)
    model = fastest(decoder, BLOCK_SIZE, library)
    assert isinstance(model, Decoder if in_torch else CpuDecoder)
    return model


@torch.inference_mode()
def logits(model: LanguageModel, chunks: tuple[int, ...] = (NUM_TOKENS,)) -> Tensor:
    """Of random tokens in chunks of these sizes: [NUM_TOKENS, vocab_size]"""
    token_ids = torch.randint(0, 160, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    shape = KVShape.of(model.kv_spec, BLOCK_SIZE)
    pool = shape.allocate(3, CPU).fill_(torch.nan)
    parts = []
    for positions in torch.arange(NUM_TOKENS).split(list(chunks)):
        seq_len = int(positions[-1]) + 1
        layout = PagedLayout(
            query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_tables=torch.arange(3, dtype=torch.int32)[None],
            slot_mapping=positions,
            max_query_len=len(positions),
            max_seq_len=seq_len,
        )
        context = ForwardContext(
            kv_pool=pool, layout=layout, positions=positions, prompt_lens=positions
        )
        parts.append(model.logits(model(token_ids[positions], context)).float().clone())
    return torch.cat(parts)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_kernels_and_torch_round_alike(architecture: str, tiny_checkpoint: Callable[..., Path]):
    """Between them only what float32 rounds differently, and now and then a byte for that; far
    less than int8 itself changes."""
    path = tiny_checkpoint(architecture)
    exact = logits(load(path, "none"))
    kernels, in_torch = (logits(load(path, "int8", in_torch=each)) for each in (False, True))
    assert 0.005 < relative_error(in_torch, exact) < 0.1
    assert relative_error(kernels, in_torch) < 0.1 * relative_error(in_torch, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision(dtype: str, tiny_checkpoint: Callable[..., Path]):
    path = tiny_checkpoint("Qwen3ForCausalLM", dtype=dtype)
    exact = logits(load(path, "none"))
    for in_torch in (False, True):
        result = logits(load(path, "int8", in_torch=in_torch, dtype=dtype))
        assert 0.005 < relative_error(result, exact) < 0.1


def test_chunks_do_not_change_a_bit(tiny_checkpoint: Callable[..., Path]):
    path = tiny_checkpoint()
    whole = logits(load(path, "int8"))
    assert torch.equal(logits(load(path, "int8"), (7, 1, 16, 4, 3, 14)), whole)
    assert torch.equal(logits(load(path, "int8"), (30, *[1] * 15)), whole)


def test_a_byte_a_weight_and_the_originals_are_dropped(tiny_checkpoint: Callable[..., Path]):
    path = tiny_checkpoint()
    decoder = load_model(ModelConfig(quantization="int8"), path, CPU)
    int8 = fastest(decoder, BLOCK_SIZE, cpu_kernels(decoder, BLOCK_SIZE))
    whole = load(path, "none")
    assert len(decoder.linears) == 4 * decoder.config.num_layers
    assert all(each.weight.numel() == 0 and each.scales is None for each in decoder.linears)
    assert isinstance(int8, CpuDecoder)
    assert isinstance(whole, CpuDecoder)
    for layer, original in zip(int8._layers, whole._layers, strict=True):
        assert layer.num_weights < layer.num_bytes < 1.2 * layer.num_weights  # and scales
        assert original.num_bytes == 4 * original.num_weights


def test_in_torch_it_is_a_byte_a_weight_too(tiny_checkpoint: Callable[..., Path]):
    int8, whole = (
        load_model(ModelConfig(quantization=quantization), tiny_checkpoint(), CPU)
        for quantization in ("int8", "none")
    )
    num_bytes = sum(each.nbytes for each in whole.layers.parameters())
    assert sum(each.nbytes for each in int8.layers.parameters()) < 0.3 * num_bytes


def test_a_gpu_is_refused(tiny_checkpoint: Callable[..., Path]):
    with pytest.raises(ConfigError, match="--quantization int8 needs a CPU"):
        load_model(ModelConfig(quantization="int8"), tiny_checkpoint(), torch.device("cuda"))


def test_kv_of_other_weights_is_not_shared():
    roots = set()
    for quantization in QUANTIZATIONS:
        config = EngineConfig(
            model=ModelConfig(quantization=quantization), cache=CacheConfig(num_blocks=128)
        )
        core, info = build_core(config)
        assert info.quantization == quantization
        roots.add(core.scheduler.blocks._prefixes._cache_root)
        core.close()
    assert len(roots) == len(QUANTIZATIONS)


def test_the_demo_model_answers_the_same(monkeypatch: pytest.MonkeyPatch):
    """As it is, in int8, and in int8 without a compiler."""
    params = SamplingParams(temperature=0.0, max_tokens=48)

    def answers(quantization: Quantization) -> list[str]:
        with LLM(quantization=quantization, dtype="float32", max_model_len=512) as llm:
            results = llm.chat(QUESTIONS, params, use_tqdm=False)
            return [result.outputs[0].text for result in results]

    expected = answers("none")
    assert "blocks" in expected[0]
    assert answers("int8") == expected
    monkeypatch.setenv("CC", "no-such-compiler")
    assert answers("int8") == expected
