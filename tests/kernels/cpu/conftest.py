"""The kernels for every set of instructions that this CPU can run, and each dtype."""

from __future__ import annotations

import pytest
import torch
from tests.support.isas import usable_isas

from penstock.kernels.cpu.isa import ISA_VARIABLE
from penstock.kernels.cpu.library import CpuLibrary, load_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="session", params=usable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def library(request: pytest.FixtureRequest, isa: str) -> CpuLibrary:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        loaded = load_library(request.param)
    assert loaded is not None
    assert loaded.isa == isa
    loaded.start_threads(2)
    return loaded
