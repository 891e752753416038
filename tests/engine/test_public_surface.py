"""What importing the engine costs: no torch for its surface, and no NumPy for its core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import engine


def run(code: str, *, without: tuple[str, ...]) -> None:
    """In a process of its own, where importing any of `without` fails."""
    block = f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
    result = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_exported_name_but_llm_is_there_without_torch() -> None:
    run(
        "import penstock.engine as engine\n"
        "for name in set(engine.__all__) - {'LLM'}: assert getattr(engine, name), name\n",
        without=("torch", "transformers"),
    )


def test_torch_is_loaded_when_it_is_asked_for_and_no_server() -> None:
    """Nor what only a GPU or some models need."""
    run(
        "import sys\n"
        "import penstock.engine\n"
        "assert 'torch' not in sys.modules\n"
        "from penstock.engine import LLM\n"
        "assert 'torch' in sys.modules and LLM.generate\n"
        "import penstock.engine.executor.in_process\n",
        without=("transformers", "triton", "starlette", "uvicorn", "pydantic"),
    )


def test_an_engines_process_imports_a_part_of_torch_with_what_needs_it_alone() -> None:
    run(
        "import importlib.util\n"
        "from penstock.engine.process.__main__ import MetaRegistrationsLater\n"
        "MetaRegistrationsLater().import_torch()\n"
        "import torch, penstock.engine.process.server\n"
        "assert 'torch._meta_registrations' not in sys.modules\n"
        "import torch._refs.linalg\n"  # in an order that torch's own import never takes
        "assert torch.empty(2, 2, device='meta').cholesky_inverse().shape == (2, 2)\n"
        "assert importlib.util.find_spec('torch._refs').origin == torch._refs.__file__\n",
        without=("transformers", "triton", "starlette", "uvicorn", "pydantic"),
    )


def test_every_exported_name_is_listed_once_and_every_lazy_one_is_exported() -> None:
    assert len(engine.__all__) == len(set(engine.__all__))
    assert set(engine._LAZY) <= set(engine.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "penstock.engine.batch",
        "penstock.engine.blocks",
        "penstock.engine.config",
        "penstock.engine.engine_core",
        "penstock.engine.scheduling",
    ],
)
def test_the_core_needs_the_standard_library_and_msgspec(module: str) -> None:
    run(f"import {module}", without=("torch", "msgpack", "numpy", "tokenizers"))


def test_the_supervisor_needs_the_standard_library_alone() -> None:
    run(
        "import penstock.gateway.launch.supervisor, penstock.gateway.launch.cli\n",
        without=("torch", "numpy", "msgpack", "orjson", "pydantic", "starlette", "uvicorn"),
    )
