"""The two distributions: the client in an environment of its own, which later gets the server."""

from __future__ import annotations

import email
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from ..system.processes import END_S, Served, serve

ROOT = Path(__file__).parents[2]
_SOURCES = ("gateway", "engine", "kernels", "load", "clients", ".namespace")
_FILES = ("pyproject.toml", "README.md", "LICENSE")
_BENCHES = ("serve", "engine", "quality", "startup")
# For work on penstock itself.
_OURS = (
    "penstock/engine/demo/",
    *(
        f"penstock/load/{name}/"
        for name in ("gateway", "gpu", "kernels", "peers", "results", "soak")
    ),
)
_MAX_BYTES = 40_000_000

pytestmark = [pytest.mark.external, pytest.mark.timeout(900)]


@dataclass
class Wheels:
    client: Path
    server: Path


@dataclass
class Environment:
    """A virtual environment without pip."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(
        self, *command: str | Path, code: int = 0, text: str | None = None, url: str = ""
    ) -> tuple[str, str]:
        """What one of its programs prints, which must end with this code."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            input=text,
            env={**_environment(), "PENSTOCK_URL": url},
            cwd=self.folder,  # from which nothing can be imported
            capture_output=True,
            text=True,
            timeout=END_S,
        )
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    def install(self, *words: str | Path) -> None:
        _pip("--python", self.folder / "bin" / "python", "install", *words)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _pip(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return _build(tmp_path_factory.mktemp("wheels"))


def _build(folder: Path) -> Wheels:
    """Built from a copy of the sources: a build leaves files beside them."""
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.egg-info")
    for name in _SOURCES:
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in _FILES:
        shutil.copy(ROOT / name, folder / "source")
    sources = (folder / "source", folder / "source" / "clients" / "python")
    _pip("wheel", "--no-deps", "--wheel-dir", folder, *sources)
    [client], [server] = folder.glob("penstock_client-*"), folder.glob("penstock_llm-*")
    return Wheels(client, server)


@pytest.fixture(scope="module")
def alone(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that has the client, and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    environment = Environment(folder)
    environment.install("-c", ROOT / "constraints.txt", wheels.client)
    return environment


def _in(wheel: Path) -> list[str]:
    return [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]


def test_every_file_is_in_one_wheel(wheels: Wheels) -> None:
    in_client, in_server = _in(wheels.client), _in(wheels.server)
    assert max(Counter([*in_client, *in_server]).values()) == 1
    python = {name for name in in_client if name.startswith("penstock/clients/python/")}
    assert "penstock/clients/python/py.typed" in python  # its annotations are for its users
    assert {*in_client} - python == {
        "penstock/clients/__init__.py",
        "penstock/clients/command_line.py",
    }
    modules = {
        f"penstock/{path.relative_to(ROOT)}"
        for folder in _SOURCES
        for path in (ROOT / folder).rglob("*.py")
        if "examples" not in path.parts
    }
    ours = {name for name in modules if name.startswith(_OURS)}
    assert modules - ours <= {*in_client, *in_server}
    assert not [name for name in in_server if name.startswith(_OURS)]
    assert {f"penstock/load/{name}.py" for name in _BENCHES} <= {*in_server}
    page = {name for name in in_server if name.startswith("penstock/clients/")}
    assert {"penstock/clients/browser/index.html"} <= page
    assert all(name.startswith("penstock/clients/browser/") for name in page)


def test_two_builds_have_the_same_bytes(wheels: Wheels, tmp_path: Path) -> None:
    """The compiled libraries apart: `tests/kernels/cpu/test_shipped.py`."""
    builder = runpy.run_path(str(ROOT / ".deploy" / "wheels.py"))
    again = _build(tmp_path)
    assert again.server.read_bytes() != wheels.server.read_bytes()  # at another time

    def written(wheel: Path, folder: str) -> bytes:
        (tmp_path / folder).mkdir(exist_ok=True)
        files = builder["read_wheel"](wheel)
        return bytes(builder["write_wheel"](tmp_path / folder, files, "any", {}).read_bytes())

    assert written(wheels.server, "first") == written(again.server, "second")
    assert written(wheels.client, "first") == written(again.client, "second")


def test_the_wheels_name_the_licences_of_what_is_in_them(wheels: Wheels) -> None:
    assert _licences(wheels.client) == ("Apache-2.0", ["LICENSE"])
    assert _licences(wheels.server) == (
        "Apache-2.0 AND MIT AND BSD-3-Clause AND OFL-1.1",
        [
            "LICENSE",
            *(
                f"clients/browser/vendor/{name}.LICENSE.md"
                for name in ("highlight", "htm", "inter", "katex", "marked", "preact")
            ),
        ],
    )


def _licences(wheel: Path) -> tuple[str, list[str]]:
    """What its metadata says; the files it names are there."""
    with ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(files.read(name))
        named: list[str] = metadata.get_all("License-File", [])
        folder = name.removesuffix("METADATA")
        assert all(files.read(f"{folder}licenses/{each}") for each in named)
    return metadata["License-Expression"], named


def test_the_client_alone_is_small(alone: Environment) -> None:
    files = [path for path in alone.site_packages.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= _MAX_BYTES
    assert not (alone.site_packages / "torch").exists()
    assert alone.run("penstock", "--version")[0].startswith("penstock-client 0.")


def test_without_the_server_serve_says_what_to_install(alone: Environment) -> None:
    output, complaint = alone.run("penstock", "serve", "--port", "0", code=2)
    [line] = complaint.splitlines()
    assert (output, "needs the server, penstock-llm" in line) == ("", True)


def _chat(environment: Environment, server: Served) -> str:
    options = ("chat", "--base-url", server.base_url)
    return environment.run("penstock", *options, text="What is paged attention?\n")[0]


def test_the_client_alone_chats_with_a_server(alone: Environment, demo_server: Served) -> None:
    assert "block" in _chat(alone, demo_server)


@pytest.mark.parametrize("name", ["penstock_python.py", "penstock_blocking.py"])
def test_the_client_alone_runs_the_examples(
    name: str, alone: Environment, demo_server: Served
) -> None:
    example = ROOT / "clients" / "examples" / name
    assert "block" in alone.run("python", example, url=demo_server.base_url)[0]


@pytest.fixture
def both(alone: Environment, wheels: Wheels) -> Iterator[Environment]:
    """The same environment after the server was installed beside the client. Its dependencies are
    found among the tests' own; what those have installed for editing is not."""
    alone.install("--no-deps", wheels.server)
    packages = alone.site_packages / "packages-of-the-tests.pth"
    packages.write_text("\n".join({sysconfig.get_path(key) for key in ("purelib", "platlib")}))
    yield alone
    packages.unlink()


def test_the_server_beside_the_client(both: Environment, tmp_path: Path) -> None:
    output, _ = both.run("penstock", "--version")
    assert output.startswith("penstock 0.")
    for name in ("penstock.gateway", "penstock.clients"):
        where = both.run("python", "-c", f"import {name}; print({name}.__file__)")[0]
        assert Path(where.strip()).is_relative_to(both.site_packages)
    for command in ("serve", "engine", "status", "models", "bench", "chat"):
        assert f"usage: penstock {command} " in both.run("penstock", command, "--help")[0]
    command = (str(both.folder / "bin" / "penstock"),)
    with serve(log=tmp_path / "log", command=command) as server:
        assert "block" in _chat(both, server)
        address = f"import urllib.request as r; print(r.urlopen({server.base_url!r}).status)"
        assert both.run("python", "-c", address)[0] == "200\n"  # the chat page
        assert both.run("penstock", "status", "--base-url", server.base_url)[0].endswith(": ok\n")
