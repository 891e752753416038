"""A model on several ranks answers as on one; what they cannot share is refused with numbers."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from penstock.engine import LLM
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, EngineDeadError
from penstock.engine.lora.files import find_adapter
from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.request import (
    BeamSearch,
    Request,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)
from penstock.engine.startup import build_core
from tests.support.peft_models import write_adapter
from tests.support.tiers import tiered

from .greedy_parity import NEAR_TIE
from .lettered import lettered

CPU = DeviceConfig(device="cpu", num_threads=1)
ONE_PREFIX = 20  # tokens with which some prompts begin alike
NUM_NEW = 20
# Names of cases → how many ranks and stages, the architecture with fields of its config, settings.
CASES: dict[str, tuple[tuple[int, int], str, dict[str, Any], dict[str, Any]]] = {
    "Llama, little memory": (
        (2, 1),
        "LlamaForCausalLM",
        {"vocab_size": 161},
        {
            "cache": CacheConfig(num_blocks=18, num_host_blocks=200),
            "scheduler": SchedulerConfig(preemption="swap", max_num_batched_tokens=64),
            "device": replace(CPU, deterministic=True),
        },
    ),
    "GPT-2": ((2, 1), "GPT2LMHeadModel", {}, {}),
    "experts in int8": (
        (2, 1),
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "intermediate_size": 256,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "head_dim": 64,
        },
        {"quantization": "int8", "quantize_activations": False},
    ),
    "int4, more ranks than keys": (
        (4, 1),
        "Olmo2ForCausalLM",  # with norms over the heads of all ranks
        {
            "tie_word_embeddings": True,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        # Rounding inputs to bytes would make steps of the last bits.
        {"quantization": "int4", "quantize_activations": False},
    ),
    "two stages, little memory": (
        (1, 2),
        "GPT2LMHeadModel",
        {"num_hidden_layers": 3},
        {
            "cache": CacheConfig(num_blocks=18, num_host_blocks=200),
            "scheduler": SchedulerConfig(preemption="swap", max_num_batched_tokens=64),
        },
    ),
    "two stages of two": ((2, 2), "Gemma3ForCausalLM", {"num_hidden_layers": 4}, {}),
}


def build(path: Path, num_ranks: int, num_stages: int = 1, **settings: Any) -> EngineCore:
    settings = {
        "cache": CacheConfig(num_blocks=400),
        "scheduler": SchedulerConfig(max_num_batched_tokens=64),
        "device": CPU,
        **settings,
    }
    names = ("quantization", "quantize_activations")
    model = {name: settings.pop(name) for name in names if name in settings}
    settings["device"] = replace(
        settings["device"], tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages
    )
    core, _ = build_core(
        EngineConfig(model=ModelConfig(model=str(path), dtype="float32", **model), **settings)
    )
    return core


def requests(adapters: Mapping[str, Path] | None = None) -> list[Request]:
    rng = random.Random(3)
    stem = [rng.randrange(3, 160) for _ in range(ONE_PREFIX)]
    found = []
    names = [None, *(adapters or {})]
    for number, length in enumerate((1, 2, 15, 16, 17, 33, 48, 64, 90)):
        prompt = (*stem, *(rng.randrange(3, 160) for _ in range(length)))
        name = names[number % len(names)]
        found.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=prompt[ONE_PREFIX * (number % 3 == 0) :],
                sampling_params=SamplingParams(
                    temperature=0.0,
                    max_tokens=NUM_NEW,
                    ignore_eos=True,
                    logprobs=2,
                    prompt_logprobs=0 if number == 4 and name is None else None,
                ),
                arrival_s=float(number),
                adapter=None if name is None else find_adapter(name, str((adapters or {})[name])),
            )
        )
    return found


def answers(core: EngineCore, given: list[Request]) -> dict[str, list[TokenLogprobs]]:
    """The tokens of each request, with their log-probabilities and those of the two likeliest."""
    found: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in given}
    live = set(found)
    for request in given:
        core.add(request)
    while live:
        core.wait()
        for output in core.step():
            assert output.error is None, output.error
            found[output.request_id] += output.logprobs
            live -= {output.request_id} if output.is_last else set()
        core.scheduler.blocks.check_integrity()
    return found


def assert_equal(
    got: Mapping[str, list[TokenLogprobs]], expected: Mapping[str, list[TokenLogprobs]]
) -> None:
    """The same tokens, but where the likeliest two are as good as equal: ranks add up in another
    order."""
    for name, tokens in expected.items():
        assert len(got[name]) == len(tokens) == NUM_NEW
        for token, other in zip(tokens, got[name], strict=True):
            if token.token_id != other.token_id:
                assert token.top[0][1] - token.top[1][1] < NEAR_TIE, name
                break
            assert abs(token.logprob - other.logprob) < 1e-3, name


def children() -> set[psutil.Process]:
    """This process's, servers that other tests share among them."""
    return set(psutil.Process().children())


@pytest.mark.parametrize("case", tiered(CASES, ["Llama, little memory"]))
def test_ranks_give_the_tokens_of_one(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    (num_ranks, num_stages), architecture, fields, settings = CASES[case]
    path = tiny_checkpoint(architecture, **fields)
    one = build(path, 1, **settings)
    expected = answers(one, requests())
    others = children()
    with closing(build(path, num_ranks, num_stages, **settings)) as several:
        got = answers(several, requests())
        ranks = children() - others
    assert_equal(got, expected)
    whole, part = (each._executor.info for each in (one, several))
    assert part.weight_bytes < 0.75 * whole.weight_bytes
    if num_stages == 1:
        assert part.bytes_per_block * min(num_ranks, 2) == whole.bytes_per_block
    else:
        assert part.bytes_per_block < whole.bytes_per_block / num_ranks
    if "cache" in settings:
        assert several.scheduler.counters.num_swaps > 0
    assert len(ranks) == num_ranks * num_stages - 1
    assert children() == others


@dataclass
class Heard:
    """What a client heard of a branch."""

    tokens: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def heard(core: EngineCore, given: list[Request]) -> dict[tuple[str, int], Heard]:
    """Of all requests, of which one is aborted on its way."""
    found: dict[tuple[str, int], Heard] = {}
    for request in given:
        core.add(request)
    while core.wait():
        for output in core.step():
            branch = found.setdefault((output.request_id, output.index), Heard())
            branch.tokens += output.token_ids
            branch.logprobs += (*output.prompt_logprobs, *output.logprobs)
            if output.finish_reason is not None:
                branch.tokens += (output.finish_reason, output.vector)
            if output.request_id == "aborted" and len(branch.tokens) == 5:
                core.abort("aborted")
        core.scheduler.blocks.check_integrity()
    assert core.scheduler.blocks.tiers.device.num_held == 0
    return found


@pytest.mark.exhaustive
def test_stages_give_to_the_bit_what_one_rank_gives(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """To requests of all kinds, while a sequence is in one of the steps in flight at a time."""
    path = lettered(tiny_checkpoint("LlamaForCausalLM", num_hidden_layers=4), tmp_path / "model")
    grammar = StructuredOutputs("regex", "[a-z]+(-[0-9]{1,9}){2,3}x*")
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"top_p": 0.95},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        "described": {"logprobs": 3, "prompt_logprobs": 2},
        "samples": {"n": 3},
        "grammar": {"n": 2, "structured_outputs": grammar, "ignore_eos": False},
        "beams": {"temperature": 0.0, "beam_search": BeamSearch(width=2), "ignore_eos": False},
        "warm": {"max_tokens": 0},
        "vector": {"max_tokens": 0},
        "aborted": {},
    }
    rng = random.Random(5)
    given = [
        Request(
            request_id=kind,
            prompt_token_ids=tuple(rng.randrange(3, 90) for _ in range(10 * number + 1)),
            sampling_params=SamplingParams(
                **{"temperature": 0.9, "max_tokens": NUM_NEW, "ignore_eos": True, "seed": 1} | more
            ),
            arrival_s=float(number),
            pooling=PoolingParams(task="embed") if kind == "vector" else None,
        )
        for number, (kind, more) in enumerate(kinds.items())
    ]
    plain = build(path, 1)
    expected = heard(plain, given)
    assert len(expected["vector", 0].tokens[-1] or b"") == 4 * 64
    predicted = tuple(each for each in expected["plain", 0].tokens if isinstance(each, int))
    given[0] = msgspec.structs.replace(given[0], prediction_token_ids=(*predicted[:9], 5))
    settings = {
        "cache": CacheConfig(num_blocks=22, num_host_blocks=200),
        "scheduler": SchedulerConfig(preemption="swap", max_num_batched_tokens=64),
    }
    with closing(build(path, 1, 3, **settings)) as staged:
        got = heard(staged, given)
    assert staged._max_steps_in_flight == 3
    assert staged.scheduler.counters.num_swaps > 0
    assert staged.scheduler.drafting.counters.num_accepted_tokens > 0
    stopped, whole = (each.pop(("aborted", 0)).tokens for each in (got, expected))
    assert len(stopped) >= 5
    assert stopped == whole[: len(stopped)]
    assert got == expected
    scheduler = SchedulerConfig(
        max_num_batched_tokens=64,
        speculative_config={"method": "draft_model", "model": str(path)},
    )
    with closing(build(path, 1, 2, scheduler=scheduler)) as guessing:
        got = heard(guessing, given[:2])
    assert guessing._max_steps_in_flight == 1
    assert guessing.scheduler.drafting.counters.num_accepted_tokens > 0
    assert got == {key: expected[key] for key in got}


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["two ranks", "two stages"])
def test_adapters_on_ranks(
    shape: tuple[int, int], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_checkpoint("Qwen2ForCausalLM", tie_word_embeddings=True)
    adapters = {"all": tmp_path / "all", "tables": tmp_path / "tables"}
    write_adapter(path, adapters["all"], 1)
    write_adapter(path, adapters["tables"], 2, target_modules=["embed_tokens", "lm_head"], r=16)
    lora = LoraConfig(enable_lora=True, max_loras=2)
    expected = answers(build(path, 1, lora=lora), requests(adapters))
    with closing(build(path, *shape, lora=lora)) as several:
        got = answers(several, requests(adapters))
    assert_equal(got, expected)
    assert got["r1"] != got["r0"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_stages", tiered([1, 2], [1]))
def test_ranks_without_a_compiler(
    num_stages: int,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In torch, by gloo."""
    architecture = "OlmoeForCausalLM" if num_stages == 1 else "LlamaForCausalLM"
    path = tiny_checkpoint(architecture, vocab_size=161)
    expected = answers(build(path, 1), requests())
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    with closing(build(path, 3 - num_stages, num_stages)) as several:
        assert_equal(answers(several, requests()), expected)
    assert "no CPU kernels" in caplog.text


# In torch a program has other records of ranks than in C.
IN_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "caps": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "sliding_window": 9},
    ),
    "norms over the heads of all ranks": ("Olmo2ForCausalLM", {"tie_word_embeddings": True}),
    "factors": ("GraniteForCausalLM", {"logits_scaling": 2.0, "residual_multiplier": 0.6}),
    "a shared expert": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["two ranks", "two stages"])
@pytest.mark.parametrize("case", IN_TORCH)
def test_switches_and_adapters_on_ranks_in_torch(
    case: str,
    shape: tuple[int, int],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture, options = IN_TORCH[case]
    path = tiny_checkpoint(architecture, **options)
    modules = [["q_proj", "o_proj"], ["embed_tokens", "lm_head"]]
    adapters = {str(number): tmp_path / str(number) for number in range(len(modules))}
    for each, names in zip(adapters.values(), modules, strict=True):
        write_adapter(path, each, 1, target_modules=names)
    lora = LoraConfig(enable_lora=True, max_loras=2)
    expected = answers(build(path, 1, lora=lora), requests(adapters))
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    with closing(build(path, *shape, lora=lora)) as several:
        assert_equal(answers(several, requests(adapters)), expected)


@pytest.mark.gpu
def test_ranks_on_two_gpus(tiny_checkpoint: Callable[..., Path]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs: nothing of NCCL has run")
    path = tiny_checkpoint("LlamaForCausalLM")
    device = DeviceConfig(device="cuda")
    expected = answers(build(path, 1, device=device), requests())
    with closing(build(path, 2, device=device)) as several:
        assert_equal(answers(several, requests()), expected)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": (
        {"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 112},
        {},
        "num_attention_heads is 7, which 2 ranks cannot share",
    ),
    "keys": (
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        {},
        "num_key_value_heads is 3, which 2 ranks cannot share",
    ),
    "inner values": (
        {"intermediate_size": 97},
        {},
        "intermediate_size is 97, which 2 ranks cannot share",
    ),
    "blocks of scales": (
        {"intermediate_size": 160},
        {"quantization": "int4"},
        r"down_proj has a scale for each 32 of its 160 columns, which cannot be cut at column 80",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(case: str, tiny_checkpoint: Callable[..., Path]) -> None:
    fields, settings, message = REFUSED[case]
    path = tiny_checkpoint(**{"architecture": "LlamaForCausalLM", **fields})
    others = children()
    with pytest.raises(ConfigError, match=message):
        build(path, 2, **settings)
    assert children() == others


@pytest.mark.process_kills
def test_the_end_of_a_rank_is_an_error() -> None:
    others = children()
    with LLM("demo", device="cpu", num_threads=1, tensor_parallel_size=2) as llm:
        (child,) = children() - others
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 has ended \(exit code -9\)"):
            llm.generate(["Once"], SamplingParams(max_tokens=3000, ignore_eos=True))
