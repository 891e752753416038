"""Where a model comes from: a directory, the Hub (a stub on localhost), or nowhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.model_summary import listed
from penstock.engine.model_files.resolve import (
    DEMO_MODEL_PATH,
    read_generation_defaults,
    resolve_model,
    weights_fingerprint,
)
from penstock.engine.pooling.settings import read_pooling
from penstock.engine.text.chat_template import TemplateFiles

from ..pooling.test_pooling import write_modules
from .gguf.written import convert
from .stub_hub import TOKEN, stub_hub

_RESOLVE = """
import sys, json
from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.resolve import read_generation_defaults, resolve_model
model, revision, weights, folder = json.loads(sys.argv[1])
config = ModelConfig(model=model, revision=revision, download_dir=folder)
try:
    path = resolve_model(config, weights=weights)
    files = sorted(file.name for file in path.iterdir())
    eos = read_generation_defaults(path).eos_token_ids
    print(json.dumps({"files": files, "eos": eos, "path": str(path)}))
except ModelLoadError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture(scope="module")
def hub(tiny_checkpoint: Callable[..., Path]) -> Iterator[tuple[str, list[str]]]:
    with stub_hub(tiny_checkpoint("LlamaForCausalLM")) as served:
        yield served


def resolve(
    endpoint: str,
    home: Path,
    model: str = "acme/tiny",
    *,
    revision: str | None = None,
    weights: bool = True,
    folder: Path | None = None,
    **environment: str,
) -> dict[str, object]:
    """In a process of its own: the Hub's client reads its environment when it is imported."""
    asked = [model, revision, weights, None if folder is None else str(folder)]
    result = subprocess.run(
        [sys.executable, "-c", _RESOLVE, json.dumps(asked)],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_hub_brings_what_serving_needs(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    text_only = resolve(endpoint, tmp_path, weights=False)
    assert text_only["files"] == ["config.json", "generation_config.json"]
    whole = resolve(endpoint, tmp_path)
    assert whole["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert str(whole["path"]).startswith(str(tmp_path)), "HF_HOME is honoured"
    assert not any("README" in path for path in asked)
    folder = tmp_path / "models"
    elsewhere = resolve(endpoint, tmp_path, folder=folder)
    assert str(elsewhere["path"]).startswith(str(folder)), "--download-dir is honoured"


def test_the_hub_brings_how_a_model_embeds(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("LlamaForCausalLM"), model)
    write_modules(model, [("Pooling", {"pooling_mode_mean_tokens": True})])
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    with stub_hub(model) as (endpoint, _):
        path = Path(str(resolve(endpoint, tmp_path / "home")["path"]))
    assert read_pooling(path).kind == "mean"
    assert not (path / "onnx").exists()


def test_the_hub_brings_all_chat_templates(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("LlamaForCausalLM"), model)
    (model / "additional_chat_templates").mkdir()
    (model / "chat_template.jinja").write_text("default")
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (model / "additional_chat_templates" / "notes.md").write_text("")
    with stub_hub(model) as (endpoint, _):
        path = Path(str(resolve(endpoint, tmp_path / "home", weights=False)["path"]))
    assert TemplateFiles.read(path).named == {"default": "default", "tool_use": "tools"}
    assert not (path / "additional_chat_templates" / "notes.md").exists()


def test_offline_takes_the_cache_or_says_so(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    missing = resolve(endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert "not in the Hub cache" in str(missing["error"])
    before = resolve(endpoint, tmp_path)
    num_asked = len(asked)
    assert resolve(endpoint, tmp_path, HF_HUB_OFFLINE="1") == before
    assert len(asked) == num_asked
    assert resolve("http://127.0.0.1:9", tmp_path) == before, "the Hub may also just be down"


@pytest.mark.exhaustive
def test_gguf_files_on_the_hub(own_cache: Path, tmp_path: Path) -> None:
    """By their quantization, or the only one; offline those of the cache."""
    model, home = tmp_path / "model", tmp_path / "home"
    model.mkdir()
    convert(DEMO_MODEL_PATH, model / "demo-Q8_0.gguf", lambda _: "Q8_0")
    convert(DEMO_MODEL_PATH, model / "demo-Q4_0.gguf", lambda _: "Q4_0")
    (model / "mmproj-demo-F16.gguf").write_bytes(b"GGUF of another kind")
    with stub_hub(model) as (endpoint, asked):
        several = resolve(endpoint, home)
        assert str(several["error"]).endswith(
            "model 'acme/tiny' has 2 GGUF models, name one of them: demo-Q4_0, demo-Q8_0"
        )
        other = resolve(endpoint, home, "acme/tiny:Q6_K")
        assert "has no GGUF file of 'Q6_K'; it has demo-Q4_0" in str(other["error"])
        found = resolve(endpoint, home, "acme/tiny:q8_0", weights=False)
        assert "model.gguf" in found["files"]  # type: ignore[operator]
        assert not any("Q4_0.gguf" in path for path in asked)
        for name in ("acme/tiny:Q8_0", "acme/tiny"):  # the only one in the cache
            assert resolve(endpoint, home, name, HF_HUB_OFFLINE="1") == found
        packaged, *cached = listed(ModelConfig(download_dir=str(home / "hub")), CacheConfig())
        assert packaged.startswith("demo ")
        assert [line.split()[0] for line in cached] == ["smollm2", "acme/tiny:Q8_0"]
        missing = resolve(endpoint, home, "acme/tiny:Q4_0", HF_HUB_OFFLINE="1")
        assert "has no GGUF file of 'Q4_0'; it has demo-Q8_0" in str(missing["error"])
    assert resolve("http://127.0.0.1:9", home, "acme/tiny:Q8_0") == found


def test_a_folder_with_one_gguf_file(own_cache: Path, tmp_path: Path) -> None:
    convert(DEMO_MODEL_PATH, tmp_path / "demo.gguf")
    found = resolve_model(ModelConfig(model=str(tmp_path)), weights=True)
    assert (found / "model.gguf").resolve() == tmp_path / "demo.gguf"
    shutil.copy(tmp_path / "demo.gguf", tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="2 GGUF models, name one of them: demo, other"):
        resolve_model(ModelConfig(model=str(tmp_path)), weights=True)


def test_revisions_and_tokens(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    assert resolve(endpoint, tmp_path)["eos"] == [2]
    assert resolve(endpoint, tmp_path, revision="v1")["eos"] == [7, 2]
    unknown = resolve(endpoint, tmp_path, revision="v9")
    assert "no such revision" in str(unknown["error"])
    private = resolve(endpoint, tmp_path, model="acme/private")
    assert "HF_TOKEN" in str(private["error"])
    assert "files" in resolve(endpoint, tmp_path, model="acme/private", HF_TOKEN=TOKEN)


@pytest.mark.parametrize("model", ["/no/such/place", "./missing", "a/b/c", "not a name!"])
def test_what_is_no_model_says_so(model: str) -> None:
    with pytest.raises(ModelLoadError, match="director"):
        resolve_model(ModelConfig(model=model), weights=True)


def test_a_repository_that_does_not_exist(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    answer = resolve(hub[0], tmp_path, model="acme/nothing")
    assert "neither a directory here nor a repository" in str(answer["error"])


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        resolve_model(ModelConfig(model=str(tmp_path)), weights=True)


def test_generation_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert read_generation_defaults(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [6, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95}'
    )
    defaults = read_generation_defaults(tmp_path)
    assert defaults.eos_token_ids == (6, 7, 5)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    none = read_generation_defaults(tmp_path, "none")
    assert (none.eos_token_ids, none.sampling) == ((5,), {})
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        read_generation_defaults(tmp_path)


def _model(path: Path, **files: object) -> Path:
    """A directory with files of these contents, and names without the ending."""
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


_END = {"id": 9, "content": "<|im_end|>", "special": True}
_OTHERS = [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<|end|>"}]
_CHATML = "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        # The generation config is its base's: the end of a turn is in config.json,
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 9}}, {1, 9}),
        # or only the tokenizer's,
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {2, 9}),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, {2, 9}),
        # or only in the template.
        ({"tokenizer_config": {"chat_template": _CHATML, "eos_token": "</s>"}}, {2, 3, 9}),
        ({"tokenizer_config": {"chat_template": [{"template": _CHATML}]}}, {2, 9}),
        ({"chat_template": {"chat_template": _CHATML}}, {2, 9}),
        ({"config": {"text_config": {"eos_token_id": [5, 6]}}}, {5, 6}),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</x>",
                    "added_tokens_decoder": {"8": {"content": "</x>"}},
                }
            },
            {2, 8},
        ),
        # gpt-oss: each of an answer's messages ends so.
        ({"tokenizer_config": {"chat_template": "<|channel|>final<|message|>x<|end|>"}}, {2}),
        ({"tokenizer_config": {"chat_template": "<|assistant|>x<|end|>"}}, {2, 4}),
        # What is no id of this model, or no token, does not count.
        (
            {
                "config": {"vocab_size": 8, "eos_token_id": 2},
                "tokenizer_config": {"eos_token": "<|im_end|>"},
            },
            {2},
        ),
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": -1}}, {1}),
        ({"tokenizer_config": {"eos_token": "<|none|>", "chat_template": "<|eot_id|>"}}, {2}),
        ({"tokenizer_config": {"eos_token": 7, "added_tokens_decoder": [1]}}, {2}),
        ({"tokenizer": [], "tokenizer_config": {"eos_token": "</s>"}}, {2}),
    ],
)
def test_all_places_that_name_an_end(
    tmp_path: Path, files: dict[str, object], ids: set[int]
) -> None:
    _model(
        tmp_path,
        **{
            "config": {"eos_token_id": 2},
            "tokenizer": {"version": "1.0", "added_tokens": [*_OTHERS, _END], "model": {}},
            **files,
        },
    )
    assert set(read_generation_defaults(tmp_path).eos_token_ids) == ids


def test_the_ends_of_a_template_in_a_file(tmp_path: Path) -> None:
    _model(tmp_path, config={"eos_token_id": 2}, tokenizer={"added_tokens": [_END]})
    (tmp_path / "chat_template.jinja").write_text(_CHATML)
    assert read_generation_defaults(tmp_path).eos_token_ids == (2, 9)
    assert read_generation_defaults(tmp_path, "none").eos_token_ids == (2, 9)


_FINGERPRINT = """
import sys
from pathlib import Path
from penstock.engine.model_files.resolve import weights_fingerprint
print(weights_fingerprint(Path(sys.argv[1])).hex())
"""


def test_a_fingerprint_is_of_the_files_alone(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_checkpoint()
    fingerprint = weights_fingerprint(path)
    assert len(fingerprint) == 32
    assert weights_fingerprint(shutil.copytree(path, tmp_path / "elsewhere")) == fingerprint
    for seed in ("1", "2"):  # of Python's own hashes
        result = subprocess.run(
            [sys.executable, "-c", _FINGERPRINT, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert result.stdout.strip() == fingerprint.hex()


def test_models_that_differ_have_other_fingerprints(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    paths = [
        tiny_checkpoint(),
        tiny_checkpoint(dtype="bfloat16"),
        tiny_checkpoint(rope_theta=5e5),  # the same weights under another config
        tiny_checkpoint(max_shard_size="50KB"),
        tiny_checkpoint("Qwen3ForCausalLM"),
        shutil.copytree(tiny_checkpoint(), tmp_path / "no weights"),
    ]
    (paths[-1] / "model.safetensors").unlink()
    assert len({weights_fingerprint(path) for path in paths}) == len(paths)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_fine_tune_differs_though_names_and_sizes_do_not(
    name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_checkpoint(), tmp_path / "tuned")
    before = weights_fingerprint(path)
    tensors = load_file(path / "model.safetensors")
    tensors[name] += 1e-3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(path) != before


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    """A change of a tenth of it shows wherever it is."""
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(50_000_000)
    seen = set()
    for tenth in range(-1, 10):
        changed = weights.copy()
        if tenth >= 0:
            part = len(weights) // 10
            changed[tenth * part : (tenth + 1) * part] = b"\1" * part
        (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
        with (tmp_path / "model.safetensors").open("ab") as file:
            file.write(changed)
        seen.add(weights_fingerprint(tmp_path))
    assert len(seen) == 11
