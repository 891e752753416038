"""What was found of chat templates, in the cache."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.chat_formats import ModelFacts, TemplateFacts, keep_facts, kept_facts
from penstock.engine.text.chat_template import TemplateFiles
from penstock.kernels.cache_folder import CACHE_VARIABLE

FILES = TemplateFiles("{{ messages }}", {"bos_token": "<s>"}, named={"other": "{{ tools }}"})
FACTS = ModelFacts(plain=TemplateFacts(late_system="moved", rewritten=0.25))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where facts are kept; others may not write there."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    folder = tmp_path / "templates"
    folder.mkdir(mode=0o755)
    return folder


def kept_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_they_are_found_by_the_template(folder: Path) -> None:
    assert kept_facts(FILES) is None
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) == FACTS
    assert kept_file(folder).suffix == ".json"
    assert kept_facts(FILES._replace(source="{{ tools }}")) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_others_may_write_is_not_read(folder: Path, is_folder: bool) -> None:
    keep_facts(FILES, FACTS)
    path = folder if is_folder else kept_file(folder)
    path.chmod(0o777)
    assert kept_facts(FILES) is None
    path.chmod(0o755)
    assert kept_facts(FILES) == FACTS


def test_halves_are_not_read_and_are_removed(folder: Path) -> None:
    keep_facts(FILES, FACTS)
    file = kept_file(folder)
    file.write_text(file.read_text()[:-20])
    assert kept_facts(FILES) is None
    left = folder / "unfinished-killed"
    left.mkdir()
    (left / file.name).write_text("{")
    long_ago = time.time() - 10_000
    os.utime(left, (long_ago, long_ago))
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) == FACTS
    assert kept_file(folder) == file


def test_facts_of_another_version_are_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_facts(FILES, FACTS)
    module = sys.modules[keep_facts.__module__]
    monkeypatch.setattr(module, "VERSION", 0)
    assert kept_facts(FILES) is None
    assert len(list(folder.iterdir())) == 1


def test_without_a_place_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(folder / "file" / "x"))
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) is None
