"""The script `penstock`: what it does itself, and what it leaves to the server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from penstock.clients.command_line import COMMANDS, main

ROOT = Path(__file__).parents[2]


def told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and what was printed."""
    try:
        code: object = main(arguments)
    except SystemExit as ending:
        code = ending.code
    assert isinstance(code, int)
    return code, *capsys.readouterr()


def _without_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "penstock-llm":
            raise metadata.PackageNotFoundError(name)
        return f"{name}'s"

    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            (),
            "give a command: serve, engine, status, chat, models, data, keys or bench; see",
        ),
        (("serv",), "penstock: error: unknown command 'serv' (did you mean serve?)"),
        (("--versoin",), "penstock: error: "),
        (("chat", "x"), "penstock chat: error: unexpected argument 'x'"),
        (("chat", "--base-ulr=x"), "unknown option --base-ulr (did you mean --base-url?)"),
        (("chat", "--tools=1"), "--tools takes no value, but got '1'"),
        (("chat", "--model"), "--model: expected one argument"),
        (("serve", "--prot", "1"), "penstock serve: error: unknown option --prot"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, complaint = told(arguments, capsys)
    assert (code, output, complaint.count("\n")) == (2, "", 1)
    assert line in complaint
    assert re.search(r"; see penstock( chat| serve)? --help\n$", complaint)


def test_help_lists_the_commands_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = told(("--help",), capsys)
    assert code == 0
    assert [word for word in COMMANDS if f"\n    {word} " in text] == list(COMMANDS)


def test_who_reads_the_output_may_stop() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from penstock.clients.command_line import main; exit(main(['--version']))"
    with os.fdopen(writing, "wb") as output:
        command = (sys.executable, "-c", code)
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_options_may_have_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, complaint = told(("chat", "--base_url", "http://127.0.0.1:1x"), capsys)
    assert code == 1
    assert "127.0.0.1:1x" in complaint


def test_the_version_is_the_servers_or_without_one_the_clients(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(("--version",), capsys)[1] == f"penstock {metadata.version('penstock-llm')}\n"
    _without_server(monkeypatch)
    assert told(("--version",), capsys)[1] == "penstock-client penstock-client's\n"


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"chat"}))
def test_without_the_server_its_commands_say_what_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_server(monkeypatch)
    code, output, complaint = told((command, "--port", "1"), capsys)
    assert (code, output, complaint.count("\n")) == (2, "", 1)
    assert complaint.startswith(f"penstock: error: {command} needs the server, penstock-llm: pip")


def test_the_server_has_all_commands_but_chat() -> None:
    found = metadata.distribution("penstock-llm").entry_points.select(group="penstock.commands")
    assert {command.name for command in found} == {*COMMANDS} - {"chat"}


def test_the_server_asks_for_the_client_of_its_checkout() -> None:
    """By a version that no index takes, so that none can have somebody else's."""
    server, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in ("", "clients/python")
    )
    assert f"{client['name']}=={client['version']}" in server["dependencies"]
    assert client["version"] == f"{server['version']}+checkout"
    assert list(client["scripts"]) == ["penstock"]
    assert "scripts" not in server


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_else(argument: str) -> None:
    """Nor what talks to a server."""
    program = (
        "import sys; from penstock.clients.command_line import main\n"
        f"try: main([{argument!r}])\n"
        "except SystemExit: print([*sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(re.findall(r"'([\w.]+)'", done.stdout.splitlines()[-1]))
    ours = {name for name in loaded if name.startswith("penstock")}
    assert ours == {"penstock", "penstock.clients", "penstock.clients.command_line"}
    assert not loaded & {"httpx", "rich", "torch", "websockets"}
