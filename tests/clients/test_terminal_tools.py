"""`penstock chat --tools --think`: what the tools compute, and a conversation in which they run."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from penstock.clients.python.terminal_tools import calculator, local_tools

from ..system.processes import PENSTOCK, Served
from .test_terminal_chat import COLOURS, CTRL_D, Terminal, command


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        ("2 * (3 - 4.5)", "-3"),
        ("7 / 2", "3.5"),
        ("-7 // 2", "-4"),
        ("9 % 4", "1"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["2 ** 9999999", "__import__('os')", "x + 1", "1 +", "True + 1", "'a' * 9", "1" * 201],
)
def test_it_computes_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|not an arithmetic|characters"):
        calculator(expression)


def test_the_options_are_known() -> None:
    shown = subprocess.run([PENSTOCK, "chat", "--help"], capture_output=True, text=True, check=True)
    assert {"--tools", "--think"} <= set(shown.stdout.split())


def test_the_notes_are_counted() -> None:
    note = {tool.name: tool for tool in local_tools()}["note"]
    said: list[Any] = [note.call(text=text) for text in ("a", "b")]
    assert said == ["saved as note 1", "saved as note 2"]


def test_in_a_pipe_only_answers_are_printed(real_server: Served) -> None:
    asked = "what is 12 plus 30?\nHello!\n"
    chat = command(real_server.base_url, has_tools=True, thinks=True)
    done = subprocess.run(chat, input=asked, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "42" in first
    assert second
    assert "tool_call" not in done.stdout
    assert "think" not in done.stdout


def test_in_a_terminal_calls_and_thoughts_are_shown(real_server: Served) -> None:
    terminal = Terminal(real_server.base_url, has_tools=True, thinks=True)
    shown = COLOURS.sub("", terminal.ask("what is 12 plus 30?"))
    assert "thought: " in shown
    assert 'calculator {"expression": "12 + 30"} → 42' in " ".join(shown.split())
    assert terminal.leave(CTRL_D) == 0
