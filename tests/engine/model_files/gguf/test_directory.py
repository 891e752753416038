"""The model directory that is made of a GGUF file."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import pytest

from penstock.engine import ModelLoadError
from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.model_files.gguf.directory import gguf_directory
from penstock.engine.model_files.gguf.reader import GgufFile
from penstock.engine.model_files.json_file import GGUF_FILE
from penstock.engine.model_files.model_summary import summarise
from penstock.engine.model_files.resolve import (
    DEMO_MODEL_PATH,
    read_generation_defaults,
    resolve_model,
    weights_fingerprint,
)
from penstock.kernels.cache_folder import CACHE_VARIABLE

from .written import convert

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as one file, to be copied."""
    file = tmp_path_factory.mktemp("converted") / "demo.gguf"
    convert(DEMO_MODEL_PATH, file)
    return file


@pytest.fixture
def demo_file(converted: Path, tmp_path: Path) -> Path:
    return shutil.copy(converted, tmp_path / "demo.gguf")


def test_a_directory_is_made_once(demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = gguf_directory(demo_file)
    first = weights_fingerprint(directory)
    monkeypatch.setattr("penstock.engine.model_files.gguf.directory._write", None)
    assert gguf_directory(demo_file) == directory
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engine.model_files.resolve._made_by", None)  # in no other process
        assert resolve_model(ModelConfig(model=str(demo_file)), weights=True) == directory
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    file = demo_file.rename(moved / demo_file.name)
    assert gguf_directory(file) == directory
    assert (directory / GGUF_FILE).resolve() == file
    with file.open("r+b") as data:  # other weights
        data.seek(-100, 2)
        data.write(bytes(100))
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    other = gguf_directory(file)
    assert other != directory
    assert weights_fingerprint(other) != first


def test_what_was_made_for_a_file_that_is_gone_is_removed(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def write(content: GgufFile, folder: Path) -> None:
        (folder / "config.json").write_text(content.parts[0].name)

    monkeypatch.setattr("penstock.engine.model_files.gguf.directory._write", write)
    files = [tmp_path / f"{name}.gguf" for name in ("gone", "stays", "new")]
    for number, file in enumerate(files):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
        file.write_bytes(head.ljust(4096 + number, b"\0"))
    gone, stays = map(gguf_directory, files[:2])
    files[0].unlink()
    new = gguf_directory(files[2])
    assert [each.exists() for each in (gone, stays, new)] == [False, True, True]
    assert {each.parent for each in (gone, stays, new)} == {own_cache / "gguf"}


def test_all_ends_that_a_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a document, of a turn, and of a message before a call."""
    add_template = gguf.GGUFWriter.add_chat_template

    def add_ends_too(writer: gguf.GGUFWriter, template: str):
        writer.add_eot_token_id(300)
        writer.add_eom_token_id(301)
        add_template(writer, template)

    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", add_ends_too)
    file = tmp_path / "demo.gguf"
    convert(DEMO_MODEL_PATH, file)
    [own] = read_generation_defaults(DEMO_MODEL_PATH).eos_token_ids
    ends = read_generation_defaults(gguf_directory(file)).eos_token_ids
    assert set(ends) == {own, 300, 301}


def with_sampling(file: Path, monkeypatch: pytest.MonkeyPatch, **values: float | str) -> Path:
    """The demo model with keys `general.sampling.*`, of the types that llama.cpp's converter gives
    them."""
    add_template = gguf.GGUFWriter.add_chat_template

    def add_more(writer: gguf.GGUFWriter, template: str):
        for name, value in values.items():
            key = f"general.sampling.{name}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_int32(key, value)
            else:
                writer.add_float32(key, value)
        add_template(writer, template)

    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", add_more)
    convert(DEMO_MODEL_PATH, file)
    return file


def test_what_a_file_recommends_for_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """llama.cpp's keys; those of samplers that are not here have no effect."""
    file = with_sampling(
        tmp_path / "demo.gguf", monkeypatch,
        temp=0.6, top_k=20, top_p=0.95, min_p=0.01, penalty_repeat=1.05,
        penalty_last_n=32, mirostat=2, mirostat_tau=5.0, xtc_probability=0.5, sequence="top_k;temp",
    )  # fmt: skip
    assert read_generation_defaults(gguf_directory(file)).sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
    }
    assert read_generation_defaults(gguf_directory(file), "none").sampling == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temp": "warm"}, ": general.sampling.temp: expected a number"),
        ({"top_p": 1.5}, ": top_p must be in (0, 1]; --generation-config none ignores it"),
    ],
)
def test_what_a_file_recommends_and_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, float | str], said: str
):
    file = with_sampling(tmp_path / "demo.gguf", monkeypatch, **values)
    with pytest.raises(ModelLoadError) as caught:
        summarise(ModelConfig(model=str(file)), CacheConfig())
    assert str(caught.value).startswith(f"{file}{said}")
    assert summarise(ModelConfig(model=str(file), generation_config="none"), CacheConfig())


def refusal(model: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(ModelConfig(model=model), weights=True)
    return str(caught.value)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path):
    file = tmp_path / "x.gguf"
    assert "is not a directory or GGUF file" in refusal(str(file))
    file.write_bytes(b"something else")
    assert refusal(str(file)) == f"{file} is not a GGUF file"
    file.write_bytes(b"GGUF" + bytes(100))
    assert refusal(str(file)).startswith(f"{file} cannot be read: ")
