"""Compiling the C sources at first use into a cache that later starts, and other processes, share.

A library's file is named by a digest of everything that went into it: sources, flags, compiler and
CPU instructions. It is written beside its place and moved there in one piece, with a digest of its
own bytes, so that no process ever loads half a file: loading one would kill the process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock.kernels.cpu.isa import Isa

CACHE_VARIABLE = "PENSTOCK_CACHE_DIR"
_SOURCES = Path(__file__).parent
_COMPILED = ("kernels.c", "pool.c")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-Wno-psabi")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """There is no library: no compiler, or it failed."""


def build_library(isa: Isa, defines: tuple[str, ...]) -> Path:
    """The shared library for these instructions and -D definitions, compiled if it is not cached.

    Raises:
        BuildError: saying why, in one line.
    """
    compiler = _find_compiler()
    flags = (*_FLAGS, *isa.flags, *(f"-D{define}" for define in defines))
    path = _cache_dir() / f"kernels-{_digest_of_inputs(compiler, flags)[:24]}.so"
    if not _is_intact(path):
        _compile(compiler, flags, path)
    return path


def _find_compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C compiler ({', '.join(names)}) on the PATH")


def _digest_of_inputs(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((compiler, _run([compiler, "--version"]), flags)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _cache_dir() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    except RuntimeError as error:  # a container's user, whom the system does not know
        raise BuildError(f"no place for a cache ({error}): set {CACHE_VARIABLE}") from error


def _is_intact(path: Path) -> bool:
    try:
        return _seal(path).read_bytes() == _digest_of_file(path).encode()
    except OSError:
        return False


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            sources = [str(_SOURCES / name) for name in _COMPILED]
            _run([compiler, *flags, "-o", str(fresh), *sources, "-lm"])
            seal = _seal(fresh)
            seal.write_text(_digest_of_file(fresh))
            fresh.replace(path)
            seal.replace(_seal(path))
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        raise BuildError(f"{command[0]} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
