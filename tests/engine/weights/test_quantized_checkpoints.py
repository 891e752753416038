"""Each format of quantized checkpoints is read as the numbers that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine import ModelLoadError
from penstock.engine.config import ModelConfig
from penstock.engine.layers.linear import Linear
from penstock.engine.models.loader import load_model
from penstock.kernels.cpu.isa import ISA_VARIABLE, usable_isas
from penstock.kernels.gpu.quantized import pack_codes
from penstock.kernels.quantized_codes import QuantizedCodes

from ...support.tiers import tiered
from ..quantized_models import linears, load, logits, relative_error
from . import quantized_checkpoints as made
from .quantized_checkpoints import WEIGHTS, Write, compressed, rewrite

GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}}}
BLOCKS = {
    "config_groups": {
        "a": {"targets": ["Embedding"], "weights": {"num_bits": 8}},
        "b": {"targets": ["Linear"], "weights": {"block_structure": [32, 16]}},
    }
}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "gptq": (made.gptq(), {"quant_method": "gptq"}),
    "gptq-8-bits": (made.gptq(8), {"quant_method": "gptq"}),
    "gptq-2-bits": (made.gptq(2), {"quant_method": "gptq"}),
    "gptq-one-group": (made.gptq(group=0), {"quant_method": "gptq"}),
    "gptq-act-order": (made.gptq(sorts=True), {"quant_method": "gptq", "desc_act": True}),
    "gptq-v2": (made.gptq(version=2), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "awq": (made.awq, {"quant_method": "awq", "version": "gemm", "bits": 4}),
    "fp8-all": (made.fp8("all"), {"quant_method": "fp8"}),
    "fp8-rows": (made.fp8("row"), {"quant_method": "fbgemm_fp8"}),
    "fp8-blocks": (made.fp8("block"), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "nf4": (made.nf4(is_nested=False), {"quant_method": "bitsandbytes"}),
    "nf4-nested": (made.nf4(is_nested=True), {"quant_method": "bitsandbytes"}),
    "llm-int8": (made.llm_int8, {"quant_method": "bitsandbytes"}),
    "modelopt-nvfp4": (made.modelopt_nvfp4, {"quant_method": "modelopt"}),
    "packed-4": (compressed("pack-quantized", **INT4), GROUPS),
    "packed-4-zeros": (compressed("pack-quantized", **INT4, symmetric=False), GROUPS),
    "packed-8": (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), GROUPS),
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), GROUPS),
    "int8-zeros": (
        compressed(
            "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
        ),
        GROUPS,
    ),
    "float8": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), GROUPS),
    "float8-all": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        GROUPS,
    ),
    "float8-blocks": (
        compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 16]
        ),
        BLOCKS,
    ),
    "nvfp4": (
        compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        GROUPS,
    ),
    "mxfp4": (
        compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
            scale_dtype=torch.uint8,
        ),
        GROUPS,
    ),
}  # fmt: skip


def numbers_of(linear: Linear) -> Tensor:
    """The matrix, in float32."""
    if not linear.quantized:
        return linear.weight.float()
    return torch.cat([part.dequantize() for part in linear.quantized])


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_format(
    case: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Beside modules that are kept as they were."""
    kept = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
    write, config = CASES[case]
    source = tiny_checkpoint("Qwen2ForCausalLM", intermediate_size=96)
    config = {"quant_method": "compressed-tensors", **config}
    numbers = rewrite(source, tmp_path, write, config, kept=kept)
    model = load_model(ModelConfig(quantize_activations=False), tmp_path, torch.device("cpu"))
    dense = load_model(ModelConfig(), source, torch.device("cpu"))
    parts = {
        "self_attn.qkv": ("q_proj", "k_proj", "v_proj"),
        "self_attn.o": ("o_proj",),
        "mlp.gate_up": ("gate_proj", "up_proj"),
        "mlp.down": ("down_proj",),
    }
    stored = load_file(source / WEIGHTS)
    for index, (linear, original) in enumerate(zip(linears(model), linears(dense), strict=True)):
        layer, kind = divmod(index, 4)
        place, names = list(parts.items())[kind]
        prefixes = [f"model.layers.{layer}.{place.partition('.')[0]}.{name}" for name in names]
        expected = torch.cat([numbers.get(each, stored[f"{each}.weight"]) for each in prefixes])
        found = numbers_of(linear)
        relative = 2**-8 if "nvfp4" in case else 1e-5  # compressed-tensors computes it in bf16
        torch.testing.assert_close(found, expected, rtol=relative, atol=1e-6)
        error = (found - original.weight).norm() / original.weight.norm()
        assert error < (0.7 if "2-bits" in case else 0.2)
        for part in linear.quantized:  # as a GPU packs them
            assert isinstance(part, QuantizedCodes)
            packed = pack_codes(part, torch.empty(0)).dequantize()
            torch.testing.assert_close(packed, part.dequantize(), rtol=1e-6, atol=1e-6)


ISA_OF = dict(zip(CASES, cycle(usable_isas()), strict=False))
FIRST = ("gptq-act-order", "awq", "fp8-blocks", "nf4", "packed-4-zeros", "int8", "nvfp4")


@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_logits_are_those_of_the_numbers(
    case: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernels with inputs as they are; with inputs in bytes, and in torch, beside them."""
    write, config = CASES[case]
    source = tiny_checkpoint("Qwen2ForCausalLM", intermediate_size=96)
    config = {"quant_method": "compressed-tensors", **config}
    numbers = rewrite(source, tmp_path, write, config)
    dense = load_file(source / WEIGHTS)
    dense |= {f"{name}.weight": each.contiguous() for name, each in numbers.items()}
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / WEIGHTS)
    (tmp_path / "dense/config.json").write_text((source / "config.json").read_text())
    monkeypatch.setenv(ISA_VARIABLE, ISA_OF[case])
    expected = logits(load(tmp_path / "dense", "none"))
    exact = logits(load(tmp_path, "none", quantize_activations=False))
    bound = 2**-6 if "nvfp4" in case else 1e-5  # compressed-tensors computes it in bf16
    assert relative_error(exact, expected) < bound
    in_bytes = logits(load(tmp_path, "none"))
    is_float = "fp8" in case or "float8" in case
    assert relative_error(in_bytes, expected) < (bound if is_float else 0.05)
    in_torch = logits(load(tmp_path, "none", in_torch=True))
    assert relative_error(in_torch, in_bytes) < 0.01


Q_PROJ = "model.layers.0.self_attn.q_proj"
COMPRESSED = {"quant_method": "compressed-tensors", **GROUPS}
STATE, ZERO = "weight.quant_state.bitsandbytes__nf4", "weight_zero_point"


def state(**fields: int) -> torch.Tensor:
    """What bitsandbytes stores of a matrix, with these fields for nested scales."""
    text = json.dumps({"blocksize": 32, "shape": [64, 64], **fields})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gptq", {"qweight": torch.ones(12, 64, dtype=torch.int32)}, ("qweight", "12 rows")),
        ("gptq", {"scales": torch.ones(2, 32)}, ("scales", "[2, 32]", "[2, 64]")),
        ("gptq", {"qzeros": torch.ones(2, 64)}, ("qzeros",)),
        ("gptq", {"g_idx": torch.zeros(64, dtype=torch.int32)}, ("g_idx", "32 inputs")),
        ("gptq", {"scales": None}, ("no tensor", "scales")),
        ("gptq", {"scales": torch.tensor(1.0)}, ("scales", "2 dimensions")),
        ("gptq", {"scales": torch.ones(7, 64), "g_idx": None}, ("scales", "7 groups")),
        ("gptq", {"qweight": torch.tensor(1)}, ("qweight", "2 dimensions")),
        ("awq", {"qweight": torch.ones(64, 8)}, ("qweight", "F32")),
        ("awq", {"scales": torch.ones(3, 64)}, ("scales", "3 groups for 64 inputs")),
        ("awq", {"scales": torch.ones(0, 64)}, ("scales", "0 groups")),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(3, 2)}, ("weight_scale_inv", "[3, 2]")),
        ("nf4", {"weight.absmax": torch.ones(5)}, ("absmax", "[5]")),
        ("nf4", {STATE: torch.ones(3).byte()}, ("no JSON",)),
        ("nf4", {STATE: torch.ones(2, 3).byte()}, ("no JSON",)),
        ("nf4-nested", {STATE: state()}, ("nested_blocksize", "is missing")),
        ("nf4-nested", {STATE: state(nested_blocksize=0)}, ("nested_blocksize", "not 0")),
        ("nf4-nested", {STATE: state(nested_blocksize=256)}, ("nested_offset", "is missing")),
        ("packed-4", {"weight_scale": torch.ones(3, 2)}, ("weight_scale", "[3, 2]")),
        ("packed-4", {"weight_packed": torch.ones(64, 7).int()}, ("weight_packed", "7 columns")),
        ("packed-4", {"weight_scale": torch.ones(64, 0)}, ("weight_scale", "0 groups")),
        ("packed-4", {"weight_scale": torch.ones(64, 3)}, ("weight_scale", "3 groups")),
        ("packed-4-zeros", {ZERO: torch.ones(3, 2).char()}, (ZERO, "[3, 2]", "[64, 2]")),
        ("int8", {"weight_scale": torch.ones(64, 7)}, ("weight_scale", "7 groups")),
        ("int8-zeros", {ZERO: torch.ones(0).char()}, (ZERO, "[0]", "[64, 1]")),
        ("packed-4", {"weight_bitmask": torch.ones(3)}, ("1 tensors", "weight_bitmask")),
        ("nvfp4", {"weight_scale": torch.ones(64, 4)}, ("weight_scale", "F32", "F8_E4M3")),
        ("nvfp4", {"weight_global_scale": torch.ones(3)}, ("weight_global_scale", "[3]")),
    ],
)
def test_what_cannot_be_read_is_named(
    case: str,
    changes: dict[str, torch.Tensor | None],
    words: tuple[str, ...],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    write, config = CASES[case]
    config = {"quant_method": "compressed-tensors", **config}
    rewrite(tiny_checkpoint("Qwen2ForCausalLM"), tmp_path, write, config)
    tensors: dict[str, Any] = load_file(tmp_path / WEIGHTS)
    tensors |= {f"{Q_PROJ}.{kind}": values for kind, values in changes.items()}
    save_file(
        {name: each for name, each in tensors.items() if each is not None}, tmp_path / WEIGHTS
    )
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(), tmp_path, torch.device("cpu"))
    for word in (str(tmp_path), Q_PROJ, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, ("'hqq'",)),
        ({"quant_method": "awq", "version": "gemv"}, ("version", "gemv")),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ("checkpoint_format", "marlin")),
        ({"quant_method": "awq", "bits": 8}, ("8 bits",)),
        ({**COMPRESSED, "transform_config": {"a": 1}}, ("transform_config",)),
        ({"quant_method": "fp8", "weight_block_size": "x"}, ("weight_block_size",)),
    ],
)
def test_schemes_that_are_not_known(
    config: dict[str, Any],
    words: tuple[str, ...],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    write = {"awq": made.awq, "fp8": made.fp8("row")}.get(config["quant_method"], made.gptq())
    rewrite(tiny_checkpoint("Qwen2ForCausalLM"), tmp_path, write, config)
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(), tmp_path, torch.device("cpu"))
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


def test_numbers_that_are_none_are_kept(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A scale that is NaN makes its own numbers NaN, and no others."""
    write, config = CASES["gptq"]
    rewrite(tiny_checkpoint("Qwen2ForCausalLM"), tmp_path, write, config)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[f"{Q_PROJ}.scales"][1, 5] = torch.nan
    save_file(tensors, tmp_path / WEIGHTS)
    model = load_model(ModelConfig(), tmp_path, torch.device("cpu"))
    is_nan = numbers_of(linears(model)[0]).isnan()
    assert is_nan[5, 32:].all()
    assert int(is_nan.sum()) == 32
