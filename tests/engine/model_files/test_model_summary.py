"""`penstock models`: what is said of a model, and what the engine then does with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, Quantization
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.model_summary import summarise
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.startup import build_core
from penstock.engine.weights.formats.gguf import _TYPES
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.cli import main

from .gguf.written import convert

TinyCheckpoint = Callable[..., Path]


@pytest.fixture
def tiny(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> TinyCheckpoint:
    """A tiny model with a tokenizer, without which none is served."""

    def build(*args: Any, **options: Any) -> Path:
        path = tmp_path / "tiny"
        shutil.copytree(tiny_checkpoint(*args, **options), path)
        shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", path)
        return path

    return build


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
        ("HeliumForCausalLM", "through transformers"),
    ],
)
def test_it_says_what_the_engine_does(architecture: str, how: str, tiny: TinyCheckpoint) -> None:
    config = ModelConfig(model=str(tiny(architecture)))
    found = facts(config)
    core, info = build_core(EngineConfig(model=config, cache=CacheConfig(num_blocks=64)))
    assert found["architecture"] == architecture
    assert found["runs"] == how
    assert found["context"] == f"{info.max_model_len} tokens"
    assert num_bytes(found) == pytest.approx(info.weight_bytes, rel=0.05)
    assert found["KV cache"].startswith(f"{info.bytes_per_block // info.block_size:,} bytes per")
    assert found["fits"].startswith("yes")
    assert core.has_work() is False


def test_an_option_that_a_family_has_not_is_left_to_transformers(tiny: TinyCheckpoint) -> None:
    path = tiny("LlamaForCausalLM", hidden_act="quick_gelu")
    config = ModelConfig(model=str(path), dtype="float32")
    assert facts(config)["runs"].startswith("through transformers, since natively")
    assert "hidden_act: 'quick_gelu' is not supported" in facts(config)["runs"]
    with pytest.raises(ModelLoadError, match="hidden_act: 'quick_gelu' is not supported"):
        facts(replace(config, model_impl="native"))


def test_what_neither_has_is_refused_with_both_reasons(tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint("MistralForCausalLM", hidden_act="quick_gelu")
    with pytest.raises(ModelLoadError, match=r"hidden_act: .* through transformers: .* dropped"):
        facts(ModelConfig(model=str(path)))


def test_it_says_how_a_model_is_sampled(tiny: TinyCheckpoint) -> None:
    assert facts(ModelConfig())["sampling"] == "temperature 0.2, top_p 0.9"
    path = tiny()
    assert facts(ModelConfig(model=str(path)))["sampling"] == "no defaults of its own"
    given = '{"top_k": 40}'
    config = ModelConfig(model=str(path), override_generation_config=given)
    assert facts(config)["sampling"] == "top_k 40"


@pytest.mark.usefixtures("own_cache")
def test_a_chat_template_is_looked_at(tiny: TinyCheckpoint) -> None:
    config = ModelConfig(model=str(tiny()), chat_template="{% for")
    with pytest.raises(ModelLoadError, match=r"^--chat-template: the chat template is broken"):
        facts(config)


def test_quantization_and_cache_count(tiny: TinyCheckpoint) -> None:
    config = ModelConfig(model=str(tiny()), dtype="float32", quantization="int8")
    dense = facts(ModelConfig(model=config.model, dtype="float32"))
    small = facts(config, CacheConfig(kv_cache_dtype="int8"))
    assert 3 * num_bytes(small) < num_bytes(dense)
    assert "(int8)" in small["KV cache"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_bytes_of_each_matrix_are_foretold(
    architecture: str, kind: Quantization, tiny: TinyCheckpoint
) -> None:
    """int4 gives values and the head 8 bits; a model of 16 bits has scales of 16."""
    shape = {"hidden_size": 384, "intermediate_size": 768, "vocab_size": 960, "head_dim": 48}
    path = tiny(architecture, **shape)
    config = ModelConfig(model=str(path), dtype="bfloat16", quantization=kind)
    core, info = build_core(EngineConfig(model=config, cache=CacheConfig(num_blocks=64)))
    core.close()
    assert num_bytes(facts(config)) == pytest.approx(info.weight_bytes, rel=0.025)


# What can be wrong with a model that nothing of has been loaded, and what is said.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
    "weights cut off": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x08"), "model.safetensors"
    ),
    "format": (
        lambda path: _set(path / "config.json", quantization_config={"quant_method": "new"}),
        "'new' checkpoints are not supported",
    ),
    "layers": (
        lambda path: _set(path / "config.json", num_hidden_layers=99), "num_hidden_layers: the"
    ),
    "heads": (
        lambda path: _set(path / "config.json", num_key_value_heads=1), "has shape"
    ),
    "architecture": (
        lambda path: _set(path / "config.json", architectures=["MambaForCausalLM"]), "Mamba"
    ),
    "field": (lambda path: _set(path / "config.json", num_attention_heads="x"), "num_attention_h"),
    "tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "defaults": (lambda path: _set(path / "generation_config.json", top_p=0), "top_p must be in"),
    "template": (
        lambda path: (path / "chat_template.jinja").write_text("{% for"), "template is broken"
    ),
}  # fmt: skip


def _set(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("name", BROKEN)
def test_it_refuses_what_the_server_refuses_in_the_same_words(
    name: str, tiny: TinyCheckpoint
) -> None:
    path = tiny()
    break_it, said = BROKEN[name]
    break_it(path)
    assert said in same_refusal(str(path))


def same_refusal(model: str) -> str:
    """What `penstock models` says of a model, and so does a server, engine or gateway."""
    config = ModelConfig(model=model)
    with pytest.raises(ConfigError) as here:
        facts(config)
    said = []
    for start in (
        lambda: build_core(EngineConfig(model=config, cache=CacheConfig(num_blocks=64))),
        lambda: create_app(GatewayConfig(engine_address="unused", model=config)),
    ):
        with suppress_errors(said):
            start()
    assert str(here.value) in said
    return str(here.value)


@contextmanager
def suppress_errors(said: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        said.append(str(error))


# -- GGUF files are refused in the words of who has them: no path is one of our cache ------------


@pytest.fixture
def gguf_file(tmp_path: Path, own_cache: Path) -> Callable[..., Path]:
    """The built-in model as one file, with another type or other keys."""

    def make(kind: str = "BF16", **keys: object) -> Path:
        file = tmp_path / "some.gguf"
        convert(DEMO_MODEL_PATH, file, lambda _: kind, keys)
        return file

    return make


def test_a_gguf_file_of_another_architecture(gguf_file: Callable[..., Path]) -> None:
    file = gguf_file(**{"general.architecture": "mamba"})
    said = same_refusal(str(file))
    assert said.startswith(f"{file}: general.architecture: 'mamba' is not supported; supported: ")
    assert "llama, " in said


def test_a_gguf_file_with_a_wrong_field(gguf_file: Callable[..., Path]) -> None:
    """By the name that was given, though it may be a link's."""
    file = gguf_file(**{"attention.layer_norm_rms_epsilon": 1e7})
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    assert same_refusal(str(link)).startswith(f"{link}: ")
    assert same_refusal(str(file)).startswith(f"{file}: llama.attention.layer_norm_rms_epsilon: ")


def test_a_gguf_file_of_another_type(
    gguf_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_file("Q8_0")
    monkeypatch.delitem(_TYPES, "Q8_0")
    said = same_refusal(str(file))
    assert said.startswith(f"{file}: tensor blk.0.attn_k.weight is Q8_0; supported: F32")


def test_a_gguf_file_without_its_suffix(gguf_file: Callable[..., Path]) -> None:
    file = gguf_file()
    config = ModelConfig(model=str(file.rename(file.with_name("sha256-0a1b2c"))))
    assert facts(config)["runs"] == "natively"
    core, _ = build_core(EngineConfig(model=config, cache=CacheConfig(num_blocks=200)))
    core.close()


@pytest.mark.exhaustive
def test_the_command_refuses_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 8})
    )
    assert main(["models", str(tmp_path), "--dtype", "float32"]) == 1
    out, error = capfd.readouterr()
    assert out == ""
    assert "refused: " in error
    assert "MambaForCausalLM" in error
