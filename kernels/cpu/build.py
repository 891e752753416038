"""Compiles the C sources at first use, into a cache shared by processes and later starts.

A library's file is named by a digest of its inputs: sources, flags, compiler and CPU instructions.
It is written to a temporary file and then renamed, with a digest of its own bytes, so that no
process ever loads an incomplete file, which would crash it. A library runs as this user, so it is
loaded only if nobody else but root can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.kernels.cpu.isa import Isa

CACHE_VARIABLE = "PENSTOCK_CACHE_DIR"
_SOURCES = Path(__file__).parent
_COMPILED = ("kernels.c", "pool.c", "ranks.c")
_SYSTEM_COMPILERS = ["cc", "gcc", "clang"]
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-Wno-psabi")
_TIMEOUT_S = 120.0
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNFINISHED, _UNFINISHED_S = "unfinished-", 3600.0  # after which nobody writes them any more


class BuildError(Exception):
    """The library could not be built: there is no compiler, or it failed."""


def build_library(isa: Isa, defines: tuple[str, ...]) -> Path:
    """The shared library for these instructions and -D definitions, compiled if it is not cached.

    Raises:
        BuildError: with the reason in one line.
    """
    compiler = find_compiler()
    flags = (*_FLAGS, *isa.flags, *(f"-D{define}" for define in defines))
    cache = _private_folder(cache_dir())
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


def cache_dir() -> Path:
    """The folder for what can be made again; created if missing.

    Raises:
        BuildError: there is no place for it.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        folder = (
            Path(chosen)
            if chosen
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        )
    except RuntimeError as error:  # a container's user without an entry in the user database
        raise BuildError(f"no place for a cache ({error}): set {CACHE_VARIABLE}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return folder


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root may write a file or folder that is there."""
    if not hasattr(os, "geteuid"):
        return True
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & _OTHERS_MAY_WRITE


def _private_folder(cache: Path) -> Path:
    """The cache, or a folder in it where others may write to the cache.

    Raises:
        BuildError: that is not this user's alone either.
    """
    if is_private(cache):
        return cache
    folder = cache / f"private-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    if not is_private(folder):
        raise BuildError(f"others may write to {cache} and {folder}: set {CACHE_VARIABLE}")
    return folder


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder in `folder` for what is not finished yet, removed at the end; those that killed
    processes have left are removed too.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as own:
        for left in folder.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _UNFINISHED_S:
                    shutil.rmtree(left, ignore_errors=True)
        yield Path(own)


def remove_orphans(folder: Path, *, link: str) -> None:
    """Remove the folders in `folder` whose file of this name is a link to what is gone."""
    for each in folder.iterdir():
        origin = each / link
        if origin.is_symlink() and not origin.exists():
            shutil.rmtree(each, ignore_errors=True)


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
