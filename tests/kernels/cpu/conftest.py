"""The kernels for every set of instructions that this CPU can run, and each dtype."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.cpu.isa import ISA_VARIABLE, usable_isas
from penstock.kernels.cpu.library import CpuLibrary, load_library

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ISAS = usable_isas()
# AMX is in use for bfloat16 alone; with other dtypes, its set is AVX-512's.
_SETS = [(dtype, isa) for isa in _ISAS for dtype in DTYPES if isa != "amx" or dtype == "bfloat16"]
# Each set and each dtype once, with bfloat16 where the CPU may have instructions of its own for it,
# and AMX's for AVX-512's. The second tier has all of both.
_BEST = [isa for isa in _ISAS if isa != "avx512" or "amx" not in _ISAS]
_FIRST = {(dtype, _BEST[number % len(_BEST)]) for number, dtype in enumerate(DTYPES)}
LIBRARIES = [
    pytest.param(
        (dtype, isa),
        marks=() if (dtype, isa) in _FIRST else pytest.mark.exhaustive,
        id=f"{dtype}-{isa}",
    )
    for dtype, isa in _SETS
]


@pytest.fixture(scope="session", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    dtype, isa = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        loaded = load_library(DTYPES[dtype])
    assert loaded is not None
    assert loaded.isa == isa
    loaded.start_threads(2)
    return loaded
