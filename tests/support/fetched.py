"""Others' programs and packages, which come from their registries once and are kept.

They are in `fetched` in the cache of penstock's kernels (`~/.cache/penstock`), in folders by the
digest of what was asked for: all checkouts share them.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.kernels.cache_folder import cache_dir

_FETCH_TIMEOUT_S = 600.0
_NPM_OPTIONS = ("--no-audit", "--no-fund", "--ignore-scripts")


def kept(name: str, wanted: bytes, fill: Callable[[Path], None]) -> Path:
    """The folder of the cache that has what is wanted.

    Args:
        name: the beginning of the folder's name.
        wanted: what determines the folder's contents.
        fill: puts them into an empty folder, which is moved afterwards. Several processes may do so
            at the same time; the first one's folder is used by all.
    """
    folder = cache_dir() / "fetched" / f"{name}-{hashlib.sha256(wanted).hexdigest()[:24]}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}-") as temporary:
            fresh = Path(temporary, "fresh")
            fresh.mkdir()
            fill(fresh)
            try:
                fresh.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was quicker
                    raise
    return folder


def npm_packages(folder: Path) -> Path:
    """`node_modules` with what the `package-lock.json` of a folder lists."""
    lock = folder / "package-lock.json"

    def install(fresh: Path) -> None:
        for path in (folder / "package.json", lock):
            shutil.copy(path, fresh)
        _run(["npm", "ci", *_NPM_OPTIONS], fresh)

    return kept("npm", lock.read_bytes(), install) / "node_modules"


def npm_program(package: str, command: str) -> Path:
    """A command of a package, given with its version as `name@1.2.3`."""

    def install(fresh: Path) -> None:
        _run(["npm", "install", *_NPM_OPTIONS, package], fresh)

    modules = kept("npm", package.encode(), install) / "node_modules"
    return modules / ".bin" / command


def npm_folder(package: str, folder: str) -> Path:
    """A folder of a package, given with its version as `name@1.2.3`; the rest is not kept."""
    name, _, _ = package.rpartition("@")

    def install(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(dir=fresh.parent) as temporary:
            _run(["npm", "install", *_NPM_OPTIONS, package], Path(temporary))
            shutil.copytree(Path(temporary, "node_modules", name, folder), fresh / folder)

    return kept("npm", f"{package} {folder}".encode(), install) / folder


def source_folder(requirement: str, folder: str) -> Path:
    """A folder of a Python package's source, given as `name==1.2.3`; the rest is not kept."""

    def download(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(dir=fresh.parent) as temporary:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            _run([*command, "--no-binary", ":all:", requirement], Path(temporary))
            [file] = Path(temporary).iterdir()
            with tarfile.open(file) as archive:
                archive.extractall(temporary, filter="data")
            [source] = (each for each in Path(temporary).iterdir() if each.is_dir())
            shutil.copytree(source / folder, fresh / "source")

    return kept("source", f"{requirement} {folder}".encode(), download) / "source"


def python_packages(requirements: Sequence[str]) -> Path:
    """A folder for PYTHONPATH with these packages and what they need, for this Python."""

    def install(fresh: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        command += ["--no-compile", "--no-warn-conflicts", "--target", str(fresh)]
        _run([*command, *requirements], fresh)

    return kept("python", _of_this_python(requirements), install)


def made_of_packages(
    name: str, requirements: Sequence[str], make: Callable[[Path, Path], None]
) -> Path:
    """A folder with what is made of Python packages, which are not kept themselves.

    Args:
        name: the beginning of the folder's name.
        requirements: pip's arguments.
        make: is given the packages' folder, and the one to fill.
    """

    def install(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(dir=fresh.parent) as temporary:
            command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            _run([*command, "--no-compile", "--target", temporary, *requirements], fresh)
            make(Path(temporary), fresh)

    return kept(name, "\n".join(requirements).encode(), install)


def python_environment(requirements: Sequence[str]) -> Path:
    """The Python of a virtual environment that has these packages and not the project's own."""

    def install(fresh: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], fresh)
        command = [sys.executable, "-m", "pip", "--python", str(fresh / "bin" / "python")]
        command += ["install", "-q", "--disable-pip-version-check", "--no-compile"]
        _run([*command, *requirements], fresh)

    wanted = b"environment\n" + _of_this_python(requirements)
    return kept("python", wanted, install) / "bin" / "python"


def _of_this_python(requirements: Sequence[str]) -> bytes:
    python = (sys.base_prefix, platform.python_version(), platform.machine())
    return "\n".join((*python, *requirements)).encode()


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}"[-4000:])
