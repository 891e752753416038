"""The engine on a CUDA device (`make gpu`): the tokens of `transformers`, and the same tokens with
and without graphs, overlap and pressure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import (
    CacheConfig,
    CudagraphMode,
    DeviceConfig,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    PreemptionMode,
    Quantization,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import SamplingParams
from penstock.engine.runner.cuda_graphs import GraphedModel
from penstock.engine.startup import build_core
from tests.support.peft_models import PeftAnswers, write_adapter

from .greedy_parity import (
    ARCHITECTURES,
    NUM_NEW,
    SCHEDULES,
    check_greedy_parity,
    engine,
    requests,
    run,
)
from .lora.test_parity import NUM_NEW as NUM_ADAPTED
from .lora.test_parity import engine as adapted_engine
from .lora.test_parity import requests_for
from .lora.test_parity import run as run_adapted
from .test_launched_ahead import GRAPHS, KINDS, ROOMY, TIGHT, check_same, outputs
from .weights.quantized_checkpoints import rewrite
from .weights.test_quantized_checkpoints import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = DeviceConfig(device="cuda")


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def build(
    path: Path,
    schedule: SchedulerConfig,
    num_blocks: int,
    *,
    device: DeviceConfig = CUDA,
    dtype: DType = "float32",
    kv_cache_dtype: KVCacheDType = "auto",
    **model: Any,
) -> EngineCore:
    """model: other fields of `ModelConfig`."""
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype=dtype, **model),
            cache=CacheConfig(
                num_blocks=num_blocks, num_host_blocks=300, kv_cache_dtype=kv_cache_dtype
            ),
            scheduler=schedule,
            device=device,
        )
    )
    return core


@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(
    name: str, schedule: str, mode: CudagraphMode, expected_tokens: Callable[[str], Any]
) -> None:
    device = replace(CUDA, cudagraph_mode=mode)
    check_greedy_parity(name, schedule, expected_tokens, device=device)


@pytest.mark.parametrize("mode", GRAPHS)
def test_tokens_with_adapters_equal_pefts(
    mode: CudagraphMode, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path, answers = tiny_checkpoint("LlamaForCausalLM"), PeftAnswers()
    write_adapter(path, tmp_path, 3)
    core = adapted_engine(path, device=replace(CUDA, cudagraph_mode=mode))
    asked = requests_for({"adapted": tmp_path, "base": None})
    expected = {
        name: answers(path, adapter, list(request.prompt_token_ids), NUM_ADAPTED)
        for name, (request, adapter) in asked.items()
    }
    assert run_adapted(core, [request for request, _ in asked.values()]) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_under_pressure_every_request_gets_what_it_gets_alone_on_the_card(
    preemption: PreemptionMode,
    mode: CudagraphMode,
    kind: str,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Graphs, two steps in flight and swaps beside them, against one eager step after the other;
    deterministic, so that every token has to be the same."""
    path = tiny_checkpoint("LlamaForCausalLM")
    asked = requests(SamplingParams(**({"max_tokens": NUM_NEW, "ignore_eos": True} | KINDS[kind])))
    one_by_one = replace(ROOMY, max_steps_in_flight=1)
    eager = replace(CUDA, cudagraph_mode="none", deterministic=True)
    expected = outputs(build(path, one_by_one, 400, device=eager), asked)
    tight = replace(ROOMY, preemption=preemption)
    core = build(path, tight, TIGHT, device=replace(CUDA, cudagraph_mode=mode, deterministic=True))
    assert isinstance(core._executor._runner._model, GraphedModel) == (mode != "none")
    check_same(outputs(core, asked), expected)
    assert core.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_deterministic_tokens_and_logprobs_are_the_same_to_the_bit(
    kv_cache_dtype: KVCacheDType, dtype: DType, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Alone, together, in chunks of other sizes, from graphs or not, preempted, and drafted."""
    path = tiny_checkpoint("LlamaForCausalLM")
    params = SamplingParams(temperature=0.8, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
    deterministic = replace(CUDA, deterministic=True)

    def answers(schedule: SchedulerConfig, num_blocks: int, device: DeviceConfig) -> Any:
        core = build(path, schedule, num_blocks, device=device, dtype=dtype,
                     kv_cache_dtype=kv_cache_dtype)  # fmt: skip
        return outputs(core, asked)

    asked = requests(params)
    expected = answers(replace(ROOMY, max_num_seqs=1), 400, deterministic)
    for schedule, num_blocks, device in (
        (ROOMY, 400, deterministic),
        (replace(ROOMY, max_num_batched_tokens=200), 400, deterministic),
        (replace(ROOMY, preemption="recompute"), TIGHT, deterministic),
        (replace(ROOMY, preemption="swap"), TIGHT, replace(deterministic, cudagraph_mode="none")),
        (replace(ROOMY, max_num_seqs=5, speculative_config={"model": str(path)}), 400,
         deterministic),
    ):  # fmt: skip
        found = answers(schedule, num_blocks, device)
        for key, answer in found.items():
            assert answer.tokens == expected[key].tokens
            assert answer.logprobs == expected[key].logprobs  # every bit


def test_an_fp8_cache_holds_twice_as_much_and_says_nearly_the_same() -> None:
    """The demo model: most of its greedy tokens stay, and a block takes half the bytes."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    found = {}
    for kv_cache_dtype in ("auto", "fp8"):
        config = EngineConfig(
            model=ModelConfig(dtype="bfloat16"),
            cache=CacheConfig(num_blocks=400, kv_cache_dtype=kv_cache_dtype),
            device=CUDA,
        )
        core, info = build_core(config)
        found[kv_cache_dtype] = info.bytes_per_block, run(core, requests(params))
    assert found["auto"][0] == 2 * found["fp8"][0]
    pairs = [
        pair
        for name, tokens in found["auto"][1].items()
        for pair in zip(tokens[:8], found["fp8"][1][name][:8], strict=True)
    ]
    assert sum(a == b for a, b in pairs) > 0.5 * len(pairs)


@pytest.mark.parametrize(("quantization", "at_most"), [("int8", 0.6), ("fp8", 0.6), ("int4", 0.4)])
def test_quantized_weights_take_fewer_bytes_and_say_nearly_the_same(
    quantization: Quantization, at_most: float
) -> None:
    """The demo model, with graphs: most of its first greedy tokens stay."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    found = {}
    for kind in ("none", quantization):
        config = EngineConfig(
            model=ModelConfig(dtype="bfloat16", quantization=kind),
            cache=CacheConfig(num_blocks=400),
            device=CUDA,
        )
        core, info = build_core(config)
        assert info.quantization == kind
        found[kind] = info.weight_bytes, run(core, requests(params))
    assert found[quantization][0] < at_most * found["none"][0]
    pairs = [
        pair
        for name, tokens in found["none"][1].items()
        for pair in zip(tokens[:8], found[quantization][1][name][:8], strict=True)
    ]
    assert sum(a == b for a, b in pairs) > 0.4 * len(pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantized_and_deterministic_tokens_are_the_same_to_the_bit(
    quantization: Quantization, dtype: DType, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Eager and one by one, or together, from graphs and preempted."""
    path = tiny_checkpoint("LlamaForCausalLM")
    params = SamplingParams(temperature=0.8, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
    asked, deterministic = requests(params), replace(CUDA, deterministic=True)
    alone = replace(ROOMY, max_num_seqs=1)
    eager = replace(deterministic, cudagraph_mode="none")
    model = {"dtype": dtype, "quantization": quantization}
    expected = outputs(build(path, alone, 400, device=eager, **model), asked)
    for schedule, num_blocks in ((ROOMY, 400), (replace(ROOMY, preemption="recompute"), TIGHT)):
        found = outputs(build(path, schedule, num_blocks, device=deterministic, **model), asked)
        for key, answer in found.items():
            assert answer.tokens == expected[key].tokens
            assert answer.logprobs == expected[key].logprobs  # every bit


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_every_format_say_what_they_say_on_a_cpu(
    case: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """In float32, with inputs as they are: the first greedy tokens of nearly all prompts."""
    write, config = CASES[case]
    source = tiny_checkpoint("Qwen2ForCausalLM", intermediate_size=96)
    rewrite(source, tmp_path, write, {"quant_method": "compressed-tensors", **config})
    asked = requests(SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    found, expected = (
        run(build(tmp_path, ROOMY, 400, device=device, quantize_activations=False), asked)
        for device in (CUDA, DeviceConfig(device="cpu"))
    )
    assert sum(found[name] == expected[name] for name in expected) >= len(expected) - 2


def test_graphs_and_pool_stay_within_the_share_of_memory() -> None:
    """Sized from what is free, as a server does."""
    share, slack = 0.3, 1 << 30
    before = torch.cuda.mem_get_info()[0]
    config = EngineConfig(cache=CacheConfig(gpu_memory_utilization=share), device=CUDA)
    core, _ = build_core(config)
    free, total = torch.cuda.mem_get_info()
    assert before - free <= share * total + slack
    assert isinstance(core._executor._runner._model, GraphedModel)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_demo_model_runs_in_every_dtype(dtype: DType) -> None:
    config = EngineConfig(
        model=ModelConfig(dtype=dtype),
        # Sized from what is free, as a server does.
        cache=CacheConfig(gpu_memory_utilization=0.3),
        scheduler=SCHEDULES["chunked"][0],
        device=CUDA,
    )
    core, info = build_core(config)
    assert info.device.startswith("cuda")
    assert info.num_blocks * info.block_size >= info.max_model_len
    tokens = run(core, requests(SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_NEW)))
    assert all(tokens.values())


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_preempted_streams_equal_undisturbed_ones(
    preemption: PreemptionMode, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("LlamaForCausalLM")
    params = SamplingParams(temperature=0.9, max_tokens=NUM_NEW, ignore_eos=True)
    schedule = SchedulerConfig(max_num_batched_tokens=64, preemption=preemption)
    roomy = engine(path, schedule, 400, device=CUDA)
    tight = engine(path, schedule, 24, device=CUDA)
    assert run(tight, requests(params)) == run(roomy, requests(params))
    assert tight.scheduler.counters.num_preemptions > 0
