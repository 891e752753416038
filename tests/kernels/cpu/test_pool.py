"""Threads that lose their core inside an item: others do it again, and nothing changes."""

from __future__ import annotations

import subprocess
import sys

import torch

from penstock.kernels.cpu.library import CpuLibrary

from . import operations

# Four threads on one core: at every moment three of them stand still, most inside an item.
PROGRAM = """
import ctypes, os, torch
from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.program import CpuProgram

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
generator = torch.Generator().manual_seed(0)
random = lambda *shape: torch.randn(shape, generator=generator).mul_(0.1).bfloat16()
library = load_library(torch.bfloat16)
up, down = library.pack(random(1024, 256)), library.pack(random(256, 1024))
start, wide = random(40, 256), torch.empty(40, 1024, dtype=torch.bfloat16)
streams = [torch.empty_like(start) for _ in range(2)]
rows = ctypes.c_int64(40)

program = CpuProgram(library)

def linear(y, x, weight, residual=None):
    sizes = {"in_features": x.shape[1], "out_features": y.shape[1]}
    program.add("linear", y=y, x=x, weight=weight, residual=residual, num_rows=rows, **sizes)

for _ in range(3):
    for here, there in (streams, reversed(streams)):
        linear(wide, here, up)
        linear(there, wide, down, here)
program.record()

def result():
    streams[0].copy_(start)
    program.run()
    return streams[0].clone()

alone = result()
library.start_threads(4)
differing = sum(not torch.equal(result(), alone) for _ in range(400))
library.settle()
print(differing, library.num_repeated)
"""


def test_no_thread_waits_for_one_that_lost_its_core():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=200
    )
    differing, num_repeated = map(int, done.stdout.split())
    assert differing == 0
    assert num_repeated > 0


def test_the_pool_counts_its_calls_and_tells_its_state(library: CpuLibrary) -> None:
    before = library.num_calls
    operations.embed(library, torch.tensor([1]), torch.ones(4, 64), is_packed=False)
    assert library.num_calls > before
    state = library.describe_pool()
    assert "at rest" in state
    assert "thread 1: free" in state
