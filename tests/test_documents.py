"""The Markdown files: links lead somewhere, what they name exists, the sample configuration is
valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.gateway.launch.settings import SERVE_SETTINGS, engine_config, resolve_settings

from .support.documents import (
    ROOT,
    missing_commands,
    missing_files,
    missing_names,
    missing_options,
    pages,
)

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
_EACH = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


def _anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


@_EACH
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


@_EACH
def test_the_files_they_name_exist(page: Path) -> None:
    assert missing_files(page.read_text("utf-8"), page.parent) == []


@_EACH
def test_the_code_they_name_exists(page: Path) -> None:
    of_tests = page.is_relative_to(ROOT / ".github") or page.is_relative_to(ROOT / "tests")
    assert missing_names(page.read_text("utf-8"), with_tests=of_tests) == []


@_EACH
def test_the_commands_they_name_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert missing_options(text) + missing_commands(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "`engine/scheduling/soothsayer.py`",
        "`soothsayer.py`",
        "`scheduling/soothsayer/`",
        "[`soothsayer.py`](engine/request.py)",
        "`StepOracle`",
        "`Sequence.num_guessed_tokens`",
        "`SamplingParams(num_guesses=3)`",
        "`plan_step()`",
        "`num_guessed_tokens`",
        "`penstock.engine.soothsayer`",
        "`--num-guesses 3`",
        "`penstock bench guesses`",
        "`python -m penstock.load.guesses`",
        "`make guesses`",
    ],
)
def test_a_name_that_is_nowhere_is_found(text: str) -> None:
    missing = missing_files(text, ROOT) + missing_names(text) + missing_options(text)
    assert missing + missing_commands(text)


@pytest.mark.parametrize("name", ["clients", "engine", "gateway", "kernels", "load"])
def test_a_room_is_described_briefly(name: str) -> None:
    assert (ROOT / name / "README.md").stat().st_size <= 8192


def test_the_first_page_is_brief() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_every_option_that_bounds_is_among_the_limits() -> None:
    text = (ROOT / "gateway/LIMITS.md").read_text("utf-8")
    named = set(_OPTION.findall(text))
    bounding = {
        flag.name
        for flag in SERVE_SETTINGS
        if flag.name.startswith("max-") or flag.name.endswith(("-bytes", "-objects"))
    }
    assert bounding - named - {"max-replicas", "max-stall-ms"} == set()  # of speed, not of load


@pytest.mark.exhaustive
def test_the_sample_configuration_is_valid(tmp_path: Path) -> None:
    [sample] = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "penstock.toml"
    file.write_text(sample)
    settings = resolve_settings({"config": file}, {})
    assert engine_config(settings).cache.kv_cache_memory_bytes == 256 << 20
    assert (settings["model"], settings["disconnect_grace_s"]) == ("demo", 300)
