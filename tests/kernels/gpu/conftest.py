"""The kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from tests.support.interpreter import interpret_kernels

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*"]
if HAS_TRITON and not HAS_GPU:
    # Whether to interpret is decided as triton is imported, which other tests may have done by
    # way of transformers: it has to be imported anew, but for its extension modules.
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    interpret_kernels()

_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if HAS_GPU else "cpu"


@pytest.fixture(scope="session", params=[_DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a test lie. On a GPU machine every test that asks is a `gpu` test."""
    name: str = request.param
    return name
