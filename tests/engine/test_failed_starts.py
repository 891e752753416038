"""What makes a start fail, in the words that `penstock serve` prints, on one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import FITTING_LEN, ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.startup import build_core
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.settings import engine_config, resolve_settings


def fault(**settings: Any) -> str:
    """Of an engine with these options of `serve`."""
    with pytest.raises(ConfigError) as caught:
        build_core(engine_config(resolve_settings(settings, {})))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/no/such/model"}, ("'/no/such/model' is not a directory",)),
        ({"kv_cache_memory_bytes": 1 << 20}, ("2048 tokens", "--max-model-len")),
        ({"kv_cache_memory_bytes": 100 << 40}, ("bytes free",)),
        ({"num_blocks": 9_999_999}, ("bytes free",)),
        ({"max_model_len": 99_999_999}, ("--max-model-len",)),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8},
            ("max-num-batched-tokens",),
        ),
    ],
)
def test_settings_that_cannot_work(settings: Mapping[str, Any], words: tuple[str, ...]) -> None:
    text = fault(**settings)
    assert all(each in text for each in words), text


def test_a_context_that_is_as_long_as_the_cache(tmp_path: Path) -> None:
    """`--max-model-len auto`, where the model's whole context would be refused."""
    for num_blocks, length in ((20, 320), (500, 2048)):
        settings = {"num_blocks": num_blocks, "max_model_len": FITTING_LEN}
        core, info = build_core(engine_config(resolve_settings(settings, {})))
        core.close()
        assert info.max_model_len == length
    assert "2048 tokens" in fault(num_blocks=20)


def test_a_model_that_is_not_supported(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}))
    text = fault(model=str(tmp_path))
    assert "Mamba is not supported" in text
    assert "LlamaForCausalLM" in text, "it says what would work"


def test_a_model_with_defaults_that_make_no_sense(tmp_path: Path) -> None:
    """Which the gateway finds."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_PATH, model)
    (model / "generation_config.json").write_text('{"top_p": 0}')
    config = GatewayConfig(engine_address="unused", model=ModelConfig(model=str(model)))
    with pytest.raises(ModelLoadError, match=r"generation_config.json: top_p must be in \(0, 1\]"):
        create_app(config)
