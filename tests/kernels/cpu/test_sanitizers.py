"""The kernel tests once more, with every access of the C code checked by the compiler's sanitizers.

torch's own allocations are watched too, so that a kernel that reads or writes past a tensor ends
the process with a report.
"""

from __future__ import annotations

import ctypes.util
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu.build import find_compiler

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]

pytestmark = [pytest.mark.sanitizer, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes that check; they share what was compiled."""
    folder = tmp_path_factory.mktemp("checked")
    # A check that is called, and lines without variables: twice as fast to compile.
    flags = ["-fsanitize=address,undefined", "-g1"]
    flags += ["--param", "asan-instrumentation-with-call-threshold=0"]
    if "ziglang" in find_compiler():
        # Zig's driver knows this sanitizer only by handing the option on. Undefined behaviour is
        # for other compilers: with its checks this one takes three times as long.
        flags = ["-Xclang", "-fsanitize=address", "-g1"]
    compiler = folder / "checking-cc"
    command = shlex.join([*find_compiler(), *flags])
    compiler.write_text(f'#!/bin/sh\nunset CC LD_PRELOAD\nexec {command} "$@" -O1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    return {
        **os.environ,
        "CC": str(compiler),
        CACHE_VARIABLE: str(folder / "cache"),
        # The runtime has to be loaded before all else.
        "LD_PRELOAD": str(ctypes.util.find_library("asan")),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at exit
        "UBSAN_OPTIONS": "halt_on_error=1",
    }


@pytest.mark.timeout(900)
def test_no_kernel_leaves_its_tensors(environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "--timeout=0"]
    done = subprocess.run(
        # The widest and the narrowest registers; what differs between dtypes is pairs or none, and
        # codes are read alike.
        [
            *command,
            *(
                "-k",
                "not avx2 and (bfloat16 or not float16) and not vnni"
                " and not (test_linear_quantized and float32)",
            ),
            *(
                str(TESTS / f"test_{name}.py")
                for name in ("experts", "kernels", "linear_quantized", "lora", "sampling")
            ),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_kernel_that_leaves_its_tensors_is_caught(environment):
    """Were the check not there, the test above could not fail."""
    code = (
        "import torch; from tests.kernels.cpu import operations;"
        "from penstock.kernels.cpu.library import load_library;"
        "library = load_library(torch.float32);"
        "operations.embed(library, torch.tensor([5000]), torch.ones(4, 64), is_packed=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
