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

from ..quantized_models import CPU, load, logits


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM",
     "FalconForCausalLM", "GptOssForCausalLM"],
)  # fmt: skip
@pytest.mark.exhaustive
def test_layers_one_after_the_other_read_what_the_model_does(
    architecture: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    own_cache: Path,
):  # fmt: skip
    """The sums of all layers' inputs are those of the whole model."""
    path = tiny_checkpoint(architecture)
    seen: list[dict[str, Tensor]] = []
    original = calibration._second_moments

    def watch(*args):  # type: ignore[no-untyped-def]
        sums = original(*args)
        names = {module: name for name, module in args[0].named_modules()}
        seen.append({names[module]: each for module, each in sums.items()})
        return sums

    monkeypatch.setattr(calibration, "_second_moments", watch)
    load_model(ModelConfig(quantization="int4"), path, CPU)
    monkeypatch.undo()
    moments = {name: each for layer in seen for name, each in layer.items()}
    whole = load_model(ModelConfig(dtype="float32"), path, CPU)
    linears = {name: each for name, each in whole.named_modules() if name in moments}
    assert len(linears) == len(moments) > 1
    sequences = calibration._sequences(path, whole.config)  # type: ignore[union-attr]
    states = [torch.empty(0)] * len(sequences)
    with torch.inference_mode():
        expected = original(whole, linears.values(), sequences, states)  # type: ignore[arg-type]
    for name, found in moments.items():
        torch.testing.assert_close(found, expected[linears[name]], rtol=1e-4, atol=1e-3)


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
