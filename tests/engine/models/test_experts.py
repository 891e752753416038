"""Mixtures of experts: transformers' logits in every family, by torch and by the CPU kernels, with
every format of weights; and what is said of damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.models import backends
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.program import cpu_backend
from penstock.engine.weights.formats.packing import FP4
from penstock.kernels.cpu.isa import usable_isas

from ...support.tiers import tiered
from ..quantized_models import BLOCK_SIZE, load, logits, relative_error
from ..weights import quantized_checkpoints as made
from ..weights.quantized_checkpoints import WEIGHTS, Write, compressed, rewrite

CPU = torch.device("cpu")
MIXTRAL, QWEN2, QWEN3 = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
SMALL = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9}
SHARED = SMALL | {"shared_expert_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {"num_local_experts": 5, "sliding_window": 9}),
    "granite": (
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.8},
    ),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS),
    "qwen2 shared": (QWEN2, SHARED),
    "qwen2 normalized": (QWEN2, SHARED | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3": (QWEN3, SMALL),
    "qwen3 some layers": (QWEN3, SMALL | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3 every second": (QWEN3, SMALL | {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen3 all experts": (QWEN3, SMALL | {"num_experts_per_tok": 6}),
}
NUM_TOKENS = 45
CHUNKS = [7, 1, 16, 4, 3, 14]


def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 160, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([token_ids()]), use_cache=False).logits[0].float()
    return found


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_float32_logits(variant, tiny_checkpoint, reference, paged_logits):
    architecture, overrides = variant
    path = tiny_checkpoint(architecture, **overrides)
    expected = expected_logits(reference(path))
    assert expected.std() > 0.5
    found = paged_logits(path, token_ids(), CHUNKS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def gpt_oss(tiny_checkpoint) -> Path:
    path: Path = tiny_checkpoint("GptOssForCausalLM", **GPT_OSS)
    return path


def test_mxfp4_of_gpt_oss(gpt_oss, tmp_path):
    """Blocks stand for the numbers of a dense checkpoint, whose inputs come before outputs."""
    tensors = load_file(gpt_oss / WEIGHTS)
    stored, generator = {}, torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, size, out = tensors[name].shape
        codes = torch.randint(16, (num_experts, out, size), generator=generator).to(torch.uint8)
        exponents = torch.randint(122, 126, (num_experts, out, size // 32), generator=generator)
        scales = torch.exp2(exponents - 127.0).repeat_interleave(32, 2)
        tensors[name] = (FP4[codes.long()] * scales).transpose(1, 2).contiguous()
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_blocks"] = blocks.view(num_experts, out, size // 32, 16)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
    config = json.loads((gpt_oss / "config.json").read_text())
    for folder, fields in (("dense", {}), ("mxfp4", {"quant_method": "mxfp4"})):
        (tmp_path / folder).mkdir()
        quantization = {"quantization_config": fields} if fields else {}
        (tmp_path / folder / "config.json").write_text(json.dumps(config | quantization))
    save_file(tensors, tmp_path / "dense" / WEIGHTS)
    kept = {name: each for name, each in tensors.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, tmp_path / "mxfp4" / WEIGHTS)
    expected = logits(load(tmp_path / "dense", "none"))
    exact = load(tmp_path / "mxfp4", "none", quantize_activations=False)
    assert relative_error(logits(exact), expected) < 1e-5
    found = load(tmp_path / "mxfp4", "none", in_torch=True, quantize_activations=False)
    assert relative_error(logits(found), expected) < 1e-5
    assert found.decoder.quantization == "mxfp4"
    assert found.decoder.layers[0].mlp.experts.gate_up_proj.quantized


def test_bfloat16_is_as_exact_as_transformers(tiny_checkpoint, reference, paged_logits):
    path = tiny_checkpoint(QWEN2, dtype="bfloat16", **SHARED)
    exact = expected_logits(reference(path))
    theirs = expected_logits(reference(path, "bfloat16"))
    ours = paged_logits(path, token_ids(), CHUNKS)
    our_error, their_error = ((each - exact).pow(2).mean().sqrt() for each in (ours, theirs))
    assert our_error < 1.25 * their_error


@pytest.mark.parametrize("architecture", [MIXTRAL, QWEN3])
def test_experts_in_one_tensor_are_the_same(architecture, tiny_checkpoint, reference, tmp_path):
    """As transformers 5 writes them if it is told not to write the family's own names."""
    path = tiny_checkpoint(architecture, **VARIANTS["qwen3"][1])
    reference(path).save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mlp.experts.down_proj" in load_file(tmp_path / WEIGHTS)
    assert torch.equal(logits(load(tmp_path, "none")), logits(load(path, "none")))


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantization_at_load(quantization, tiny_checkpoint):
    """Chunks change no bit; rounding changes some tokens' experts; torch computes the same, but
    where it rounds an input to the neighbouring byte."""
    path = tiny_checkpoint(QWEN2, **SHARED)
    whole = logits(load(path, quantization))
    assert torch.equal(logits(load(path, quantization), (7, 1, 16, 4, 3, 14)), whole)
    in_torch = logits(load(path, quantization, in_torch=True))
    assert (in_torch - whole).abs().amax(-1).quantile(0.75) < 1e-4
    assert relative_error(in_torch, whole) < 0.02
    assert 1e-3 < relative_error(whole, logits(load(path, "none"))) < 0.8


INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "gptq": (made.gptq(), {"quant_method": "gptq"}),
    "gptq act order": (made.gptq(sorts=True), {"quant_method": "gptq", "desc_act": True}),
    "awq": (made.awq, {"quant_method": "awq", "version": "gemm", "bits": 4}),
    "fp8 blocks": (made.fp8("block"), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "nf4": (made.nf4(is_nested=False), {"quant_method": "bitsandbytes"}),
    "packed": (
        compressed("pack-quantized", **INT4, symmetric=False),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}},
        },
    ),
}
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")


ISA_OF = dict(zip(FORMATS, cycle(usable_isas()), strict=False))


@pytest.mark.parametrize("case", tiered(FORMATS, ["gptq act order", "fp8 blocks", "packed"]))
def test_quantized_checkpoints(case, tiny_checkpoint, tmp_path, monkeypatch):
    """The logits of the numbers that the codes stand for; in bytes, and in torch, beside them."""
    monkeypatch.setenv("PENSTOCK_CPU_ISA", ISA_OF[case])
    write, config = FORMATS[case]
    source = tiny_checkpoint(QWEN3, **SMALL)
    numbers = rewrite(source, tmp_path, write, config, kept=ROUTERS)
    dense = load_file(source / WEIGHTS)
    dense |= {f"{name}.weight": each.contiguous() for name, each in numbers.items()}
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / WEIGHTS)
    shutil.copy(source / "config.json", tmp_path / "dense")
    expected = logits(load(tmp_path / "dense", "none"))
    exact = logits(load(tmp_path, "none", quantize_activations=False))
    assert relative_error(exact, expected) < 1e-5
    in_bytes = logits(load(tmp_path, "none"))
    assert relative_error(in_bytes, expected) < 0.1
    in_torch = logits(load(tmp_path, "none", in_torch=True))
    assert relative_error(in_torch, in_bytes) < 0.01


def test_experts_that_have_no_common_layout_are_dense(tiny_checkpoint, tmp_path):
    write, config = FORMATS["gptq"]
    kept = ("layers.0.mlp.experts.2.up_proj", *ROUTERS)
    source = tiny_checkpoint(QWEN3, **SMALL)
    rewrite(source, tmp_path, write, config, kept=kept)
    model = load_model(ModelConfig(), tmp_path, CPU)
    first, second = (layer.mlp.experts.gate_up_proj for layer in model.layers)
    assert not first.quantized
    assert second.quantized
    stored = load_file(source / WEIGHTS)["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert torch.equal(first.weight.view(6, 2, 32, 64)[2, 1], stored)


# -- experts that memory cannot hold ----------------------------------------------------------


def load_with(free_bytes: int, path: Path, monkeypatch, *, in_torch: bool = False) -> LanguageModel:
    """The model on a machine with so much free memory."""
    for module in (cpu_backend, backends):
        monkeypatch.setattr(module, "free_cpu_bytes", lambda: free_bytes)
    decoder = load_model(ModelConfig(), path, CPU, defers_experts=True)
    library = None if in_torch else cpu_kernels(decoder, BLOCK_SIZE)
    return fastest(decoder, BLOCK_SIZE, library)


def num_mapped_files(folder: Path) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in maps)


def test_experts_beyond_memory_are_mapped_from_a_file(tiny_checkpoint, monkeypatch, tmp_path):
    path = tiny_checkpoint(QWEN2, **SHARED)
    expected = logits(load(path, "none"))
    cpu_kernels(load_model(ModelConfig(), path, CPU), BLOCK_SIZE)  # compiled before the cache moves
    monkeypatch.setattr(cpu_backend, "cache_dir", lambda: tmp_path)
    assert torch.equal(logits(load_with(1 << 40, path, monkeypatch)), expected)
    assert num_mapped_files(tmp_path) == 0
    model = load_with(1 << 20, path, monkeypatch)
    assert num_mapped_files(tmp_path) == 1
    assert torch.equal(logits(model), expected)
    assert not list(tmp_path.iterdir())


def test_experts_beyond_memory_and_disk_are_refused(tiny_checkpoint, monkeypatch, tmp_path):
    path = tiny_checkpoint(QWEN2, **SHARED)
    with pytest.raises(ModelLoadError, match=r"experts take .* without the CPU kernels"):
        load_with(1 << 10, path, monkeypatch, in_torch=True)
    monkeypatch.setattr(cpu_backend, "cache_dir", lambda: tmp_path / "missing")
    with pytest.raises(ModelLoadError, match=r"more than memory holds"):
        load_with(1 << 10, path, monkeypatch)


# -- mistakes ---------------------------------------------------------------------------------


@pytest.fixture
def model_copy(tmp_path, tiny_checkpoint) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(QWEN3, **SMALL), path)
    return path


DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def _load_and_pack(path: Path, *, defers_experts: bool) -> None:
    model = load_model(ModelConfig(), path, CPU, defers_experts=defers_experts)
    fastest(model, BLOCK_SIZE, cpu_kernels(model, BLOCK_SIZE))


@pytest.mark.parametrize("defers", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(DOWN), ("no tensor", DOWN)),
        (lambda tensors: tensors.update({DOWN: torch.zeros(64, 16)}), (DOWN, "[64, 16]")),
        (lambda tensors: tensors.update({DOWN: torch.zeros(64, 32).int()}), (DOWN, "I32")),
        (
            lambda tensors: tensors.update({DOWN.replace(".3.", ".6."): torch.zeros(64, 32)}),
            ("1 tensors belong to no expert", DOWN.replace(".3.", ".6.")),
        ),
        (lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"), ("layers.0.mlp.gate",)),
    ],
)
def test_damaged_experts_are_named(
    change: Callable[[dict[str, Tensor]], object], words, defers, model_copy
):
    tensors = load_file(model_copy / WEIGHTS)
    change(tensors)
    save_file(tensors, model_copy / WEIGHTS)
    with pytest.raises(ModelLoadError) as caught:
        _load_and_pack(model_copy, defers_experts=defers)
    message = str(caught.value)
    assert str(model_copy) in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, ("num_experts_per_tok", "from 1 to 6")),
        ({"num_local_experts": 5000}, ("num_local_experts", "1024")),
        ({"moe_intermediate_size": None}, ("moe_intermediate_size", "missing")),
        ({"mlp_only_layers": [True]}, ("mlp_only_layers", "layers")),
        ({"decoder_sparse_step": 0}, ("decoder_sparse_step", "0")),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
    ],
)
def test_config_mistakes(changes, words, model_copy):
    file = model_copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(), model_copy, CPU)
    assert all(word in str(caught.value) for word in words), caught.value


def test_rules_name_experts(tiny_checkpoint):
    """The router stays as it is."""
    path = tiny_checkpoint(QWEN3, **SMALL)
    config = ModelConfig(quantization="int8", quantization_exclude=("*.mlp.experts.*.down_proj",))
    model = load_model(config, path, CPU, defers_experts=True)
    mixture = model.layers[0].mlp
    mixture.experts.gate_up_proj.load()
    mixture.experts.down_proj.load()
    assert mixture.experts.gate_up_proj.quantized
    assert not mixture.experts.down_proj.quantized
    assert not mixture.gate.quantized
    config = ModelConfig(quantization="int8", quantization_exclude=("*.experts.9.down_proj",))
    with pytest.raises(ConfigError, match=r"experts.9.* matches no module"):
        load_model(config, path, CPU)


def test_dummy_experts_differ_and_follow_the_seed(model_copy):
    (model_copy / WEIGHTS).unlink()
    first, again, other = (
        load_model(ModelConfig(load_format="dummy", seed=seed), model_copy, CPU)
        .layers[1]
        .mlp.experts.down_proj.weight.view(6, 64, 32)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
