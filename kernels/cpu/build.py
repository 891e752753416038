"""Compiles the C sources at first use, into a cache shared by processes and later starts.

A library's file is named by a digest of its inputs: sources, flags, compiler and CPU instructions.
It is written to a temporary file and then renamed, with a digest of its own bytes, so that no
process ever loads an incomplete file, which would crash it. A library runs as this user, so it is
loaded only if nobody else but root can have written it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from penstock.kernels.cache_folder import (
    NoCacheError,
    cache_dir,
    is_private,
    private_folder,
    unfinished,
)
from penstock.kernels.cpu.isa import Isa

_SOURCES = Path(__file__).parent
_COMPILED = ("kernels.c", "pool.c", "ranks.c")
_SYSTEM_COMPILERS = ["cc", "gcc", "clang"]
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-Wno-psabi")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """The library could not be built: there is no compiler, or it failed."""


def build_library(isa: Isa, defines: tuple[str, ...]) -> Path:
    """The shared library for these instructions and -D definitions, compiled if it is not cached.

    Raises:
        BuildError: with the reason in one line.
    """
    compiler = find_compiler()
    flags = (*_FLAGS, *isa.flags, *(f"-D{define}" for define in defines))
    try:
        cache = private_folder(cache_dir())
    except NoCacheError as error:
        raise BuildError(str(error)) from error
    path = cache / f"kernels-{_digest_of_inputs(compiler, flags, cache)[:24]}.so"
    if not _is_intact(path):
        _compile(compiler, flags, path)
    return path


def read_source(name: str) -> str:
    return (_SOURCES / name).read_text()


def find_compiler() -> tuple[str, ...]:
    """The command that compiles C: `$CC`, else the system's compiler, else the `ziglang` package.

    Raises:
        BuildError: there is none.
    """
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC={os.environ['CC']}: {error}") from error
    names = chosen[:1] or _SYSTEM_COMPILERS
    for name in names:
        found = shutil.which(name)
        if found:
            return (found, *chosen[1:])
    if not chosen and importlib.util.find_spec("ziglang"):
        # Unlike others, Zig compiles for this CPU by default; only what `Isa` names may be used.
        return (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")
    raise BuildError(f"no C compiler ({', '.join(names)}) on the PATH")


def _digest_of_inputs(compiler: tuple[str, ...], flags: tuple[str, ...], cache: Path) -> str:
    version = _run(compiler, ["--version"], cache)
    digest = hashlib.sha256(repr((compiler, version, flags)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _is_intact(path: Path) -> bool:
    if not is_private(path):
        return False
    try:
        return _seal(path).read_bytes() == _digest_of_file(path).encode()
    except OSError:
        return False


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], path: Path) -> None:
    try:
        with unfinished(path.parent) as folder:
            fresh = folder / path.name
            sources = [str(_SOURCES / name) for name in _COMPILED]
            _run(compiler, [*flags, "-o", str(fresh), *sources, "-lm"], path.parent)
            fresh.chmod(0o755)
            seal = _seal(fresh)
            seal.write_text(_digest_of_file(fresh))
            fresh.replace(path)
            seal.replace(_seal(path))
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written: {error}") from error


def _run(compiler: tuple[str, ...], arguments: list[str], cache: Path) -> str:
    # Zig caches the C library it built for this system, by default in the user's home, which may
    # not be writable.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), **os.environ}
    try:
        done = subprocess.run(  # noqa: S603
            [*compiler, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        raise BuildError(f"{shlex.join(compiler)} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(compiler)} failed: {error}") from error
    return done.stdout
