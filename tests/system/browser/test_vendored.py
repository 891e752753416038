"""What the page has from others is what they published, with its licence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from .conftest import PAGE

_VENDOR = PAGE / "vendor"
# Of each file: the package, where it is in that, and its SHA-256.
_FILES = {
    "marked.esm.js": (
        "marked",
        "lib/marked.esm.js",
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    ),
    "marked.esm.d.ts": (
        "marked",
        "lib/marked.d.ts",
        "d7d5a034b73c62e4681ad6cb2945e9862a89e56ab92b06fd7d77e2652e667ac5",
    ),
    "marked.LICENSE.md": (
        "marked",
        "LICENSE",
        "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
    ),
    "htm-preact.js": (
        "htm",
        "preact/standalone.module.js",
        "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    ),
    "htm.LICENSE.md": (
        "htm",
        "LICENSE",
        "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    ),
    "preact.LICENSE.md": (
        "preact",
        "LICENSE",
        "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    ),
    "highlight.js": (
        "@highlightjs/cdn-assets",
        "es/highlight.min.js",
        "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
    ),
    "highlight.LICENSE.md": (
        "@highlightjs/cdn-assets",
        "LICENSE",
        "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490",
    ),
    "katex.js": (
        "katex",
        "dist/katex.min.js",
        "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc",
    ),
    "katex.LICENSE.md": (
        "katex",
        "LICENSE",
        "766ccc1f306c885aa45542a9846bbd0a505b27a0374f146778171c2254ce18e3",
    ),
    "inter-latin.woff2": (
        "@fontsource-variable/inter",
        "files/inter-latin-wght-normal.woff2",
        "3100e775e8616cd2611beecfa23a4263d7037586789b43f035236a2e6fbd4c62",
    ),
    "inter-latin-ext.woff2": (
        "@fontsource-variable/inter",
        "files/inter-latin-ext-wght-normal.woff2",
        "34b9c504cab7a73e37b746343a449132e56cf7b5481af2cb81dc74dcff25c956",
    ),
    "inter.LICENSE.md": (
        "@fontsource-variable/inter",
        "LICENSE",
        "3b0a5fca3d17942cde889069889dedbbbd075e9b599968c82a95f4d944e9b345",
    ),
}
# Types of files that come without; ours.
_DECLARATIONS = {"htm-preact.d.ts", "highlight.d.ts", "katex.d.ts"}


def test_the_files_of_others_are_unchanged() -> None:
    assert {path.name for path in _VENDOR.iterdir()} == set(_FILES) | _DECLARATIONS
    for name, (_, _, digest) in _FILES.items():
        assert hashlib.sha256((_VENDOR / name).read_bytes()).hexdigest() == digest, name
    packages = {package for package, path, _ in _FILES.values() if path != "LICENSE"}
    assert packages <= {package for package, path, _ in _FILES.values() if path == "LICENSE"}


@pytest.mark.node
@pytest.mark.external
def test_the_files_of_others_are_those_that_were_published(packages: Path) -> None:
    """npm checks the packages by the lock's digests of them."""
    notes = (PAGE / "README.md").read_text("utf-8")
    for package, path, digest in _FILES.values():
        content = (packages / package / path).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, path
        version = json.loads((packages / package / "package.json").read_text())["version"]
        assert path == "LICENSE" or f"{package} {version}" in notes
