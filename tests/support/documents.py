"""What the Markdown files name: files, classes, functions, parameters, options, commands; and which
of that there is not.

A name counts as ours if it is in backticks and written as code is: a path, `CamelCase`,
`snake_case`, `call()`, `a.dotted.name`. `OTHERS` lists those of other programs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from penstock.gateway.launch.settings import SERVE_SETTINGS
from penstock.gateway.launch.vllm_options import WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".github", "clients", "engine", "gateway", "kernels", "load", "tests")
_CODE = {".py", ".js", ".mjs", ".ts", ".c", ".h", ".lua", ".toml", ".html", ".css", ".yaml", ".sh"}
_FILE = r"(?:py|m?js|c|h|lua|md|toml|sh|css|html|yaml|jinja)"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LABELLED = re.compile(rf"\[`?([\w./-]+\.{_FILE})`?\]\(([^)\s#]+)")
_PATH = re.compile(rf"(?:[\w.-]+/)+(?:[\w-]+(?:\.[\w-]+)*\.{_FILE})?|[\w-]+(?:\.inc)?\.{_FILE}")
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")
_CLASS = re.compile(r"_?[A-Z]+[a-z][A-Za-z0-9]*")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w*…-])")
_MODULE = re.compile(r"python3? -m ((?:penstock|tests)[\w.]*)")
_BENCH = re.compile(r"penstock bench ([a-z]+(?: \| [a-z]+)*)")
_TARGET = re.compile(r"(?:^|`)make ([a-z]+(?:-[a-z]+)*)", re.MULTILINE)

# Names in CamelCase that the sources define, import, or have as a text of their own.
_DEFINED = re.compile(
    r"(?:class|struct|import|type) +(\w+)|\b(_?[A-Z]\w+)\s*[:=]|[\"'`](\w+)[\"'`]"
    r"|^ +(\w+),$|import [\w, ]*?\b(\w+)",
    re.MULTILINE,
)

# Options of other programs and commands, and `serve`'s own that are not settings.
OTHER_OPTIONS = {"config", "model", "help"}
OTHER_OPTIONS |= {"middleware", "ssl-cert-reqs", "kv-transfer-config"}  # of vLLM, refused
OTHER_OPTIONS |= {"no-install-recommends", "no-cache-dir", "create-home", "experimental-websocket"}
OTHER_OPTIONS |= {"strict"}  # of mypy
OTHERS = {
    "LlamaModel",  # of transformers
    "Qwen3ForSequenceClassification",
    "Qwen3Model",
    "XLMRobertaModel",
    "apply_chat_template",
    "layer_replication",  # of PEFT
    "modules_to_save",
    "trainable_token_indices",
    "budget_tokens",  # of clients
    "cache_control",
    "process_cpu_seconds_total",  # of Prometheus
    "process_resident_memory_bytes",
    "histogram_quantile",
    "hash.c",  # of the texts of the corpus for `penstock bench quality`
    "utils/traversal.py",
}


def pages() -> list[Path]:
    """All Markdown files of ours."""
    found = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
    return [*ROOT.glob("*.md"), *(page for page in found if "node_modules" not in page.parts)]


def missing_files(text: str, folder: Path) -> list[str]:
    """Paths in backticks that no file of ours has or ends with, and links whose text names another
    file than they lead to."""
    missing = [
        f"{label} is a link to {target}"
        for label, target in _LABELLED.findall(text)
        if not f"/{target}".endswith(f"/{label}")
    ]
    for span in _spans(text):
        if _PATH.fullmatch(span) and span not in OTHERS:
            path = span.rstrip("/")
            is_there = any((start / path).exists() for start in (folder, ROOT))
            if not is_there and not any(name.endswith(f"/{path}") for name in _files()):
                missing.append(span)
    return missing


def missing_names(text: str, *, with_tests: bool = False) -> list[str]:
    """Names of code in backticks that are nowhere in the sources.

    Args:
        with_tests: those of the tests are there, too.
    """
    sources = _sources(with_tests=with_tests)
    return [span for span in _spans(text) if span not in OTHERS and not sources.have(span)]


def missing_options(text: str) -> list[str]:
    """Options (`--option`) that no command of ours has, but for those "there" in a table of theirs
    and ours."""
    if "\n| there | here |\n" in text:
        text = re.sub(r"^\|[^|]*", "", text, flags=re.MULTILINE)
    return sorted(set(_OPTION.findall(text)) - options() - OTHER_OPTIONS)


def missing_commands(text: str) -> list[str]:
    """Modules to be run with `python -m`, benches and targets of make that there are not."""
    modules = (name for name in _MODULE.findall(text) if not _is_module(name))
    benches = (
        f"penstock bench {name}"
        for names in _BENCH.findall(text)
        for name in names.split(" | ")
        if name not in _benches()
    )
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = (
        f"make {name}"
        for name in _TARGET.findall(text)
        if not re.search(rf"^{name}:", makefile, re.MULTILINE)
    )
    return [*modules, *benches, *targets]


@cache
def _benches() -> set[str]:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    return set(points["penstock.benches"])


@cache
def options() -> set[str]:
    """Options of all commands, without their hyphens: of `serve`, and what other parsers add."""
    names = {name for each in SERVE_SETTINGS for name in each.options}
    names |= {f"--no-{each.name}" for each in SERVE_SETTINGS if each.is_switch}
    names |= {name for each in WITHOUT_EFFECT for name in each.names}
    added = re.findall(r"\"--([a-z][a-z0-9-]+)\"", _sources(with_tests=False).text)
    return {name.removeprefix("--") for name in names} | set(added)


class _Sources:
    """What is written in the sources.

    Attributes:
        text: of all of them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(texts)
        self.text = "\n".join(self._texts)
        self._words = set(re.findall(r"\w+", self.text))
        self._words |= {each.variable for each in SERVE_SETTINGS}
        self._defined = {name for found in _DEFINED.findall(self.text) for name in found}

    def have(self, span: str) -> bool:
        """Whether it is no name of code, or a name that is here: a class where it is defined, what
        belongs to a class in the same file."""
        found = _NAME.fullmatch(span)
        if found is None or _PATH.fullmatch(span) or span.endswith((".json", ".txt")):
            return True
        name, arguments = found[1], found[2] or ""
        keywords = re.findall(r"(\w+)=", arguments)
        first, *rest = name.split(".")
        if rest and (first == "penstock" or first in FOLDERS) and _is_module(name):
            return True
        if _CLASS.fullmatch(first):
            return first in self._defined and {*rest, *keywords} <= self._words_beside(first)
        is_word = not arguments and not rest and "_" not in first.strip("_") and not first.isupper()
        return is_word or {first, *rest, *keywords} <= self._words

    def _words_beside(self, name: str) -> set[str]:
        defining = [text for text in self._texts if f"class {name}" in text]
        return set().union(*(re.findall(r"\w+", text) for text in defining)) or self._words


@cache
def _sources(*, with_tests: bool) -> _Sources:
    """All sources but this file."""
    left_out = ("/load/results/", *(() if with_tests else ("/tests/",)))
    return _Sources(
        (ROOT / name[1:]).read_text("utf-8")
        for name in ("/Makefile", "/pyproject.toml", *_files())
        if Path(name).suffix in _CODE or name == "/Makefile"
        if not name.startswith(left_out) and not name.endswith("/tests/support/documents.py")
    )


def _spans(text: str) -> Iterator[str]:
    for span in _SPAN.findall(_FENCE.sub("", text)):
        yield span.strip()


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.removeprefix("penstock.").split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def _files() -> list[str]:
    """All files in our folders."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return [f"/{path.relative_to(ROOT)}" for path in found if "node_modules" not in path.parts]
