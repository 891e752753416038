"""Adapters of tiny random models, written by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.peft_models import PeftAnswers, write_adapter


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of adapter directories: of a base model's directory and a seed, with what else
    `write_adapter` takes."""
    root = tmp_path_factory.mktemp("adapters")

    def make(base: Path, seed: int, **fields: Any) -> Path:
        path = root / str(len(list(root.iterdir())))
        write_adapter(base, path, seed, **fields)
        return path

    return make


@pytest.fixture(scope="session")
def peft_tokens() -> PeftAnswers:
    return PeftAnswers()
