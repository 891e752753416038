"""Compiling at first use: the cache, and machines where nothing can be compiled."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.cpu import operations
from tests.support.tiers import tiered

from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu import build
from penstock.kernels.cpu.build import BuildError, build_library, find_compiler
from penstock.kernels.cpu.isa import ISA_VARIABLE, Isa, select_isa
from penstock.kernels.cpu.library import load_library

DEFINES = ("DTYPE=f32",)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(ISA_VARIABLE, "portable")  # compiled in half the time
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compilations` has compiled, by its arguments: the sources stay as they are."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def compilations(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes when it compiles, a line each in this file, and is quick about it: what
    it has compiled before it copies."""
    notes, compiler = tmp_path / "notes", tmp_path / "noting-cc"
    notes.touch()
    command = shlex.join(find_compiler())
    compiler.write_text(
        f"""#!/bin/sh
unset CC  # Zig asks the one that it names about the system
[ "$1" = --version ] && exec {command} "$@"
echo x >> {notes}
key= is_output= output=
for each; do
    if [ "$is_output" ]; then output=$each; else key="$key $each"; fi
    is_output=; [ "$each" = -o ] && is_output=1
done
known={compiled}/$(echo "$key" | cksum | tr ' ' -)
if [ ! -e "$known" ]; then
    {command} "$@" -O0 || exit
    cp "$output" "$known.$$" && mv "$known.$$" "$known"
fi
cp "$known" "$output"
"""
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CC", str(compiler))
    return notes


def num_compilations(notes: Path) -> int:
    return len(notes.read_text().splitlines())


@pytest.mark.exhaustive
def test_it_is_compiled_once(compilations, monkeypatch):
    monkeypatch.delenv(ISA_VARIABLE)
    first = build_library(select_isa(), DEFINES)
    assert build_library(select_isa(), DEFINES) == first
    assert num_compilations(compilations) == 1
    other = build_library(Isa("portable", ()), DEFINES)
    assert other != first or select_isa().flags == ()


@pytest.mark.exhaustive
def test_a_compiler_may_be_of_several_words(compilations, monkeypatch):
    (compiler,) = find_compiler()
    monkeypatch.setenv("CC", f"env 'NOTE=of several words' {compiler}")
    assert find_compiler() == (shutil.which("env"), "NOTE=of several words", compiler)
    assert load_library(torch.float32) is not None
    assert num_compilations(compilations) == 1


def test_without_a_system_compiler_it_is_the_python_packages(compilations, monkeypatch, tmp_path):
    """A stand-in for the package, which hands on to the compiler that this machine has."""
    package, arguments = tmp_path / "packages" / "ziglang", tmp_path / "arguments"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys, pathlib\n"
        f"pathlib.Path({str(arguments)!r}).write_text(repr(sys.argv[1:3]))\n"
        "os.environ.pop('PYTHONPATH')\n"
        f"os.environ['PATH'] = {os.environ['PATH']!r}\n"
        f"os.execv({os.environ['CC']!r}, ['cc', *sys.argv[3:]])\n"
    )
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "ziglang", raising=False)
    assert find_compiler()[:4] == (sys.executable, "-m", "ziglang", "cc")
    assert load_library(torch.float32) is not None
    assert num_compilations(compilations) == 1
    # It would compile for this very CPU, which the name of a library in the cache does not say.
    assert arguments.read_text() == repr(["cc", "-mcpu=baseline"])


def test_damaged_files_are_compiled_again(compilations):
    path = build_library(select_isa(), DEFINES)
    seal = path.with_suffix(".sha256")
    damages = [(path, path.read_bytes()[:5000]), (path, b"not a library"), (seal, b"\xff\xfe")]
    for num_before, (file, data) in enumerate([*damages, (seal, None)], 1):
        file.unlink()  # not written over: this process has loaded it
        if data is not None:
            file.write_bytes(data)
        library = load_library(torch.float32)
        assert num_compilations(compilations) == num_before + 1
        assert library is not None
        x = torch.ones(1, 4)
        assert operations.linear(library, x, torch.ones(3, 4)).tolist() == [[4.0] * 3]


def _planted(path: Path) -> None:
    """A library with its seal, which would say that it is whole."""
    path.write_bytes(b"planted")
    path.with_suffix(".sha256").write_text(hashlib.sha256(b"planted").hexdigest())


@pytest.mark.parametrize(
    "give_away",
    [
        pytest.param(lambda file: file.chmod(0o775), marks=pytest.mark.exhaustive),
        pytest.param(
            lambda file: os.chown(file, 12345, -1),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_library_that_others_may_have_written_is_compiled_again(compilations, give_away):
    path = build_library(select_isa(), DEFINES)
    path.unlink()
    _planted(path)
    give_away(path)
    assert build_library(select_isa(), DEFINES) == path
    assert path.read_bytes() != b"planted"
    assert num_compilations(compilations) == 2


@pytest.mark.parametrize("mode", tiered([0o777, 0o1777, 0o775], first=[0o1777]))
def test_in_a_cache_that_others_may_write_to_it_is_in_a_folder_of_its_own(
    compilations, cache, mode
):
    path = build_library(select_isa(), DEFINES)
    path.unlink()
    _planted(path)
    cache.chmod(mode)
    own = build_library(select_isa(), DEFINES)
    assert own.parent.parent == cache
    assert own.parent.stat().st_mode & 0o777 == 0o700
    assert build_library(select_isa(), DEFINES) == own
    assert num_compilations(compilations) == 2
    own.parent.chmod(0o777)
    with pytest.raises(BuildError, match=r"others may write to .*: set PENSTOCK_CACHE_DIR"):
        build_library(select_isa(), DEFINES)


def test_what_a_killed_process_left_is_removed(compilations, cache):
    left = cache / "unfinished-old"
    left.mkdir(parents=True)
    (left / "kernels.so").touch()
    os.utime(left, (0, 0))
    build_library(select_isa(), DEFINES)
    assert not left.exists()


# Fills the memory that a process has for libraries' static thread-local variables with copies of
# those named first, until it is full, then loads the others.
FILL = """
import ctypes, itertools, shutil, sys
num_fillers = 2
for filler in sys.argv[1:1 + num_fillers]:
    try:
        for number in itertools.count():
            ctypes.CDLL(shutil.copy(filler, f"{filler}.{number}"))
    except OSError as error:
        assert "static TLS" in str(error), error
print(len([ctypes.CDLL(path) for path in sys.argv[1 + num_fillers:]]))
"""


def test_twelve_fit_into_a_process_whose_static_tls_is_full(compilations, tmp_path):
    fillers = []
    for size in (256, 8):
        fillers.append(tmp_path / f"{size}.so")
        variable = f'__thread char filler[{size}] __attribute__((tls_model("initial-exec")));'
        source = f"{variable}\nchar read_filler(void) {{ return filler[0]; }}\n"
        command = [*find_compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", fillers[-1]]
        subprocess.run(command, input=source, text=True, check=True)
    library = build_library(select_isa(), DEFINES)
    copies = [shutil.copy(library, tmp_path / f"copy-{number}.so") for number in range(12)]
    command = [sys.executable, "-c", FILL, *fillers, *copies]
    assert subprocess.check_output(command, text=True) == "12\n"


@pytest.mark.exhaustive
def test_processes_that_start_together_get_a_whole_file_each(compilations, cache):
    code = (
        "import torch; from penstock.kernels.cpu.library import load_library;"
        "assert load_library(torch.float32) is not None"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".so"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": ""}, "no C compiler"),
        ({"CC": "no-such-compiler"}, "no C compiler (no-such-compiler)"),
        ({"CC": "false"}, "failed"),
        ({"CC": "cc 'of words"}, "CC=cc 'of words"),
        ({CACHE_VARIABLE: "/proc/nowhere"}, "cannot be written"),
        ({ISA_VARIABLE: "vax"}, "this CPU can run"),
    ],
)
def test_without_kernels_there_is_one_line_in_the_log(monkeypatch, caplog, variables, reason):
    if "PATH" in variables:
        monkeypatch.setitem(sys.modules, "ziglang", None)  # not to be found either
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert load_library(torch.float32) is None
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_user_without_a_home_gets_no_kernels_or_names_a_place(
    compilations, monkeypatch, caplog, tmp_path
):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert load_library(torch.float32) is not None
    monkeypatch.delenv(CACHE_VARIABLE)
    with caplog.at_level(logging.WARNING):
        assert load_library(torch.float32) is None
    (record,) = caplog.records
    assert CACHE_VARIABLE in record.getMessage()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library(torch.float32) is not None


def test_an_error_of_the_compiler_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "sources"
    broken.mkdir()
    for name in ("kernels.c", "pool.c"):
        (broken / name).write_text("int main(void) { return }\n")
    monkeypatch.setattr(build, "_SOURCES", broken)
    with pytest.raises(BuildError, match="error"):
        build_library(select_isa(), DEFINES)


@pytest.mark.exhaustive
def test_a_compiler_may_work_for_a_limited_time_and_wait_for_long(monkeypatch, tmp_path):
    monkeypatch.setattr(
        build, "_LIMITED", tuple(w.replace("-t 120", "-t 1") for w in build._LIMITED)
    )
    compiler = tmp_path / "cc"
    for work, complaint in (("while :; do :; done", "SIGXCPU"), ("sleep 1.1; exit 3", "status 3")):
        compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ {work}; }}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        with pytest.raises(BuildError, match=complaint):
            build_library(select_isa(), DEFINES)


def test_an_isa_can_be_forced_and_an_unknown_cpu_runs_the_portable_one(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert select_isa() == Isa("portable", ())
    monkeypatch.delenv(ISA_VARIABLE)
    monkeypatch.setattr("penstock.kernels.cpu.isa._cpu_features", frozenset)
    assert select_isa().name == "portable"
    assert os.environ.get(ISA_VARIABLE) is None
