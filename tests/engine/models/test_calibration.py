"""4-bit codes chosen by what a layer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.models import calibration
from penstock.engine.models.loader import load_model
from penstock.engine.weights.quantization import BLOCK, quantize_rows

from ..quantized_models import CPU, load, logits, relative_error


def _inputs(num_features: int) -> Tensor:
    """[2000, num_features] that depend on each other, some columns far larger than others."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(2000, num_features, generator=generator)
    mixed = mixed @ torch.randn(num_features, num_features, generator=generator)
    return mixed * torch.logspace(-1, 1, num_features)[torch.randperm(num_features)]


@pytest.mark.parametrize("num_features", [64, 200, 333])
def test_products_change_less_than_by_the_nearest_codes(num_features: int):
    torch.manual_seed(0)
    x, matrix = _inputs(num_features), torch.randn(48, num_features)
    errors = [
        relative_error(x @ quantize_rows(matrix, "int4", x, moments).dequantize().T, x @ matrix.T)
        for moments in (None, x.T @ x)
    ]
    assert errors[1] < 0.75 * errors[0]


def test_inputs_that_are_always_zero_and_fewer_tokens_than_columns():
    x = _inputs(128)[:20]
    x[:, 5:40] = 0
    matrix = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    found = quantize_rows(matrix, "int4", x, x.T @ x)
    assert found.columns_per_scale == BLOCK
    assert relative_error(x @ found.dequantize().T, x @ matrix.T) < 0.1


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_rounded_alone(damage: float):
    """Neither in a matrix nor in what it reads do they spread."""
    matrix, x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), _inputs(64)
    matrix[3, 4] = damage
    found = quantize_rows(matrix, "int4", x, x.T @ x).dequantize()
    assert not found[3].isfinite().all()
    assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    moments = torch.full((64, 64), damage)
    assert quantize_rows(matrix[:3], "int4", x, moments).dequantize().isfinite().all()


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM",
     "FalconForCausalLM", "GptOssForCausalLM"],
)  # fmt: skip
def test_layers_one_after_the_other_read_what_the_model_does(
    architecture: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    own_cache: Path,
):  # fmt: skip
    """The sums of all layers' inputs are those of the whole model."""
    path = tiny_checkpoint(architecture)
    seen: list[dict[str, Tensor]] = []
    original = calibration._second_moments

    def watch(*args):  # type: ignore[no-untyped-def]
        context = original(*args)
        seen.append(context.__enter__())
        return _Given(seen[-1], context)

    monkeypatch.setattr(calibration, "_second_moments", watch)
    load_model(ModelConfig(quantization="int4"), path, CPU)
    monkeypatch.undo()
    moments = {name: each for layer in seen for name, each in layer.items()}
    whole = load_model(ModelConfig(dtype="float32"), path, CPU)
    linears = {name: each for name, each in whole.named_modules() if name in moments}
    assert len(linears) == len(moments) > 1
    sequences = calibration._sequences(path, whole.config)  # type: ignore[union-attr]
    with torch.inference_mode(), original(linears) as expected:  # type: ignore[arg-type]
        for sequence in sequences:
            context = calibration._context(whole, len(sequence))  # type: ignore[arg-type]
            whole(sequence, context)
    for name, found in moments.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-3)


class _Given:
    def __init__(self, sums: dict[str, Tensor], context: object) -> None:
        self.sums, self.context = sums, context

    def __enter__(self) -> dict[str, Tensor]:
        return self.sums

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)  # type: ignore[attr-defined]


def test_chosen_once_and_also_without_a_place(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, own_cache: Path,
    tmp_path: Path,
):  # fmt: skip
    path = tiny_checkpoint()
    expected = logits(load(path, "int4", in_torch=True))
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file"))
        assert torch.equal(logits(load(path, "int4", in_torch=True)), expected)
    monkeypatch.setattr(calibration, "_run", None)  # the kept ones suffice
    assert torch.equal(logits(load(path, "int4", in_torch=True)), expected)
