"""The Markdown files: links lead somewhere, files and options exist, the sample configuration is
valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.gateway.launch.cli import engine_config, resolve_settings
from penstock.gateway.launch.flags import FLAGS, WITHOUT_EFFECT

ROOT = Path(__file__).parents[1]
_FOLDERS = (".github", "clients", "engine", "gateway", "kernels", "load", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in _FOLDERS for page in (ROOT / folder).rglob("*.md")),
]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, _FOLDERS))})/[\w/.-]+)`")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
# Options of other programs and commands, and `serve`'s own that are not settings.
_OTHERS = {"config", "model", "help", "no-install-recommends", "no-cache-dir", "create-home"}
_OTHERS |= {"middleware", "ssl-cert-reqs", "kv-transfer-config"}  # of vLLM, refused


def _anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_they_name_exist(page: Path) -> None:
    named = _PATH.findall(page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "gateway/DEPLOYMENT.md", "gateway/LIMITS.md"])
def test_the_options_of_serve_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    names = {alias for flag in FLAGS for alias in (f"--{flag.name}", *flag.aliases)}
    names |= {name for each in WITHOUT_EFFECT for name in each.names}
    unknown = set(_OPTION.findall(text)) - {name.removeprefix("--") for name in names} - _OTHERS
    assert not unknown


def test_every_option_that_bounds_is_among_the_limits() -> None:
    text = (ROOT / "gateway/LIMITS.md").read_text("utf-8")
    named = set(_OPTION.findall(text))
    bounding = {
        flag.name
        for flag in FLAGS
        if flag.name.startswith("max-") or flag.name.endswith(("-bytes", "-objects"))
    }
    assert bounding - named - {"max-replicas", "max-stall-ms"} == set()  # of speed, not of load


def test_the_sample_configuration_is_valid(tmp_path: Path) -> None:
    [sample] = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "penstock.toml"
    file.write_text(sample)
    settings = resolve_settings({"config": file}, {})
    assert engine_config(settings).cache.kv_cache_memory_bytes == 256 << 20
    assert (settings["model"], settings["disconnect_grace_s"]) == ("demo", 300)
