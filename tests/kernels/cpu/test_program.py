"""Programs, and what it takes to add an operation: its arguments in `ops.h`, its function in C and
in torch, and a record in a program."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from penstock.kernels import torch_operations, torch_program
from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu import build
from penstock.kernels.cpu.build import find_compiler
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.cpu.structures import read_structures
from penstock.kernels.program import Buffer, Program
from penstock.kernels.reference.rms_norm import rms_norm_reference
from penstock.kernels.torch_operations import NO_STEP, OPERATIONS, TorchStep, operation
from penstock.kernels.torch_program import TorchProgram, read

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


def write(program: Program, x: Buffer, weight: torch.Tensor) -> tuple[Buffer, Buffer]:
    """What a model's writer does, once for both."""
    raised, normed = program.buffer("raised", x.size), program.buffer("normed", x.size)
    program.add("at_least", y=raised, x=x, size=x.size, floor=-0.5)
    program.add("rms_norm", y=normed, x=raised, weight=weight, size=x.size, eps=1e-5)
    return raised, normed


@pytest.mark.exhaustive
def test_an_operation_is_added(extended, monkeypatch):
    dtype, num_rows, size = extended.dtype, 5, 50
    given, weight = (random(*shape, seed=0, dtype=dtype) for shape in ((num_rows, size), (size,)))
    in_c = CpuProgram(extended)
    x = in_c.buffer("x", size)
    raised, normed = write(in_c, x, weight)
    in_c.record(num_rows)
    in_c.step.num_tokens = num_rows
    x.rows.copy_(given)
    in_c.run()
    assert torch.equal(raised.rows, given.clamp(min=-0.5))
    torch.testing.assert_close(normed.rows, rms_norm_reference(raised.rows, weight, 1e-5))

    monkeypatch.setattr(torch_operations, "OPERATIONS", OPERATIONS | {})
    monkeypatch.setattr(torch_program, "OPERATIONS", torch_operations.OPERATIONS)
    torch_program._declared.cache_clear()

    @operation("y")
    def at_least(_: TorchStep, x: torch.Tensor, floor: float) -> torch.Tensor:
        return x.clamp(min=floor)

    program, rows = TorchProgram(dtype), {"x": given}
    kept = write(program, program.buffer("x", size), weight)
    program.compile(kept)
    program.run(NO_STEP, rows)
    torch_program._declared.cache_clear()
    for each in (raised, normed):
        torch.testing.assert_close(rows[each.name], each.rows)


def test_a_sum_is_added_with_its_norm(library):
    """Or where something else reads it; and what nothing reads any more is dropped."""
    program, size = TorchProgram(library.dtype), 8
    x, y, z, last = (program.buffer(name, size) for name in ("x", "y", "z", "last"))
    weight = random(size, seed=1, dtype=library.dtype)
    program.add("scale_add", y=y, x=x, residual=x, factor=2.0, size=size)
    program.add("rms_norm", y=z, x=y, weight=weight, size=size, eps=1e-5)
    program.add("scale_add", y=last, x=z, residual=y, factor=1.0, size=size)
    program.compile((last,))
    given = random(5, size, seed=0, dtype=library.dtype)
    rows = {"x": given}
    program.run(NO_STEP, rows)
    total = given * 2.0 + given
    expected = rms_norm_reference(total, weight, 1e-5) + total
    assert list(rows) == ["last"]
    assert torch.equal(read(rows, last), expected)


def test_columns_of_a_buffer(library):
    program, size = TorchProgram(library.dtype), 8
    x, y = program.buffer("x", size), program.buffer("y", size)
    for start, limit in ((0, 0.5), (5, 0.25)):
        count = 5 if not start else 3
        program.add(
            "clamp", y=y.columns(start), x=x.columns(start), size=count, stride=size, limit=limit
        )
    program.compile((y,))
    given = random(4, size, seed=0, dtype=library.dtype)
    rows = {"x": given}
    program.run(NO_STEP, rows)
    expected = torch.cat((given[:, :5].clamp(-0.5, 0.5), given[:, 5:].clamp(-0.25, 0.25)), dim=1)
    assert torch.equal(rows["y"], expected)


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


@pytest.mark.parametrize("make", [CpuProgram, lambda library: TorchProgram(library.dtype)])
def test_what_an_operation_does_not_know_is_refused(make, library):
    program = make(library)
    with pytest.raises(KeyError, match="no_such_operation"):
        program.add("no_such_operation")
    with pytest.raises(AttributeError, match=r"rms_norm_args.*widht"):
        program.add("rms_norm", widht=8)
    program = CpuProgram(library)
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
