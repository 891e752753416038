"""Loading: what is wrong with a model directory is said in one line that names the place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.models.backends import in_torch
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loader import load_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


def load(path: Path, **settings: Any) -> Decoder:
    return load_model(ModelConfig(**settings), path, CPU)


@pytest.fixture
def model_copy(tmp_path: Path, tiny_checkpoint) -> Callable[..., Path]:
    def copy(architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
        path = tmp_path / "model"
        shutil.copytree(tiny_checkpoint(architecture, **options), path)
        return path

    return copy


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    config = {name: value for name, value in config.items() if value != "absent"}
    file.write_text(json.dumps(config))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(path, model_impl="native")
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ("MambaForCausalLM", "Qwen3ForCausalLM")),
        ({"architectures": "absent"}, ("architectures", "missing")),
        ({"hidden_act": "mish"}, ("hidden_act", "'mish'")),
        ({"hidden_size": "absent"}, ("hidden_size", "missing")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        ({"head_dim": 15}, ("head_dim", "15")),
        ({"rope_parameters": {"rope_type": "polar"}}, ("rope_type", "'polar'", "yarn")),
        ({"rope_scaling": {"type": "mrope"}}, ("rope_scaling.type", "'mrope'")),
        ({"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters.factor", "missing")),
        ({"rope_parameters": [1]}, ("rope_parameters", "object")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"quantization_config": {"quant_method": "hqq"}}, ("quantization_config",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
        ({"dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "--dtype")),
        ({"vocab_size": True}, ("vocab_size", "True")),
        ({"hidden_size": float("inf")}, ("hidden_size", "inf")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rope_theta": -1.0, "rope_parameters": "absent"}, ("rope_theta", "-1.0")),
    ],
)
def test_config_mistakes(changes, words, model_copy):
    path = model_copy()
    edit_config(path, **changes)
    assert_refused(path, "config.json", *words)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_layer_types_mistakes(changes, model_copy):
    path = model_copy("Qwen2ForCausalLM")
    edit_config(path, **changes)
    assert_refused(path, "config.json", "layer_types")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"use_sliding_window": True}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}, (9, 9)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, (None,) * 2),
    ],
)
def test_windows_of_qwen_without_layer_types(changes, windows, model_copy):
    path = model_copy("Qwen2ForCausalLM")
    absent = dict.fromkeys(("layer_types", "sliding_window", "max_window_layers"), "absent")
    edit_config(path, **(absent | changes))
    assert load(path).config.windows == windows


@pytest.mark.parametrize(("window", "read"), [("absent", 4096), (None, None), (7, 7)])
def test_window_of_mistral(window, read, model_copy):
    path = model_copy("MistralForCausalLM")
    edit_config(path, sliding_window=window)
    assert load(path).config.windows == (read, read)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_config_is_not_a_json_object(content, model_copy):
    path = model_copy()
    (path / "config.json").write_bytes(content)
    assert_refused(path, "config.json")


@pytest.mark.parametrize("num_bytes", [0, 5, 500, -1, -20_000])
def test_truncated_weights(num_bytes, model_copy):
    file = model_copy() / WEIGHTS
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert_refused(file.parent, WEIGHTS, "corrupt or incomplete")


def test_weights_of_another_format(model_copy):
    path = model_copy()
    (path / WEIGHTS).write_bytes(b"PK\x03\x04" + bytes(1000))
    assert_refused(path, WEIGHTS, "corrupt or incomplete")


def test_no_weights(model_copy):
    path = model_copy()
    (path / WEIGHTS).unlink()
    assert_refused(path, "model.safetensors.index.json")


def test_missing_tensor(model_copy):
    path = model_copy()
    edit_weights(path, lambda tensors: tensors.pop(Q_PROJ))
    assert_refused(path, Q_PROJ)


def test_missing_head_of_an_untied_model(model_copy):
    path = model_copy()
    edit_weights(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(path, "lm_head.weight")


def test_tensor_of_another_shape(model_copy):
    path = model_copy()
    edit_weights(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    assert_refused(path, WEIGHTS, Q_PROJ, "[64, 32]", "[64, 64]")


def test_config_of_another_model(model_copy):
    path = model_copy()
    edit_config(path, vocab_size=200)
    assert_refused(path, "embed_tokens", "[160, 64]", "[200, 64]")


def test_quantised_tensor(model_copy):
    path = model_copy()
    int8 = torch.zeros(64, 64, dtype=torch.int8)
    edit_weights(path, lambda tensors: tensors.update({Q_PROJ: int8}))
    assert_refused(path, WEIGHTS, Q_PROJ, "I8")


def test_tensor_that_the_config_does_not_want(model_copy):
    path = model_copy(attention_bias=True)
    edit_config(path, attention_bias=False)
    assert_refused(path, "8 tensors", "self_attn.k_proj.bias")


def test_harmless_extras(model_copy):
    path = model_copy(tie_word_embeddings=True)
    extras = {
        "lm_head.weight": torch.ones(160, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_weights(path, lambda tensors: tensors.update(extras))
    model = load(path)
    assert torch.equal(in_torch(model).logits(torch.eye(64)), model.embed_tokens.weight.T)


def test_shard_missing(model_copy):
    path = model_copy(max_shard_size="50KB")
    shard = min(path.glob("model-*.safetensors"))
    shard.unlink()
    assert_refused(path, shard.name, "missing")


def test_shard_without_the_tensor_the_index_promises(model_copy):
    path = model_copy(max_shard_size="50KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = sorted(set(content["weight_map"].values()))
    content["weight_map"][Q_PROJ] = next(
        name for name in names if name != content["weight_map"][Q_PROJ]
    )
    index.write_text(json.dumps(content))
    assert_refused(path, index.name, Q_PROJ)


@pytest.mark.parametrize("weight_map", [None, [], {Q_PROJ: 3}, {Q_PROJ: "../model.safetensors"}])
def test_malformed_index(weight_map, model_copy):
    path = model_copy(max_shard_size="50KB")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(path, "weight_map")


def test_dtypes(tiny_checkpoint):
    path = tiny_checkpoint(dtype="bfloat16")
    assert load(path).dtype == torch.bfloat16
    exact = load(path, dtype="float32")
    assert exact.dtype == torch.float32
    assert exact.rotaries[0].inverse_frequencies.dtype == torch.float32
    assert load(path, dtype="float16").rotaries[0].inverse_frequencies.dtype == torch.float32


def test_dummy_weights_need_no_files_and_follow_the_seed(model_copy):
    path = model_copy("Qwen3ForCausalLM")
    (path / WEIGHTS).unlink()
    first, again, other = (
        load(path, load_format="dummy", seed=seed).state_dict() for seed in (1, 1, 2)
    )
    name = "layers.0.self_attn.qkv_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert all(value.isfinite().all() for value in first.values())
