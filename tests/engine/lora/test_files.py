"""What is not supported, or damaged, is refused by name."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.lora import files, patterns, slots
from penstock.engine.lora.files import CONFIG_FILE, WEIGHTS_FILE, find_adapter, read_config
from penstock.engine.request import Adapter
from tests.engine.models.test_experts import VARIANTS as EXPERTS

from .test_parity import engine

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter_path(tiny_checkpoint, make_adapter) -> Path:
    return make_adapter(tiny_checkpoint(), 1, target_modules=["q_proj"])


@pytest.fixture(scope="module")
def core(tiny_checkpoint):
    return engine(tiny_checkpoint())


@pytest.fixture
def copied(adapter_path, tmp_path) -> Path:
    return Path(shutil.copytree(adapter_path, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "use_dora: True is not supported"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: \['lm_head'\] is not supported"),
        ("bias", "lora_only", "bias: 'lora_only' is not supported, only 'none'"),
        ("lora_bias", True, "lora_bias: True is not supported"),
        ("layer_replication", [[0, 2]], "layer_replication"),
        ("trainable_token_indices", [3], "trainable_token_indices"),
        ("target_parameters", ["experts"], "target_parameters"),
        ("some_new_field", {"a": 1}, "some_new_field"),
        ("peft_type", "IA3", "peft_type: expected 'LORA', not 'IA3'"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights: 'pissa_niter_4' changes"),
        ("r", 0, "r: expected an integer from 1"),
        ("r", 17, "r: the rank 17 is more than --max-lora-rank 16"),
        ("rank_pattern", {"q_proj": 64}, "the rank 64 is more than"),
        ("rank_pattern", {"q_proj": "8"}, "rank_pattern: expected positive numbers"),
        ("target_modules", 3, "target_modules: expected a text or a list"),
        ("lora_alpha", "x", "lora_alpha: expected a number"),
    ],
)
def test_a_setting_is_refused_by_its_name(copied, field, value, message):
    file = copied / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ModelLoadError, match=message):
        read_config(copied, max_rank=16)


BOMB = "([a-z._0-9]+)+X"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern: '\\(' is no regular expression"),
        ({"target_modules": "(" * 5000}, "target_modules: .* is no regular expression"),
        ({"target_modules": BOMB}, "target_modules: matching takes more than"),
        ({"target_modules": ".*q_proj", "exclude_modules": BOMB}, "exclude_modules: matching"),
        ({"rank_pattern": {BOMB: 8}}, "rank_pattern: matching"),
        ({"alpha_pattern": {BOMB: 8}}, "alpha_pattern: matching"),
        (
            {"layers_to_transform": [0], "layers_pattern": BOMB},
            "layers_pattern: matching",
        ),
        ({"rank_pattern": {str(n): 8 for n in range(5000)}}, "rank_pattern: 5000 patterns"),
        ({"target_modules": "q" * 20000}, "target_modules: a pattern has more than"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_pattern_that_does_not_end_is_refused_before_anything_is_loaded(
    copied, monkeypatch, fields, message
):
    monkeypatch.setattr(patterns, "MAX_CPU_S", 0.3)
    file = copied / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ModelLoadError, match=message):
        find_adapter("mine", str(copied))


MODULES = [
    *(f"model.layers.{n}.self_attn.{each}_proj" for n in range(12) for each in "qkvo"),
    *(f"model.layers.{n}.mlp.down_proj" for n in range(12)),
    *(f"model.vision.blocks.{n}.self_attn.q_proj" for n in range(3)),
]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"^(?!.*vision).*\.(?:q|v)_proj$"},
        {"target_modules": "q_proj"},
        {"target_modules": ["q_proj", "layers.3.mlp.down_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1[01]\..*"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["self_attn.v_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 10]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "blocks"},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": ["layers", "blocks"],
        },
    ],
    ids=str,
)
def test_patterns_mean_what_they_mean_in_peft(copied, fields):
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}
    (copied / CONFIG_FILE).write_text(json.dumps(settings))
    updates = read_config(copied).updates(dict.fromkeys(MODULES, True))
    config = LoraConfig(**{**settings, "peft_type": None})
    expected = [each for each in MODULES if check_target_module_exists(config, each) is True
                or isinstance(check_target_module_exists(config, each), re.Match)]  # fmt: skip
    assert [name for name, each in updates.items() if each.is_expected] == expected


def test_the_first_pattern_that_matches_gives_rank_and_alpha(copied):
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "rank_pattern": {"3.self_attn.q_proj": 2, r"layers\.\d\..*q_proj": 4},
        "alpha_pattern": {"q_proj": 32},
    }
    (copied / CONFIG_FILE).write_text(json.dumps(settings))
    updates = read_config(copied).updates(dict.fromkeys(MODULES, True))
    found = [updates[f"model.layers.{n}.self_attn.q_proj"] for n in (3, 4, 11)]
    assert [(each.rank, each.scale) for each in found] == [(2, 16.0), (4, 8.0), (8, 4.0)]


def test_an_adapter_that_is_too_large_is_refused_before_it_is_read(copied, core, monkeypatch):
    with (copied / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(30 << 30)  # sparse
    monkeypatch.setattr(files, "content_digest", None)
    with pytest.raises(ModelLoadError, match="has 32,212,254,720 bytes, more than"):
        find_adapter("mine", str(copied), max_bytes=core.adapters.max_bytes)
    monkeypatch.setattr(slots, "content_digest", None)
    with pytest.raises(InvalidRequestError, match="bytes, more than"):
        core.preparation.load(
            core.adapters.need(Adapter(name="mine", path=str(copied), digest="0" * 64))
        )


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        find_adapter("a", str(copied))


A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
ELSEWHERE = f"{Q_PROJ.replace('q_proj', 'x_proj')}.lora_A.weight"
MISSING = "layers.1.self_attn.q_proj.lora_A.weight is missing"


@pytest.mark.parametrize(
    ("added", "removed", "message"),
    [
        ({A: torch.zeros(8, 65)}, "", "q_proj.lora_A.weight has shape"),
        ({B: torch.full((64, 8), math.nan)}, "", "lora_B.weight has numbers that are not finite"),
        ({A: torch.zeros(8, 64, dtype=torch.int8)}, "", "is I8; supported"),
        ({f"{Q_PROJ}.lora_magnitude_vector": torch.zeros(64)}, "", "_vector is not supported"),
        ({ELSEWHERE: torch.zeros(8, 64)}, "", "where this model takes no adapter"),
        ({}, "layers.1", MISSING),
        ({}, "lora_B", "lora_B.weight is missing"),
    ],
)
def test_a_damaged_tensor_is_named(core, copied, added, removed, message):
    tensors = load_file(copied / WEIGHTS_FILE) | added
    kept = {name: each for name, each in tensors.items() if not removed or removed not in name}
    save_file(kept, copied / WEIGHTS_FILE)
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        core.preparation.load(core.adapters.need(find_adapter("mine", str(copied))))
    assert refusal.value.param == "model"
    assert "the adapter 'mine' cannot be loaded" in str(refusal.value)


def test_a_cut_file_is_named(core, copied):
    data = (copied / WEIGHTS_FILE).read_bytes()
    (copied / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(InvalidRequestError, match="safetensors is corrupt or incomplete"):
        core.preparation.load(core.adapters.need(find_adapter("mine", str(copied))))


@pytest.mark.parametrize(
    "tensor",
    [
        "mlp.experts.2.up_proj.lora_A.weight",
        "mlp.experts.2.down_proj.lora_B.weight",
        "mlp.experts.base_layer.lora_A.weight",  # PEFT's, of all experts in one tensor
        "mlp.gate.lora_A.weight",
        "mlp.shared_expert_gate.lora_A.weight",
    ],
)
def test_matrices_of_experts_and_routers_are_refused_by_tensor(
    tiny_checkpoint, tmp_path, tensor, make_adapter
):
    architecture, options = EXPERTS["qwen2 shared"]
    base = tiny_checkpoint(architecture, **options)
    path = shutil.copytree(make_adapter(base, 1, target_modules=["q_proj"]), tmp_path / "adapter")
    name = f"base_model.model.model.layers.1.{tensor}"
    save_file({**load_file(path / WEIGHTS_FILE), name: torch.zeros(8, 64)}, path / WEIGHTS_FILE)
    core, adapter = engine(base), find_adapter("mine", str(path))
    with pytest.raises(InvalidRequestError) as refusal:
        core.preparation.load(core.adapters.need(adapter))
    assert f"tensor {name} is of model.layers.1" in str(refusal.value)
    assert "where this model takes no adapter" in str(refusal.value)
