"""Models through `transformers`: the tokens of its `generate`, or a refusal that says why."""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiers import tiered
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.models import backends
from penstock.engine.models.through_transformers import cpu
from penstock.engine.models.through_transformers.backend import TransformersModel
from penstock.engine.models.through_transformers.cpu import Part
from penstock.engine.models.through_transformers.modules import trial_step
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.kernels.cpu.program import CpuProgram

TinyCheckpoint = Callable[..., Path]

KINDS = [
    "afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe",
    "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "ministral3", "mixtral",
    "modernbert-decoder", "nanochat", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
    "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
]  # fmt: skip
IN_TORCH = ("gemma2", "gpt_oss", "qwen3_moe")  # soft caps, sinks, experts
# Fields of many configurations; each takes those that it has.
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96,
    "word_embed_proj_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "n_embd": 64,
    "n_layer": 2, "n_head": 4, "n_positions": 128, "max_position_embeddings": 128,
    "sliding_window": 8, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "initializer_range": 0.3, "dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "opt": {"init_std": 0.3},
}
NUM_NEW = 14
REFUSED = {
    "bert": "neither causal nor a sliding window",
    "bloom": "does not go through the library's interface",
    "deepseek_v3": "values 4 of 128",
    "diffllama": "attends twice",
    "doge": "a mask of its own",
    "gemma3n": "more than a language model",
    "gptj": "does not go through the library's interface",
    "mamba": "recurrent layers",
    "moshi": "all that its cache has dropped",
    "qwen3_next": "recurrent layers (linear_attention)",
    "whisper": "an encoder with a decoder",
}


def config_of(kind: str) -> Any:
    """A small configuration of a kind of model."""
    made = CONFIG_MAPPING[kind]
    known = {*inspect.signature(made.__init__).parameters, *made.attribute_map}
    known |= set(getattr(made, "__dataclass_fields__", ()))
    small = {name: value for name, value in SMALL.items() if name in known}
    config = made(**(small | OWN.get(kind, {})))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[made].__name__]
    return config


def prompts() -> list[list[int]]:
    """With a beginning in common, longer than a block."""
    rng = random.Random(0)
    stem = [rng.randrange(3, 90) for _ in range(18)]
    long = [rng.randrange(3, 90) for _ in range(40)]
    return [[5], [6, 7, 8, 9, 10], long, [*stem, 7], [*stem, 8, 9, 10]]


def expected_tokens(model: PreTrainedModel) -> list[list[int]]:
    options = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=0
    )
    return [
        model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=options,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def build(
    path: Path,
    *,
    kv_cache_dtype: KVCacheDType = "auto",
    scheduler: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine with chunks and blocks that are too small for all prompts at once."""
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(
                model=str(path),
                **{"dtype": "float32", "max_model_len": 128, "model_impl": "transformers"}
                | settings,
            ),
            cache=CacheConfig(
                block_size=8, num_blocks=16, num_host_blocks=100, kv_cache_dtype=kv_cache_dtype
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=24, preemption="swap", **(scheduler or {})
            ),
            device=DeviceConfig(device="cpu"),
        )
    )
    return core


def run(core: EngineCore, **params: Any) -> list[list[int]]:
    sampling = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True} | params
    tokens: dict[tuple[str, int], list[int]] = {}
    for index, prompt in enumerate(prompts()):
        core.add(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling_params=SamplingParams(**sampling),
                arrival_s=float(index),
            )
        )
    while core.has_work():
        for output in core.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.scheduler.blocks.check_integrity()
    return [tokens[key] for key in sorted(tokens)]


def model_of(core: EngineCore) -> TransformersModel:
    model = core._executor._runner._model  # type: ignore[attr-defined]
    assert isinstance(model, TransformersModel)
    return model


# Fused matrices, experts, norms over all heads and others, sinks, soft caps, learned positions.
FIRST = [
    *((kind, False) for kind in ("cohere2", "gemma2", "mixtral", "olmo2", "opt", "phi3")),
    ("gpt_oss", True),
]


@pytest.mark.parametrize(
    ("kind", "in_torch"),
    tiered([*product(KINDS, (False,)), *product(IN_TORCH, (True,))], FIRST),
)
def test_tokens_equal_generate(
    kind: str, in_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked, preempted, swapped, with prefix hits; then once more with a warm cache."""
    if in_torch:
        monkeypatch.setattr(backends, "load_library", lambda dtype: None)
    torch.manual_seed(0)
    config = config_of(kind)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = expected_tokens(model)
    core = build(tmp_path)
    assert run(core) == expected
    assert run(core) == expected
    assert core.scheduler.counters.num_preemptions > 0
    assert len({token for tokens in expected for token in tokens}) > 1


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
    config.save_pretrained(tmp_path)  # and no weights
    with pytest.raises(ModelLoadError) as caught:
        build(tmp_path, model_impl="transformers")
    assert config.architectures[0] in str(caught.value)
    assert REFUSED[kind] in str(caught.value)


def test_attention_to_both_sides_is_refused(tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint("GemmaForCausalLM", use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match=r"use_bidirectional_attention.* is not causal"):
        build(path, model_impl="auto")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "int8"},
        {"quantization": "int4", "quantization_override": ("lm_head=int8",)},
        {"load_format": "dummy"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"scheduler": {"speculative_config": {"method": "ngram"}}},
        {"scheduler": {"max_steps_in_flight": 2}},
    ],
)
def test_settings_mean_the_same_as_natively(
    settings: dict[str, Any], tiny_checkpoint: TinyCheckpoint
) -> None:
    path = tiny_checkpoint("LlamaForCausalLM", tie_word_embeddings=True, max_shard_size="40KB")
    params = {"temperature": 0.8, "n": 2, "seed": 3, "repetition_penalty": 1.1}
    native, ours = (build(path, model_impl=each, **settings) for each in ("native", "transformers"))
    tokens = run(ours, **params)
    assert len(tokens) == 2 * len(prompts())
    if "load_format" not in settings:  # whose random numbers go by the order of parameters
        assert tokens == run(native, **params)
        assert model_of(ours).weight_bytes <= 1.1 * native_weight_bytes(native)


def native_weight_bytes(core: EngineCore) -> int:
    return int(core._executor.info.weight_bytes)  # type: ignore[attr-defined]


def test_a_layers_modules_are_one_call_each(tiny_checkpoint: TinyCheckpoint) -> None:
    model = model_of(build(tiny_checkpoint("Qwen3ForCausalLM")))
    for layer in model.causal_lm.model.layers:
        assert isinstance(layer.mlp.forward, Part)
        for module in (layer, layer.self_attn, layer.input_layernorm):
            assert "forward" in vars(module)


def test_layers_are_one_call_together(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = build(tiny_checkpoint("LlamaForCausalLM"))
    runs: list[int] = []
    run_part = CpuProgram.run_part

    def count(program: CpuProgram, *args: Any, **others: Any) -> None:
        runs.append(1)
        run_part(program, *args, **others)

    monkeypatch.setattr(CpuProgram, "run_part", count)
    core.add(Request(request_id="0", prompt_token_ids=(5,), sampling_params=SamplingParams()))
    core.step()
    assert len(runs) <= 3  # the embedding, the layers, the output head


@pytest.mark.parametrize(
    "kind", tiered(["llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3"], ["qwen3"])
)
def test_layers_together_give_the_bits_of_layers_apart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    ours = model_of(build(tmp_path, dtype="bfloat16"))
    context = trial_step(ours._attentions, ours.dtype, 8, (2, 1), ours.device)
    token_ids, runs = torch.tensor([5, 6, 7]), []
    run_part = CpuProgram.run_part

    def count(program: CpuProgram, *args: Any, **others: Any) -> None:
        runs.append(1)
        run_part(program, *args, **others)

    monkeypatch.setattr(CpuProgram, "run_part", count)
    with torch.inference_mode():
        together, num_together = ours(token_ids, context).clone(), len(runs)
        monkeypatch.setattr(cpu, "_MAX_CHAINED_ROWS", 0)
        assert torch.equal(ours(token_ids, context), together)
    assert len(runs) >= 2 * num_together + 3  # attention and MLP of two layers


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_model_does_between_its_layers_counts(
    in_place: bool, tiny_checkpoint: TinyCheckpoint
) -> None:
    def halve(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        (x, *others) = given
        return (x.mul_(0.5) if in_place else 0.5 * x, *others)

    path = tiny_checkpoint("LlamaForCausalLM", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain = expected_tokens(model)
    model.model.layers[2].register_forward_pre_hook(halve)
    expected = expected_tokens(model)
    core = build(path)
    assert run(core) == plain != expected
    core = build(path)
    model_of(core).causal_lm.model.layers[2].register_forward_pre_hook(halve)
    assert run(core) == run(core) == expected


@pytest.mark.parametrize(
    ("architecture", "option"),
    [
        ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
        ("OPTForCausalLM", {"do_layer_norm_before": False}),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}),
        ("OlmoForCausalLM", {"clip_qkv": 0.5}),
    ],
)
def test_an_option_that_a_family_has_not_is_left_to_transformers(
    architecture: str, option: dict[str, Any], tiny_checkpoint: TinyCheckpoint
) -> None:
    path = tiny_checkpoint(architecture, **option)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert run(build(path, model_impl="auto")) == expected_tokens(model)


def test_a_model_that_mixes_rows_is_refused(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) + x.roll(1, 1))
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM .* depends on other sequences"):
        build(tiny_checkpoint())


def test_missing_and_surplus_tensors_are_named(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint("HeliumForCausalLM")
    for num_layers, message in ((3, r"no tensor model\.layers\.2\."), (1, r"model\.layers\.1\.")):
        broken = tmp_path / str(num_layers)
        shutil.copytree(path, broken)
        values = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(values | {"num_hidden_layers": num_layers}))
        with pytest.raises(ModelLoadError, match=message):
            build(broken)


def test_what_has_no_meaning_is_refused(tiny_checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(ConfigError, match="--model-impl must be one of auto, native, transformers"):
        ModelConfig(model_impl="vllm")  # type: ignore[arg-type]
    path = str(tiny_checkpoint("HeliumForCausalLM"))
    with pytest.raises(ModelLoadError, match="HeliumForCausalLM is not native"):
        build_core(EngineConfig(model=ModelConfig(model=path, model_impl="native")))


_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_code"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_if_it_is_trusted(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path = tiny_checkpoint()
    own = tmp_path / "own"
    shutil.copytree(path, own)
    (own / "own.py").write_text(_CODE)
    values = json.loads((own / "config.json").read_text()) | {
        "model_type": "own_code",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (own / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"OwnForCausalLM .* --trust-remote-code"):
        build(own)
    assert not (tmp_path / "hf").exists()
    assert run(build(own, trust_remote_code=True)) == run(build(path))
