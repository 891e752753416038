"""`penstock models`: what is said of a model, and what the engine then does with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.model_summary import summarise
from penstock.engine.startup import build_core
from penstock.gateway.launch.cli import main

TinyCheckpoint = Callable[..., Path]


def facts(config: ModelConfig, cache: CacheConfig | None = None) -> dict[str, str]:
    lines = summarise(config, cache or CacheConfig()).splitlines()
    return {line[:13].strip(): line[14:] for line in lines}


def num_bytes(found: dict[str, str]) -> int:
    return int(found["weights"].split()[0].replace(",", ""))


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("LlamaForCausalLM", "natively"),
        ("MixtralForCausalLM", "natively"),
        ("ArceeForCausalLM", "through transformers"),
    ],
)
def test_it_says_what_the_engine_does(
    architecture: str, how: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    config = ModelConfig(model=str(tiny_checkpoint(architecture)))
    found = facts(config)
    core, info = build_core(EngineConfig(model=config, cache=CacheConfig(num_blocks=64)))
    assert found["architecture"] == architecture
    assert found["runs"] == how
    assert found["context"] == f"{info.max_model_len} tokens"
    assert num_bytes(found) == pytest.approx(info.weight_bytes, rel=0.05)
    assert found["KV cache"].startswith(f"{info.bytes_per_block // info.block_size:,} bytes per")
    assert found["fits"].startswith("yes")
    assert core.has_work() is False


def test_an_option_that_a_family_has_not_is_left_to_transformers(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    path = tiny_checkpoint("LlamaForCausalLM", hidden_act="quick_gelu")
    config = ModelConfig(model=str(path), dtype="float32")
    assert facts(config)["runs"].startswith("through transformers, since natively")
    assert "hidden_act: 'quick_gelu' is not supported" in facts(config)["runs"]
    with pytest.raises(ModelLoadError, match="hidden_act: 'quick_gelu' is not supported"):
        facts(replace(config, model_impl="native"))


def test_what_neither_has_is_refused_with_both_reasons(tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint("MistralForCausalLM", hidden_act="quick_gelu")
    with pytest.raises(ModelLoadError, match=r"hidden_act: .* through transformers: .* dropped"):
        facts(ModelConfig(model=str(path)))


def test_quantization_and_cache_count(tiny_checkpoint: TinyCheckpoint) -> None:
    config = ModelConfig(model=str(tiny_checkpoint()), dtype="float32", quantization="int8")
    dense = facts(ModelConfig(model=config.model, dtype="float32"))
    small = facts(config, CacheConfig(kv_cache_dtype="int8"))
    assert 3 * num_bytes(small) < num_bytes(dense)
    assert "(int8)" in small["KV cache"]


def test_the_command_refuses_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 8})
    )
    assert main(["models", str(tmp_path), "--dtype", "float32"]) == 1
    out, error = capfd.readouterr()
    assert out == ""
    assert "refused: " in error
    assert "MambaForCausalLM" in error
