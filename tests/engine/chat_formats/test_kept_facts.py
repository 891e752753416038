"""What was found of templates, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.chat_formats import ModelFacts, keep_facts, kept_facts
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text import ChatTemplate
from penstock.engine.text.chat_template import TemplateFiles
from penstock.kernels.cpu.build import CACHE_VARIABLE

FILES = TemplateFiles.read(DEMO_MODEL_PATH)
FACTS = ModelFacts.found_in(ChatTemplate(*FILES))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_facts_are_found_again_by_what_the_templates_are() -> None:
    assert kept_facts(FILES) is None
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) == FACTS
    assert kept_facts(FILES._replace(file=None)) == FACTS, "wherever they are"
    assert kept_facts(FILES._replace(source=f"{FILES.source} ")) is None
    assert kept_facts(FILES._replace(named={"a": "{{ messages }}"})) is None


@pytest.mark.parametrize("content", ["", "null", "{}", '{"plain": 1}', "\0"])
def test_what_is_damaged_is_found_anew(cache: Path, content: str) -> None:
    keep_facts(FILES, FACTS)
    [file] = (cache / "templates").iterdir()
    file.write_text(content)
    assert kept_facts(FILES) is None
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) == FACTS


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(file))
    keep_facts(FILES, FACTS)
    assert kept_facts(FILES) is None
