"""Page and library are plain JavaScript; their types, in comments, are checked all the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import PAGE


@pytest.mark.node
@pytest.mark.external
def test_the_types_in_comments_are_right(packages: Path) -> None:
    command = [packages / ".bin" / "tsc", "--noEmit", "--allowJs", "--checkJs", "--strict"]
    command += ["--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    own = [path for path in sorted(PAGE.rglob("*.js")) if "vendor" not in path.parts]
    command += ["--lib", "es2023,dom,dom.iterable,dom.asynciterable", *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
