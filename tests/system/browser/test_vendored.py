"""What the page has from others is what they published, with its licence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from .conftest import PAGE

_VENDOR = PAGE / "vendor"
# Of each file: where it is in marked's package, and its SHA-256.
_MARKED = {
    "marked.esm.js": (
        "lib/marked.esm.js",
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    ),
    "marked.esm.d.ts": (
        "lib/marked.d.ts",
        "d7d5a034b73c62e4681ad6cb2945e9862a89e56ab92b06fd7d77e2652e667ac5",
    ),
    "marked.LICENSE.md": (
        "LICENSE",
        "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
    ),
}


def test_the_files_of_others_are_unchanged() -> None:
    assert {path.name for path in _VENDOR.iterdir()} == set(_MARKED)
    for name, (_, digest) in _MARKED.items():
        assert hashlib.sha256((_VENDOR / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.node
@pytest.mark.external
def test_the_files_of_others_are_those_that_were_published(packages: Path) -> None:
    """npm checks the package by the lock's digest of it."""
    package = packages / "marked"
    version = json.loads((package / "package.json").read_text())["version"]
    assert f"marked v{version} " in (_VENDOR / "marked.esm.js").read_text("utf-8")[:100]
    for path, digest in _MARKED.values():
        assert hashlib.sha256((package / path).read_bytes()).hexdigest() == digest, path
