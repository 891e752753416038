"""Every family as a GGUF file, and every key that changes the mathematics: read, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from penstock.engine import ModelLoadError
from penstock.engine.config import ModelConfig
from penstock.engine.model_files.gguf.architectures import ARCHITECTURES
from penstock.engine.models.loader import load_model
from penstock.engine.models.registry import ARCHITECTURES as NATIVE
from penstock.engine.models.registry import read_model_config
from tests.support.tiers import tiered

from ...quantized_models import CPU, load, logits, relative_error
from .written import FAMILIES, config_of, directory_of, write

# Each way in which a file's layout differs from a checkpoint's is in one of them.
FIRST = ("llama fused", "gemma3", "gpt2", "gpt-oss", "falcon 40b", "stablelm 2 12b")


def checkpoint_of(name: str, tiny_checkpoint: Any) -> Path:
    _, family = FAMILIES[name]
    path: Path = tiny_checkpoint(family.model, **family.options)
    return path


@pytest.mark.parametrize("name", tiered(FAMILIES, FIRST))
def test_logits_are_those_of_the_checkpoint(name: str, tiny_checkpoint: Any, tmp_path: Path):
    source = checkpoint_of(name, tiny_checkpoint)
    write(source, tmp_path / "x.gguf", name)
    path = directory_of(tmp_path / "x.gguf", tmp_path / "made")
    _, expected = read_model_config(source)
    _, found = read_model_config(path)
    differing = [
        field
        for field in expected.__dataclass_fields__
        if getattr(found, field) != getattr(expected, field)
    ]
    assert set(differing) <= {"dtype", "context_len", "has_mlp_norm"}  # Bloom's has none in it
    error = relative_error(logits(load(path, "none")), logits(load(source, "none")))
    assert error < 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    tiered(
        [("llama", "Q4_0"), ("falcon 40b", "Q8_0"), ("qwen3 moe", "Q4_0"), ("bloom", "Q5_1")],
        [("falcon 40b", "Q8_0"), ("qwen3 moe", "Q4_0")],
    ),
)
def test_rows_of_blocks_are_reordered_too(
    name: str, kind: str, tiny_checkpoint: Any, tmp_path: Path
):
    source, dense = checkpoint_of(name, tiny_checkpoint), tmp_path / "dense"
    write(source, tmp_path / "x.gguf", name, lambda _: kind)
    path = directory_of(tmp_path / "x.gguf", tmp_path / "made")
    shutil.copytree(source, dense)
    of_kind, numbers = gguf.GGMLQuantizationType[kind], load_file(source / "model.safetensors")
    for tensor, values in numbers.items():
        if values.ndim > 1 and not tensor.endswith("mlp.gate.weight"):
            numbers[tensor] = gguf.dequantize(gguf.quantize(values, of_kind), of_kind)
    save_file(numbers, dense / "model.safetensors", metadata={"format": "pt"})
    exact = load(path, "none", quantize_activations=False)
    assert relative_error(logits(exact), logits(load(dense, "none"))) < 1e-5
    assert load_model(ModelConfig(), path, CPU).quantization == f"gguf {kind}"


def test_mxfp4(tiny_checkpoint: Any, tmp_path: Path):
    """gpt-oss's experts stay in it."""
    source, file = checkpoint_of("gpt-oss", tiny_checkpoint), tmp_path / "x.gguf"
    write(source, file, "gpt-oss", lambda there: "MXFP4" if "_exps" in there else "F32")
    path = directory_of(file, tmp_path / "made")
    model = load_model(ModelConfig(dtype="float32"), path, CPU)
    assert model.layers[0].mlp.experts.down_proj.quantized
    error = relative_error(logits(load(path, "none")), logits(load(source, "none")))
    assert 1e-3 < error < 0.5


def test_every_native_family_of_llama_cpp_has_an_entry():
    models = {each.model for each in ARCHITECTURES.values()} | {
        FAMILIES[name][1].model for name in FAMILIES
    }
    without = NATIVE.keys() - models
    assert without == {"OPTForCausalLM", "GPTJForCausalLM"}  # llama.cpp has neither
    written = {architecture for architecture, _ in FAMILIES.values()}
    assert written == ARCHITECTURES.keys() - {"bert", "nomic-bert"}  # `test_encoder.py` has them


# -- keys --------------------------------------------------------------------------------------


@pytest.fixture
def config_with(tiny_checkpoint: Any, tmp_path: Path) -> Any:
    """The `config.json` of a family's file with other keys."""

    def make(name: str = "llama", tensors: Any = None, **keys: Any) -> dict[str, Any]:
        source, file = checkpoint_of(name, tiny_checkpoint), tmp_path / "x.gguf"
        extra = {key.replace("__", "."): value for key, value in keys.items()}
        write(source, file, name, extra=extra, tensors=tensors)
        return config_of(file, tmp_path / "made")

    return make


ORIGINAL = "rope__scaling__original_context_length"


def test_linear_scaling(config_with: Any):
    found = config_with(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def test_linear_scaling_by_the_old_key(config_with: Any):
    assert config_with(rope__scale_linear=2.0)["rope_scaling"]["factor"] == 2.0


def test_yarn(config_with: Any):
    keys = {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, ORIGINAL: 64,
        "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0,
        "rope__scaling__yarn_attn_factor": 1.25, "rope__scaling__yarn_ext_factor": 1.0,
    }  # fmt: skip
    assert config_with(**keys)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25, "rope_theta": 10000.0,
    }  # fmt: skip


def test_no_scaling(config_with: Any):
    assert "rope_scaling" not in config_with(rope__scaling__type="none", rope__scaling__factor=4.0)


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (16.0, 16384)])
def test_the_rotary_factors_of_llama_3(factor: float, context: int, config_with: Any):
    """llama.cpp stores how much slower each frequency is; transformers has the parameters."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(head_dim=16, max_position_embeddings=131072, rope_parameters=scaling)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    factors = (500000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled).numpy()
    tensors = {"rope_freqs.weight": factors.astype(np.float32)}
    assert config_with(tensors=tensors, rope__freq_base=500000.0)["rope_scaling"] == scaling


def test_other_rotary_factors_are_refused(config_with: Any):
    factors = np.array([1.0, 1.0, 5.0, 2.0, 3.0, 4.0, 8.0, 8.0], np.float32)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight is not a scaling"):
        config_with(tensors={"rope_freqs.weight": factors})


def test_longrope(config_with: Any):
    tensors = {
        f"rope_factors_{name}.weight": np.linspace(1, last, 8, dtype=np.float32)
        for name, last in (("short", 2), ("long", 8))
    }
    keys = {ORIGINAL: 64, "rope__scaling__attn_factor": 1.25}
    found = config_with("phi3", tensors=tensors, **keys)["rope_scaling"]
    assert found["long_factor"][-1] == 8.0
    assert found["short_factor"][-1] == 2.0
    assert found["attention_factor"] == 1.25
    assert found["original_max_position_embeddings"] == 64


def test_key_lengths(config_with: Any):
    keys = {"attention__key_length": 48, "attention__value_length": 48}
    assert config_with("qwen3", **keys)["head_dim"] == 48


@pytest.mark.parametrize(
    ("pattern", "windows"), [(2, "sf" * 3), ([False, True] * 3, "fs" * 3), (None, "sssssf")]
)
def test_layers_with_windows(pattern: Any, windows: str, config_with: Any):
    found = config_with("gemma3", attention__sliding_window_pattern=pattern)
    assert "".join(kind[0] for kind in found["layer_types"]) == windows


def test_models_without_windows(config_with: Any):
    found = config_with("gemma3", attention__sliding_window=None)
    assert found["sliding_window"] is None
    assert set(found["layer_types"]) == {"full_attention"}


def test_gemma_of_older_files_has_the_usual_base_of_windows(config_with: Any):
    found = config_with("gemma3", rope__freq_base_swa=None)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1000000.0, 10000.0)


def test_one_value_for_all_layers(config_with: Any):
    assert config_with(attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention.temperature_length": 8192}),
    ("llama", {"attention.value_length": 8}),
    ("llama", {"attention.head_count_kv": [2, 4]}),
    ("llama", {"attention.causal": False}),
    ("llama", {"rope.dimension_count": 8}),
    ("llama", {"rope.scaling.type": "longrope"}),
    ("llama", {"rope.scaling.attn_factor": 1.5}),
    ("llama", {"rope.scaling.yarn_ext_factor": 0.5}),
    ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}),
    ("llama", {"rope.dimension_sections": [8, 4, 4, 0]}),
    ("llama", {"embedding_scale": 12.0}),
    ("llama", {"nextn_predict_layers": 1}),
    ("llama", {"no_such_key": 1}),
    ("gemma2", {"rope.freq_base_swa": 20000.0}),
    ("gemma3", {"attention.sliding_window_pattern": [True]}),
    ("olmo", {"attention.layer_norm_epsilon": 1e-6}),
    ("olmo2", {"attention.sliding_window": 4096}),
    ("qwen3 moe", {"expert_weights_norm": False}),
    ("qwen3 moe", {"expert_weights_scale": 2.5}),
    ("qwen3 moe", {"expert_gating_func": 2}),
    ("qwen3 moe", {"expert_group_count": 4}),
    ("qwen2 moe", {"expert_shared_count": 2}),
    ("granite", {"rope.scaling.finetuned": False}),
    ("granite moe", {"expert_shared_feed_forward_length": 64}),
    ("bloom", {"feed_forward_length": 128}),
    ("gpt2", {"attention.key_length": 32}),
]


@pytest.mark.parametrize(
    ("name", "keys"), REFUSED, ids=[f"{name} {next(iter(keys))}" for name, keys in REFUSED]
)
def test_what_is_not_read_is_refused_by_its_key(name: str, keys: dict[str, Any], config_with: Any):
    [key] = keys
    with pytest.raises(ModelLoadError) as caught:
        config_with(name, **{key.replace(".", "__"): keys[key]})
    assert f"x.gguf: {FAMILIES[name][0]}.{key}: " in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "rope.scaling.finetuned", "tensor_data_layout"])
def test_keys_that_change_nothing(key: str, config_with: Any):
    assert config_with(**{key.replace(".", "__"): 1})["vocab_size"] == 160


def test_an_adapter_is_no_model(config_with: Any):
    with pytest.raises(ModelLoadError, match=r"general\.type: the file is no model but 'adapter'"):
        config_with(**{"general.type": "adapter"})


def test_a_missing_key_is_named(config_with: Any):
    with pytest.raises(ModelLoadError, match=r"llama\.block_count: is missing"):
        config_with(block_count=None)
