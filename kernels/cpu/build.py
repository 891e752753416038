"""The compiled kernels: a wheel's, else compiled at first use into a cache that processes share.

A wheel has a library for each dtype, with all sets of instructions in it (`compile_shipped`), so
nothing is compiled where it is installed.

In the cache, a library's file is named by a digest of its inputs: sources, flags, compiler and CPU
instructions. It is written to a temporary file and then renamed, with a digest of its own bytes, so
that no process ever loads an incomplete file, which would crash it. A library runs as this user, so
it is loaded only if nobody else but root can have written it.
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
from penstock.kernels.cpu.isa import Isa, best_shipped, shipped_isas

_SOURCES = Path(__file__).parent
_COMPILED = ("kernels.c", "pool.c", "ranks.c")
_SYSTEM_COMPILERS = ["cc", "gcc", "clang"]
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-Wno-psabi")
# At first use, a server waits for a compiler, which may be broken. Its work counts and hardly the
# clock, since on a busy machine others' processes have most of the time.
_MAX_CPU_S, _MAX_WAIT_S = 120, 1800.0
_LIMITED = ("/bin/sh", "-c", f'ulimit -S -t {_MAX_CPU_S} 2>/dev/null; exec "$@"', "sh")
# Unlike others, Zig compiles for this CPU by default; only what `Isa` names may be used.
_ZIG = ("-m", "ziglang", "cc", "-mcpu=baseline")
# What every distribution has had since 2014.
_SHIPPED_TARGET = "{machine}-linux-gnu.2.17"


class BuildError(Exception):
    """The library could not be built: there is no compiler, or it failed."""


def build_library(isa: Isa, defines: tuple[str, ...]) -> Path:
    """The shared library for these instructions and -D definitions, compiled if it is not cached.

    Raises:
        BuildError: with the reason in one line.
    """
    compiler = find_compiler()
    own = _for_zig(isa.flags) if compiler[1:] == _ZIG else isa.flags
    flags = (*_FLAGS, *own, *(f"-D{define}" for define in defines))
    try:
        cache = private_folder(cache_dir())
    except NoCacheError as error:
        raise BuildError(str(error)) from error
    path = cache / f"kernels-{_digest_of_inputs(compiler, flags, cache)[:24]}.so"
    if not _is_intact(path):
        _compile(compiler, flags, path)
    return path


def shipped_library(isa: Isa, dtype: str) -> tuple[Path, str] | None:
    """The library that was installed, and the variant in it for these instructions.

    Args:
        dtype: its name in C.
    """
    path = _SOURCES / _shipped_name(dtype)
    variant = best_shipped(isa)
    return (path, variant) if variant and path.is_file() else None


def compile_shipped(folder: Path, machine: str, dtype: str, defines: tuple[str, ...]) -> Path:
    """Compile a library for a wheel with the `ziglang` package, whatever this machine is.

    The same bytes every time: nothing in them is of this machine, this folder or this hour.

    Args:
        folder: for the file, and others on the way to it.
        machine: one of those that `shipped_isas` knows.
        dtype: its name in C.
        defines: the -D definitions for this dtype.

    Returns:
        the library's file.

    Raises:
        BuildError: with the reason in one line.
    """
    zig = (sys.executable, *_ZIG, "-target", _SHIPPED_TARGET.format(machine=machine))
    common = (*_FLAGS, "-g0", f"-ffile-prefix-map={_SOURCES}=.")
    objects = []

    def compile_source(name: str, source: str, *flags: str) -> None:
        objects.append(str(folder / f"{name}-{dtype}-{machine}.o"))
        own = [flag for flag in common if flag != "-shared"]
        command = [*own, *_for_zig(flags), "-c", str(_SOURCES / source), "-o", objects[-1]]
        _run(zig, command, folder, unlimited=True)

    for variant, isa in shipped_isas(machine).items():
        named = [f"-D{define}" for define in (*defines, f"VARIANT={variant}")]
        compile_source(variant, "kernels.c", *isa.flags, *named)
    for source in _COMPILED[1:]:
        compile_source(source, source)
    path = folder / _shipped_name(dtype)
    link = [*common, "-s", "-Wl,--build-id=none", "-o", str(path), *objects, "-lm"]
    _run(zig, link, folder, unlimited=True)
    return path


def _shipped_name(dtype: str) -> str:
    return f"kernels-{dtype}.so"


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
        return (sys.executable, *_ZIG)
    raise BuildError(f"no C compiler ({', '.join(names)}) on the PATH")


def _for_zig(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Zig knows no -march with features."""
    march = [flag for flag in flags if flag.startswith("-march=")]
    features = "".join(f"+{name}" for flag in march for name in flag.split("+")[1:])
    rest = (flag for flag in flags if flag not in march)
    return (*rest, *((f"-mcpu=baseline{features}",) if features else ()))


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


def _run(
    compiler: tuple[str, ...], arguments: list[str], cache: Path, *, unlimited: bool = False
) -> str:
    # Zig caches the C library it built for this system, by default in the user's home, which may
    # not be writable.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), **os.environ}
    try:
        done = subprocess.run(  # noqa: S603
            [*(() if unlimited else _LIMITED), *compiler, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=None if unlimited else _MAX_WAIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        raise BuildError(f"{shlex.join(compiler)} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(compiler)} failed: {error}") from error
    return done.stdout
