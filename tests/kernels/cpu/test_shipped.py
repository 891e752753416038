"""The library that a wheel has: compiled by Zig, with every set of instructions in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu import build, isa
from penstock.kernels.cpu.build import compile_shipped
from penstock.kernels.cpu.isa import ISA_VARIABLE, best_shipped, select_isa, usable_isas
from penstock.kernels.cpu.library import load_library

from . import operations

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"}
_AMX = {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
_DEFINES = ("DTYPE=b16", "DTYPE_PAIRS")


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", _AVX512 | _AMX, "amx"),
        ("x86_64", (_AVX512 | _AMX) - {"amx_tile"}, "avx512_bf16"),
        ("x86_64", _AVX512 | {"avx512_bf16", "avx512_vnni", "avx_vnni"}, "avx512_bf16"),
        ("x86_64", _AVX512 | {"avx512_vnni"}, "avx512_vnni"),
        ("x86_64", _AVX512, "avx512"),
        ("AMD64", {"avx2", "fma", "f16c", "avx_vnni"}, "avx2_vnni"),
        ("x86_64", {"avx2", "fma", "f16c"}, "avx2"),
        ("x86_64", {"sse4_2"}, "portable"),
        ("aarch64", {"asimd", "dotprod", "bf16", "i8mm"}, "neon_bf16"),
        ("arm64", {"asimd", "dotprod"}, "neon"),
        ("aarch64", {"asimd"}, "portable"),
        ("riscv64", set(), None),
    ],
)
def test_a_processor_gets_the_best_that_it_can_run(monkeypatch, machine, features, expected):
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(isa, "_cpu_features", lambda: frozenset(features))
    assert best_shipped(select_isa()) == expected


def test_without_proc_it_is_torch_that_knows_the_processor(monkeypatch, tmp_path):
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    expected = select_isa()
    monkeypatch.setattr(isa, "_CPUINFO", tmp_path / "none")
    assert select_isa() == expected


def test_amx_needs_the_systems_leave(monkeypatch):
    monkeypatch.setattr(isa, "_features_by_system", lambda: [*_AVX512, *_AMX])
    for is_given in (True, False):
        monkeypatch.setattr(isa, "_may_use_tiles", lambda answer=is_given: answer)
        assert ("amx_tile" in isa._cpu_features()) == is_given


@pytest.mark.external
def test_it_computes_with_each_set_and_compiles_nothing(tmp_path, monkeypatch) -> None:
    pytest.importorskip("ziglang")
    library = compile_shipped(tmp_path, isa.this_machine(), "b16", _DEFINES)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    own = tmp_path / "installed"
    own.mkdir()
    library.rename(own / library.name)
    (own / "ops.h").write_text(build.read_source("ops.h"))
    again = compile_shipped(tmp_path, isa.this_machine(), "b16", _DEFINES)
    assert hashlib.sha256(again.read_bytes()).hexdigest() == digest
    monkeypatch.setattr(build, "_SOURCES", own)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (5, 150))
    expected = F.linear(x.float(), weight.float())
    for name in usable_isas():
        monkeypatch.setenv(ISA_VARIABLE, name)
        loaded = load_library(torch.bfloat16)
        assert loaded is not None
        assert loaded.isa == name
        found = operations.linear(loaded, x, weight).float()
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)
    assert not Path(tmp_path / "cache").exists()
