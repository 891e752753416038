"""`--quantization` from a setting to tokens: by the C kernels, and in torch, which says what they
compute.

Tolerances beside the weights as they are: logits of random models move by less than a quarter in 8
bits and a third in 4; for the demo model see `tests/load/test_quality.py`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine import LLM, ConfigError, SamplingParams
from penstock.engine.config import (
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Quantization,
)
from penstock.engine.model_files.resolve import weights_fingerprint
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.loader import load_model
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.startup import build_core
from penstock.engine.weights.converted import BYTES_VARIABLE, ConvertedMatrices, _checksum
from penstock.engine.weights.matrix import DenseMatrix
from penstock.engine.weights.quantization import num_bytes, quantize_rows
from penstock.kernels.gpu.quantized import GpuCodes
from tests.support.tiers import tiered

from .quantized_models import BLOCK_SIZE, CPU, linears, load, logits, relative_error

MOVED = {"int8": (0.003, 0.1), "fp8": (0.01, 0.25), "int4": (0.05, 0.7)}
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in ("What is paged attention?", "Spell walnut.", "Count to 12.", "Who are you?")
]


@pytest.mark.parametrize("quantization", MOVED)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_kernels_and_torch_round_alike(
    architecture: str, quantization: Quantization, tiny_checkpoint: Callable[..., Path]
):
    """Between them only what float32 rounds differently, and now and then a byte for that; far
    less than quantizing itself changes."""
    path = tiny_checkpoint(architecture)
    exact = logits(load(path, "none"))
    kernels, in_torch = (logits(load(path, quantization, in_torch=each)) for each in (False, True))
    least, most = MOVED[quantization]
    assert least < relative_error(in_torch, exact) < most
    assert relative_error(kernels, in_torch) < 0.1 * relative_error(in_torch, exact)


@pytest.mark.parametrize("quantization", MOVED)
@pytest.mark.parametrize("dtype", tiered(["bfloat16", "float16"], ["bfloat16"]))
def test_in_half_precision(
    dtype: str, quantization: Quantization, tiny_checkpoint: Callable[..., Path]
):
    path = tiny_checkpoint("Qwen3ForCausalLM", dtype=dtype)
    exact = logits(load(path, "none"))
    least, most = MOVED[quantization]
    for in_torch in (False, True):
        result = logits(load(path, quantization, in_torch=in_torch, dtype=dtype))
        assert least < relative_error(result, exact) < most


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_inputs_as_they_are_are_nearer(
    quantization: Quantization, tiny_checkpoint: Callable[..., Path]
):
    """They give what the quantized numbers give; inputs in bytes give a little less."""
    path = tiny_checkpoint()
    quantized = load_model(ModelConfig(quantization=quantization), path, CPU)
    for layer in quantized.matrix_layers:
        layer.set_matrix(DenseMatrix(torch.cat([each.dequantize() for each in layer.quantized])))
    expected = logits(TorchModel(quantized))  # type: ignore[arg-type]
    exact = load(path, quantization, quantize_activations=False)
    assert relative_error(logits(exact), expected) < 1e-5
    assert 1e-3 < relative_error(logits(load(path, quantization)), expected) < 0.05


@pytest.mark.parametrize("num_planted", [1, 5])
@pytest.mark.parametrize("in_torch", tiered([False, True], [False]))
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_columns_of_inputs_a_hundred_times_the_rest(
    quantization: Quantization, in_torch: bool, num_planted: int,
    tiny_checkpoint: Callable[..., Path], tmp_path: Path,
):  # fmt: skip
    """They do not cost the others their bits: the divergence is at most twice as large."""
    path = tiny_checkpoint(hidden_size=128)
    planted = tmp_path / "planted"
    shutil.copytree(path, planted)
    tensors = load_file(path / "model.safetensors")
    columns = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:num_planted]
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"),
               "post_attention_layernorm": ("gate_proj", "up_proj")}  # fmt: skip
    for name, values in tensors.items():
        kind = name.split(".")[-2]
        if kind in readers:
            values[columns] *= 100
        elif any(kind in kinds for kinds in readers.values()):
            values[:, columns] /= 100
    save_file(tensors, planted / "model.safetensors", {"format": "pt"})
    exact = [logits(load(each, "none")) for each in (path, planted)]
    assert relative_error(exact[1], exact[0]) < 1e-4
    divergences = [
        _divergence(logits(load(each, quantization, in_torch=in_torch)), exact[0])
        for each in (path, planted)
    ]
    assert 0 < divergences[1] < 2 * divergences[0]


def _divergence(found: Tensor, exact: Tensor) -> float:
    """KL of the logits from the exact ones, in nats."""
    p, q = (each.float().log_softmax(-1) for each in (exact, found))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("quantization", MOVED)
def test_chunks_do_not_change_a_bit(
    quantization: Quantization, tiny_checkpoint: Callable[..., Path]
):
    path = tiny_checkpoint()
    whole = logits(load(path, quantization))
    assert torch.equal(logits(load(path, quantization), (7, 1, 16, 4, 3, 14)), whole)
    assert torch.equal(logits(load(path, quantization), (30, *[1] * 15)), whole)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8)])
def test_few_bits_a_weight_and_the_originals_are_dropped(
    quantization: Quantization, bits: int, tiny_checkpoint: Callable[..., Path]
):
    path = tiny_checkpoint(hidden_size=192, intermediate_size=384, num_attention_heads=6)
    decoder = load_model(ModelConfig(quantization=quantization), path, CPU)
    in_torch = decoder.weight_bytes
    small = fastest(decoder, BLOCK_SIZE, cpu_kernels(decoder, BLOCK_SIZE))
    whole = load(path, "none")
    assert all(each.weight.numel() == 0 and not each.quantized for each in decoder.matrix_layers)
    assert isinstance(small, CpuModel)
    assert isinstance(whole, CpuModel)
    of_matrices = whole.weight_bytes / 4 * bits / 8
    for weight_bytes in (in_torch, small.weight_bytes):
        # And scales, and norms; int4 has values and the head in 8 bits.
        assert of_matrices < weight_bytes < (2.0 if bits == 4 else 1.4) * of_matrices


def test_modules_that_are_excluded(tiny_checkpoint: Callable[..., Path]):
    exclude = ("model.layers.0", "lm_head", "*.down_proj")
    config = ModelConfig(quantization="int4", quantization_exclude=exclude)
    untied = load_model(config, tiny_checkpoint(), CPU)
    assert [bool(each.quantized) for each in linears(untied)] == [False] * 4 + [True] * 3 + [False]
    assert untied.embed_tokens.quantized
    assert not untied.lm_head.quantized
    tied = load_model(config, tiny_checkpoint("Qwen2ForCausalLM", tie_word_embeddings=True), CPU)
    assert not tied.embed_tokens.quantized
    assert logits(load(tiny_checkpoint(), "int4", quantization_exclude=exclude)).isfinite().all()


def test_another_kind_for_some_modules(tiny_checkpoint: Callable[..., Path]):
    settings: dict[str, Any] = {
        "quantization_override": ("lm_head=int8", "*.layers.0.mlp=int8", "*.layers.*.mlp=none"),
        "quantization_exclude": ("*.layers.0.mlp.down_proj",),
    }
    config = ModelConfig(quantization="int4", **settings)
    for _ in range(2):  # the second time from the cache
        model = load_model(config, tiny_checkpoint(), CPU)
        bits = [each.quantized[0].bits if each.quantized else 16 for each in linears(model)]
        assert bits == [4, 4, 8, 16, 4, 4, 16, 16]
        assert model.lm_head.quantized[0].bits == 8
        assert model.quantization == "int4 + int8"
    assert logits(load(tiny_checkpoint(), "int4", **settings)).isfinite().all()


def test_only_some_modules(tiny_checkpoint: Callable[..., Path]):
    model = load_model(ModelConfig(quantization_override=("*.mlp=fp8",)), tiny_checkpoint(), CPU)
    assert [bool(each.quantized) for each in linears(model)] == [False, False, True, True] * 2
    assert model.quantization == "fp8"


@pytest.mark.parametrize("override", ["lm_head", "=int8", "lm_head=int5", "lm_head="])
def test_an_override_names_a_module_and_a_kind(override: str):
    with pytest.raises(
        ConfigError, match=f"--quantization-override must be MODULE=KIND.*{override}"
    ):
        ModelConfig(quantization_override=(override,))


def test_a_part_that_is_excluded_keeps_its_layer(tiny_checkpoint: Callable[..., Path]):
    """q, k and v are one product."""
    config = ModelConfig(quantization="int4", quantization_exclude=("*.layers.1.*.v_proj",))
    model = load_model(config, tiny_checkpoint(), CPU)
    assert [bool(each.quantized) for each in linears(model)] == [True] * 4 + [False] + [True] * 3


def test_a_pattern_that_matches_nothing_is_refused(tiny_checkpoint: Callable[..., Path]):
    config = ModelConfig(quantization="int4", quantization_exclude=("lm_haed",))
    with pytest.raises(ConfigError, match="--quantization-exclude lm_haed matches no module"):
        load_model(config, tiny_checkpoint(), CPU)
    config = ModelConfig(quantization_override=("lm_haed=int8",))
    with pytest.raises(ConfigError, match="--quantization-override lm_haed matches no module"):
        load_model(config, tiny_checkpoint(), CPU)


def test_rows_that_do_not_fill_their_blocks():
    """Zeros, NaN and the last, shorter block stay what they are."""
    rows = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    rows[1], rows[2, 150], rows[3, :64] = 0, torch.nan, 1e-30
    for kind, error in (("int8", 0.01), ("int4", 0.15), ("fp8", 0.05)):
        found = quantize_rows(rows, kind, torch.empty(0))
        numbers = found.dequantize()
        assert numbers.shape == rows.shape
        assert (numbers[1] == 0).all()
        assert numbers[2, 150:].isnan()[0]
        rest = torch.tensor([0, 3, 4])
        assert relative_error(numbers[rest], rows[rest]) < error


@pytest.mark.parametrize("kind", QUANTIZATIONS[1:])
@pytest.mark.parametrize("shape", [(3, 64), (5, 128), (2, 130), (7, 1000)])
def test_memory_is_foretold_exactly(kind: Quantization, shape: tuple[int, int]):
    like = torch.empty(0)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    held = quantize_rows(values, kind, like).for_kernels()
    assert num_bytes(kind, *shape, like.dtype) == held.nbytes
    assert num_bytes("none", *shape, like.dtype) == values.nbytes


@pytest.mark.parametrize("kind", QUANTIZATIONS[1:])
@pytest.mark.parametrize("exponent", [-30, -20, -12, 12, 20, 37])
def test_rows_far_from_one(kind: Quantization, exponent: int):
    """The same codes as near one, where a power of two makes the numbers far from it."""
    rows = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    factor = 2.0 ** (3 * exponent)
    near, far = (quantize_rows(each, kind, rows) for each in (rows, rows * factor))
    assert torch.equal(far.codes.float(), near.codes.float())
    assert torch.equal(far.scales, near.scales * factor)


@pytest.mark.parametrize("quantization", MOVED)
def test_the_second_start_reads_what_the_first_made(
    quantization: Quantization,
    tiny_checkpoint: Callable[..., Path],
    own_cache: Path,
):
    path = tiny_checkpoint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.weights.converted._MIN_VALUES", 4000)
        first = load(path, quantization)
        kept = sorted(own_cache.glob("weights/*/*.safetensors"))
        # All but k and v; what was chosen by inputs, whatever its size.
        assert len(kept) == (14 if quantization == "int4" else 12)
        patch.setattr("penstock.engine.weights.quantization._ROUND", {})
        patch.setattr("penstock.engine.weights.converted._MIN_VALUES", 1)
        with pytest.raises(KeyError):
            load(path, quantization)  # k and v are not there
    expected = logits(first)
    assert torch.equal(logits(load(path, quantization)), expected)
    for damaged in (kept[0], kept[-1]):
        damaged.write_bytes(b"damaged")
        assert torch.equal(logits(load(path, quantization)), expected)


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"scales": torch.ones(256, 2)}, "64"),
        ({"scales": torch.ones(256, 4).half()}, "64"),
        ({"nibbles": torch.ones(256 * 128).byte()}, "64"),
        ({"codes": torch.ones(256, 256)}, "64"),
        ({}, "0"),
        ({}, "-64"),
    ],
)
def test_kept_files_that_were_changed(
    changes: dict[str, Tensor], columns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept = ConvertedMatrices(bytes(32), torch.float32)
    values = torch.ones(256, 256)
    kept.add("a", "int4", quantize_rows(values, "int4", values))
    (file,) = tmp_path.glob("weights/*/a.safetensors")
    assert kept.find("a", "int4", values.shape) is not None
    tensors = {**load_file(file), **changes}
    checksum = _checksum("a", int(columns), tensors)
    save_file(tensors, file, {"columns_per_scale": columns, "checksum": checksum})
    assert kept.find("a", "int4", values.shape) is None


def _kept_file(cache: Path) -> tuple[ConvertedMatrices, Path]:
    kept, values = ConvertedMatrices(bytes(32), torch.float32), torch.randn(256, 256)
    kept.add("a", "int8", quantize_rows(values, "int8", values))
    (file,) = cache.glob("weights/*/a.safetensors")
    assert kept.find("a", "int8", values.shape) is not None
    return kept, file


@pytest.mark.parametrize("place", [-1, -256 * 256 // 2])
def test_a_kept_file_with_one_other_bit_is_made_again(
    place: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept, file = _kept_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert kept.find("a", "int8", torch.Size((256, 256))) is None


def test_a_kept_file_of_another_name_is_not_its(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept, file = _kept_file(tmp_path)
    file.rename(file.with_stem("b"))
    assert kept.find("b", "int8", torch.Size((256, 256))) is None


@pytest.mark.parametrize(
    "give_away",
    [
        lambda file: file.chmod(0o664),
        pytest.param(
            lambda file: os.chown(file, 12345, -1),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_kept_file_that_others_may_have_written_is_made_again(
    give_away: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept, file = _kept_file(tmp_path)
    give_away(file)
    assert kept.find("a", "int8", torch.Size((256, 256))) is None


def test_what_was_used_longest_ago_is_removed_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(BYTES_VARIABLE, "250000")  # three folders of 70 kB each
    values = torch.randn(256, 256)
    folders = []
    for number in range(5):
        kept = ConvertedMatrices(bytes([number]) * 32, torch.float32)
        kept.add("a", "int8", quantize_rows(values, "int8", values))
        folders.append(tmp_path / "weights" / kept._name.format("int8"))
        os.utime(folders[-1], (0, 1000 + number))
    assert [each.exists() for each in folders] == [False, True, True, True, True]
    ConvertedMatrices(bytes([1]) * 32, torch.float32).find("a", "int8", values.shape)
    kept = ConvertedMatrices(bytes([9]) * 32, torch.float32)
    kept.add("a", "int8", quantize_rows(values, "int8", values))
    assert [each.exists() for each in folders] == [False, True, False, True, True]


def test_what_a_killed_process_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept, file = _kept_file(tmp_path)
    old, new = (file.parent / f"unfinished-{name}" for name in ("old", "new"))
    for each in (old, new):
        each.mkdir()
        (each / "matrix.safetensors").touch()
    os.utime(old, (0, time.time() - 7200))
    values = torch.randn(256, 256)
    kept.add("b", "int8", quantize_rows(values, "int8", values))
    assert sorted(each.name for each in file.parent.iterdir()) == [
        "a.safetensors",
        "b.safetensors",
        "unfinished-new",
    ]


def test_a_few_weights_that_were_changed(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Fewer than the samples that tell one model's KV from another's need to meet."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(hidden_size=256, vocab_size=2048), path)
    before, fingerprint = load(path, "int4", in_torch=True), weights_fingerprint(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][1000] = 3.0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert weights_fingerprint(path) == fingerprint
    after = load(path, "int4", in_torch=True)
    rows = [
        each.decoder.embed_tokens.look_up(torch.tensor([999, 1000])) for each in (before, after)
    ]  # type: ignore[attr-defined]
    assert torch.equal(rows[0][0], rows[1][0])
    assert (rows[1][1] - 3.0).abs().max() < 0.1


def test_no_place_for_them(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    decoder = load_model(ModelConfig(), tiny_checkpoint(), CPU)
    cpu_kernels(decoder, BLOCK_SIZE)  # compiled where there is place
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file"))
    model = load_model(ModelConfig(quantization="int4"), tiny_checkpoint(), CPU)
    assert linears(model)[0].quantized
    assert "quantized again at each start" in caplog.text


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8)])
def test_a_gpu_holds_the_same_codes(
    quantization: Quantization,
    bits: int,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
):
    """Packed for its kernels, at as few bytes; tensors on a CPU say that they are on one."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512}
    path, config = tiny_checkpoint(**sizes), ModelConfig(quantization=quantization)
    expected, whole = load_model(config, path, CPU), load_model(ModelConfig(), path, CPU)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = load_model(config, path, CPU)
    monkeypatch.undo()
    for layer, same in zip(found.matrix_layers, expected.matrix_layers, strict=True):
        assert layer.weight.numel() == 0
        for packed, codes in zip(layer.quantized, same.quantized, strict=True):
            assert isinstance(packed, GpuCodes)
            torch.testing.assert_close(packed.dequantize(), codes.dequantize())
    of_matrices = whole.weight_bytes / 4 * bits / 8
    assert of_matrices < found.weight_bytes < (2.0 if bits == 4 else 1.4) * of_matrices
    assert found.quantization == quantization


def test_kv_of_other_weights_is_not_shared():
    roots = set()
    models = [ModelConfig(quantization=quantization) for quantization in QUANTIZATIONS]
    models.append(ModelConfig(quantization="int4", quantize_activations=False))
    models.append(ModelConfig(quantization="int4", quantization_exclude=("lm_head",)))
    models.append(ModelConfig(quantization="int8", quantization_override=("*.mlp=int8",)))
    for model in models:
        core, info = build_core(EngineConfig(model=model, cache=CacheConfig(num_blocks=128)))
        assert info.quantization == model.quantization
        roots.add(core.scheduler.blocks._prefixes._cache_root)
        core.close()
    assert len(roots) == len(models)


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("rounds_inputs", [True, False])
@pytest.mark.parametrize("quantization", MOVED)
def test_sizes_that_do_not_fill_a_line(
    quantization: Quantization, rounds_inputs: bool, tiny_checkpoint: Callable[..., Path]
):
    """As they are multiplied without a kernel of their own, if there is none for them."""
    path = tiny_checkpoint("Qwen3ForCausalLM", hidden_size=58, intermediate_size=90, head_dim=16)
    exact = logits(load(path, "none"))
    kernels, in_torch = (
        logits(load(path, quantization, quantize_activations=rounds_inputs, in_torch=each))
        for each in (False, True)
    )
    assert relative_error(in_torch, exact) < MOVED[quantization][1]
    assert relative_error(kernels, in_torch) < 0.1 * relative_error(in_torch, exact)
