"""A weight format is one function, which nobody else knows: here one is added, and serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine import ModelLoadError, SamplingParams
from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.models.loader import load_model
from penstock.engine.startup import build_core
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats import FORMATS
from penstock.engine.weights.formats.dense import read_dense
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix, rows_of
from penstock.kernels.reference.linear_quantized import quantize_rows_reference

from ..greedy_parity import requests, run
from ..quantized_models import linears

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj"


def read_rows(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    """int8 rows with scales in tensors of their own, except in modules that the config names."""
    if prefix in checkpoint.config.section("quantization_config").texts("ignore"):
        return read_dense(checkpoint, prefix, shape)
    codes = checkpoint.read(f"{prefix}.codes", shape, dtypes=("I8",))
    scales = checkpoint.read(f"{prefix}.scales", shape[:1])
    return QuantizedMatrix(codes=codes, scales=scales[:, None], columns_per_scale=shape[1])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "rows", read_rows)


@pytest.fixture
def rows_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The tiny model in the added format; `ignore` is a module's last name."""

    def convert(*ignore: str) -> Path:
        tensors, kept = {}, ["lm_head", "model.embed_tokens"]
        source = tiny_checkpoint("Qwen2ForCausalLM")
        for name, values in load_file(source / WEIGHTS).items():
            prefix, _, kind = name.rpartition(".")
            if prefix.endswith(ignore or ("none",)):
                kept.append(prefix)
            if values.dim() == 2 and prefix not in kept:
                codes, scales = quantize_rows_reference(values)
                tensors |= {f"{prefix}.codes": codes, f"{prefix}.scales": scales}
            else:
                tensors[f"{prefix}.{kind}"] = values
        save_file(tensors, tmp_path / WEIGHTS)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "rows", "ignore": kept}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return convert


def tokens(path: Path, **model: str | bool) -> dict[str, list[int]]:
    config = EngineConfig(
        model=ModelConfig(model=str(path), **model),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=400),
        device=DeviceConfig(device="cpu"),
    )
    core, _ = build_core(config)
    return run(core, requests(SamplingParams(temperature=0.0, max_tokens=12)))


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"], ids=["kernels", "torch"])
def test_a_model_in_an_added_format(
    compiler, rows_checkpoint, tiny_checkpoint, monkeypatch, tmp_path
):
    """Its tokens are those of the same numbers in a dense one."""
    if compiler:
        monkeypatch.setenv("CC", compiler)
    path = rows_checkpoint()
    stored = load_file(path / WEIGHTS)
    expected = load_file(tiny_checkpoint("Qwen2ForCausalLM") / WEIGHTS)
    for name in expected:
        prefix = name.removesuffix(".weight")
        if f"{prefix}.codes" in stored:
            expected[name] = stored[f"{prefix}.codes"] * stored[f"{prefix}.scales"][:, None]
    (tmp_path / "dense").mkdir()
    save_file(expected, tmp_path / "dense" / WEIGHTS)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    assert tokens(path, quantize_activations=False) == tokens(tmp_path / "dense")


def test_each_module_has_a_scheme_of_its_own(rows_checkpoint):
    """One is dense here, a part of a fused one is, and the rest is quantized."""
    path = rows_checkpoint("layers.0.self_attn.o_proj", "layers.1.self_attn.k_proj")
    model = load_model(ModelConfig(), path, torch.device("cpu"))
    is_quantized = [bool(linear.quantized) for linear in linears(model)]
    assert is_quantized == [True, False, True, True, False, True, True, True]
    stored, q_proj = load_file(path / WEIGHTS), linears(model)[4].weight[:64]
    assert torch.equal(q_proj, stored[f"{Q_PROJ}.codes"] * stored[f"{Q_PROJ}.scales"][:, None])
    assert tokens(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scales": torch.ones(32)}, (WEIGHTS, f"{Q_PROJ}.scales", "[32]", "[64]")),
        ({"codes": torch.ones(64, 64)}, (WEIGHTS, f"{Q_PROJ}.codes", "F32", "I8")),
        ({"scales": None}, (f"no tensor {Q_PROJ}.scales",)),
        ({"zeros": torch.ones(64)}, ("1 tensors", f"{Q_PROJ}.zeros")),
    ],
)
def test_mistakes_are_named(changes, words, rows_checkpoint):
    path = rows_checkpoint()
    tensors = load_file(path / WEIGHTS)
    tensors |= {f"{Q_PROJ}.{kind}": values for kind, values in changes.items()}
    save_file({name: each for name, each in tensors.items() if each is not None}, path / WEIGHTS)
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(), path, torch.device("cpu"))
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("rows_per_scale", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rows_in_another_order(dtype, rows_per_scale):
    """Each row keeps its numbers, whatever shared its scale."""
    generator = torch.Generator().manual_seed(0)
    shape = (8 // rows_per_scale, 3)
    matrix = QuantizedMatrix(
        codes=torch.randint(-7, 7, (8, 24), generator=generator).to(dtype),
        scales=torch.rand(shape, generator=generator),
        offsets=torch.rand(shape, generator=generator),
        rows_per_scale=rows_per_scale,
        columns_per_scale=8,
    )
    order = torch.randperm(8, generator=generator)
    assert torch.equal(rows_of(matrix, order).dequantize(), matrix.dequantize()[order])
