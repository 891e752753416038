"""Builds the wheels: penstock-llm for each machine, with compiled CPU kernels, and penstock-client.

    python .deploy/wheels.py dist

The files are those that git knows, as they are in the checkout. Two builds of the same files have
the same bytes: times are `SOURCE_DATE_EPOCH` or 1980, and files are in the order of their names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from penstock.kernels.cpu.build import compile_shipped
from penstock.kernels.cpu.isa import shipped_isas

_ROOT = Path(__file__).parents[1]
_LIBRARY_FOLDER = "penstock/kernels/cpu"
# What `kernels/cpu/library.py` compiles for each dtype.
_DTYPES = {"f32": ("DTYPE=f32",), "f16": ("DTYPE=f16",), "b16": ("DTYPE=b16", "DTYPE_PAIRS")}
_TAGS = ("manylinux2014", "manylinux_2_17")
_EARLIEST = 315_532_800  # 1980, where a zip's calendar begins


def build_wheels(out: Path, machines: tuple[str, ...] = ("x86_64", "aarch64")) -> list[Path]:
    """Write the wheels into a folder, which is made if missing; their paths.

    Raises:
        BuildError: a library cannot be compiled, for the reason in one line.
        subprocess.CalledProcessError: the Python files cannot be put into a wheel.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "source"
        _copy_checkout(source)
        client = read_wheel(_python_wheel(source / "clients" / "python", folder / "client"))
        server = read_wheel(_python_wheel(source, folder / "server"))
        built = [write_wheel(out, client, "any", {})]
        for machine in machines:
            libraries = _compile(folder / machine, machine)
            platform = ".".join(f"{tag}_{machine}" for tag in _TAGS)
            built.append(write_wheel(out, server, platform, libraries))
    return built


def _copy_checkout(target: Path) -> None:
    """Without what earlier builds left, which setuptools would put into the wheel, too."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=_ROOT,
        text=True,
    )
    for name in filter(None, listed.split("\0")):
        if (_ROOT / name).exists():  # not deleted since the last commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, target / name, follow_symlinks=False)


def _python_wheel(source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "-w", str(out), str(source)], check=True)  # noqa: S603
    [wheel] = out.glob("*.whl")
    return wheel


def read_wheel(path: Path) -> dict[str, bytes]:
    """The files in a wheel, by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _compile(folder: Path, machine: str) -> dict[str, bytes]:
    assert shipped_isas(machine), machine
    folder.mkdir()
    paths = []
    for name, flags in _DTYPES.items():
        print(f"compiling the kernels for {machine}, {name} ...", flush=True)
        paths.append(compile_shipped(folder, machine, name, flags))
    return {f"{_LIBRARY_FOLDER}/{path.name}": path.read_bytes() for path in paths}


def write_wheel(
    out: Path, python: Mapping[str, bytes], platform: str, libraries: Mapping[str, bytes]
) -> Path:
    """Write a wheel with the files of one of Python, and libraries for a platform; its path."""
    files = {**python, **libraries}
    [about] = (name for name in files if name.endswith(".dist-info/WHEEL"))
    info = about.removesuffix("/WHEEL")
    tags = [f"Tag: py3-none-{each}" for each in platform.split(".")]
    purelib = "true" if platform == "any" else "false"
    files[about] = "\n".join(
        ["Wheel-Version: 1.0", "Generator: penstock", f"Root-Is-Purelib: {purelib}", *tags, ""]
    ).encode()
    del files[f"{info}/RECORD"]
    records = []
    path = out / f"{info.removesuffix('.dist-info')}-py3-none-{platform}.whl"
    moment = time.gmtime(max(_EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", _EARLIEST))))[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*sorted(files.items()), (f"{info}/RECORD", b"")]:
            if name.endswith("/RECORD"):
                content = "\n".join([*records, f"{name},,", ""]).encode()
            else:
                content = data
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
                records.append(f"{name},sha256={digest.rstrip('=')},{len(data)}")
            entry = zipfile.ZipInfo(name, moment)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, content)
    return path


if __name__ == "__main__":
    for wheel in build_wheels(Path(sys.argv[1])):
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
