"""Kernels compiled by the `ziglang` package, as on a machine without a compiler of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu.build import find_compiler
from penstock.kernels.cpu.isa import ISA_VARIABLE
from penstock.kernels.cpu.library import load_library

from . import operations

pytestmark = pytest.mark.external


def test_they_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    for name, value in {"PATH": str(tmp_path), CACHE_VARIABLE: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("CC", ISA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert "ziglang" in find_compiler()
    library = load_library(torch.bfloat16)
    assert library is not None
    library.start_threads(2)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (5, 150))
    expected = F.linear(x.float(), weight.float())
    found = operations.linear(library, x, weight).float()
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)
    library.settle()
