"""Programs, and what it takes to add an operation: its arguments in `ops.h`, its function in C, a
record in a program, and a reference in torch to hold it against."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu import build
from penstock.kernels.cpu.build import find_compiler
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.cpu.structures import read_structures
from penstock.kernels.reference.rms_norm import rms_norm_reference

HEADER = build.read_source("ops.h")
ARGUMENTS = """
/* y = max(x, floor) */
struct at_least_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
    double floor;
};
"""
FUNCTION = """
static void NAME(at_least_item)(const void *args, long row) {
    const struct at_least_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    for (long i = 0; i < a->size; i++) PUT(y + i, GET(x + i) > a->floor ? GET(x + i) : a->floor);
}

struct job NAME(at_least)(const void *args) {
    const struct at_least_args *a = args;
    return (struct job){NAME(at_least_item), a, *a->num_rows, 0};
}
"""


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def append(path: Path, text: str, *, before: str = "") -> None:
    source = path.read_text()
    end = source.rindex(before) if before else len(source)
    path.write_text(source[:end] + text + source[end:])


@pytest.fixture
def extended(tmp_path, monkeypatch) -> CpuLibrary:
    """The kernels and one operation more, compiled without the optimisations that take long."""
    sources, compiler = tmp_path / "sources", tmp_path / "quick-cc"
    compiler.write_text(f'#!/bin/sh\nunset CC\nexec {shlex.join(find_compiler())} "$@" -O0\n')
    compiler.chmod(0o755)
    shutil.copytree(Path(build.__file__).parent, sources)
    append(sources / "ops.h", ARGUMENTS, before="#endif")
    append(sources / "elementwise.inc.c", FUNCTION)
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    library = load_library(torch.bfloat16)
    assert library is not None
    return library


def test_an_operation_is_added(extended):
    dtype, num_rows, size, eps = extended.dtype, 5, 50, 1e-5
    x, out = random(num_rows, size, seed=0, dtype=dtype), torch.empty(num_rows, size, dtype=dtype)
    weight = random(size, seed=1, dtype=dtype)
    program = CpuProgram(extended)
    raised = program.buffer("raised", size)
    program.add("at_least", y=raised, x=x, size=size, floor=-0.5)
    program.add("rms_norm", y=out, x=raised, weight=weight, size=size, eps=eps)
    program.record(num_rows)
    program.step.num_tokens = num_rows
    program.run()
    assert torch.equal(raised.rows, x.clamp(min=-0.5))
    torch.testing.assert_close(out, rms_norm_reference(raised.rows, weight, eps))


def offsets(structure: type[Structure]) -> list[int]:
    return [getattr(structure, name).offset for name, *_ in structure._fields_]


def test_the_compiler_lays_structures_out_as_they_are_read(tmp_path):
    structures = read_structures(HEADER)
    assert {"step", "linear_args", "linear_quantized_args"} <= structures.keys()
    values = [
        *(f"sizeof(struct {name})" for name in structures),
        *(
            f"offsetof(struct {name}, {member})"
            for name, structure in structures.items()
            for member, *_ in structure._fields_
        ),
    ]
    prints = "".join(f'printf("%zu ", {value});' for value in values)
    source = f"#include <stddef.h>\n#include <stdio.h>\n{HEADER}\nint main(void) {{ {prints} }}\n"
    (tmp_path / "layout.c").write_text(source)
    program = tmp_path / "layout"
    subprocess.run([*find_compiler(), "-o", program, tmp_path / "layout.c"], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    sizes = [ctypes.sizeof(each) for each in structures.values()]
    starts = [start for each in structures.values() for start in offsets(each)]
    assert [int(each) for each in printed.split()] == sizes + starts


def test_a_member_of_another_type_is_refused():
    with pytest.raises(KeyError, match="float"):
        read_structures("struct scale_args {\n    void *y;\n    float factor;\n};\n")


def test_a_program_is_readable(library):
    program = CpuProgram(library)
    x, normed = program.buffer("x", 8), program.buffer("normed", 8)
    weight = torch.ones(8, dtype=library.dtype)
    program.add("rms_norm", y=normed, x=x, weight=weight, size=8, eps=0.5)
    program.add("silu_mul", y=x, x=normed, size=4)
    assert str(program).splitlines() == [
        "rms_norm(y=normed, x=x, weight=[8], size=8, eps=0.5, num_rows=step)",
        "silu_mul(y=x, x=normed, size=4, num_rows=step)",
    ]


def test_what_an_operation_does_not_know_is_refused(library):
    program = CpuProgram(library)
    with pytest.raises(KeyError, match="no_such_operation"):
        program.add("no_such_operation")
    with pytest.raises(AttributeError, match=r"rms_norm_args.*widht"):
        program.add("rms_norm", widht=8)
    with pytest.raises(TypeError):
        program.add("rms_norm", size=0.5)


def test_a_buffer_has_room_for_its_largest_user(library):
    program = CpuProgram(library)
    small, large = program.buffer("room", 8), program.buffer("room", 24)
    assert program.buffer("room", 16) is small is large
    scales = program.buffer("scales", 1, torch.float32)
    program.record(5)
    assert small.rows.shape == (5, 24)
    assert (small.rows.dtype, scales.rows.dtype) == (library.dtype, torch.float32)
