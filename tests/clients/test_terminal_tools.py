"""`penstock chat --tools --think`: what the tools compute, and a conversation in which they run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from penstock.clients.command_line import main
from penstock.clients.python.responses_socket import ResponsesSocket
from penstock.clients.python.terminal_tools import calculator, local_tools

from ..system.processes import Served
from .terminal import COLOURS, CTRL_D, Piped, Terminal


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


def test_the_options_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["chat", "--help"])
    assert {"--tools", "--think"} <= set(capsys.readouterr().out.split())


def test_the_notes_are_counted() -> None:
    note = {tool.name: tool for tool in local_tools()}["note"]
    said: list[Any] = [note.call(text=text) for text in ("a", "b")]
    assert said == ["saved as note 1", "saved as note 2"]


def test_in_a_pipe_only_answers_are_printed(demo_server: Served) -> None:
    asked = ["what is 12 plus 30?", "Hello!"]
    done = Piped(asked, demo_server.base_url, has_tools=True, thinks=True)
    assert (done.exit_code, done.complaints) == (0, "")
    first, second = done.output.splitlines()
    assert "42" in first
    assert second
    assert "tool_call" not in done.output
    assert "think" not in done.output


def test_whether_to_think_is_always_said(demo_server: Served) -> None:
    """Some models think unless they are told not to."""
    stream = ResponsesSocket._stream
    sent = mock.patch.object(ResponsesSocket, "_stream", autospec=True, side_effect=stream)
    for thinks, effort in ((False, "none"), (True, "low")):
        with sent as spy:
            done = Piped(["Hello!"], demo_server.base_url, thinks=thinks)
        assert done.exit_code == 0
        assert spy.call_args.args[1]["reasoning"] == {"effort": effort}


def test_in_a_terminal_calls_and_thoughts_are_shown(demo_server: Served) -> None:
    with Terminal(demo_server.base_url, "has_tools", "thinks") as terminal:
        shown = COLOURS.sub("", terminal.ask("what is 12 plus 30?"))
        assert "thought: " in shown
        assert 'calculator {"expression": "12 + 30"} → 42' in " ".join(shown.split())
        assert terminal.leave(CTRL_D) == 0
