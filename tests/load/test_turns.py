"""`penstock bench turns`: a real server, which all tests share, asked with few tokens."""

from __future__ import annotations

import contextlib
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.bench import turns
from penstock.load.bench.turns import TurnTimes, markdown, ratio
from penstock.load.launch import Started

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings

SMALL = ("--conversations", "3", "--turns", "2", "--prefix-len", "100", "--input-len", "12",
         "--output-len", "8")  # fmt: skip


def parse(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    turns.add_arguments(parser)
    parsed: Namespace = parser.parse_args(arguments)
    return parsed


def measured(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The figures of a run without faults, by turn."""
    assert turns.run(parse(*SMALL, "--out", str(out), *arguments)) == 0
    figures = json.loads((out / "turns.json").read_text())
    first, last, alone = figures["turns"]
    assert figures["ratio"] > 0.0
    assert [len(turn["ttft_ms"]) for turn in (first, last, alone)] == [3, 3, 3]
    assert min(first["ttft_ms"] + last["ttft_ms"] + alone["ttft_ms"]) > 0.0
    return {turn["name"]: turn for turn in figures["turns"]}


@pytest.mark.parametrize("is_own", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_past_is_cached_and_the_rest_is_asked_alone(
    demo: Started,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_own: bool,
) -> None:
    """Once for each server: the warm-up would be found there."""
    if is_own:
        figures = measured(tmp_path, "--endpoint", "chat")
    else:
        monkeypatch.setattr(turns, "server", lambda *_: contextlib.nullcontext(demo))
        by_id = ("--endpoint", "responses", "--history", "previous_response_id")
        figures = measured(tmp_path, *by_id)
    first, last, alone = (figures[name] for name in ("turn 1", "turn 2", "new tokens alone"))
    # The system prompt is new once; the warm-up's is another.
    assert min(first["prompt_tokens"]) > 100
    assert first["new_tokens"][0] > 100 > 30 > max(first["new_tokens"][1:])
    assert min(last["prompt_tokens"]) > 130
    for with_past, without in zip(last["new_tokens"], alone["new_tokens"], strict=True):
        assert 12 < with_past < 30
        assert abs(without - with_past) <= 3
    printed = capsys.readouterr().out
    assert printed.startswith("demo, ")
    assert sum(line.startswith("| ") for line in printed.splitlines()) == 2 + 3
    assert "turn 2 takes " in printed
    written = (tmp_path / "turns.md").read_text().splitlines()
    assert {line for line in printed.splitlines() if line.startswith("|")} <= set(written)


def test_another_server_need_not_say_what_it_cached(
    server: SyntheticServer, tmp_path: Path
) -> None:
    short = ("--prefix-len", "20", "--input-len", "4", "--output-len", "4")
    figures = measured(tmp_path, "--base-url", server.base_url, *short)
    for turn in figures.values():
        assert turn["new_tokens"] == turn["prompt_tokens"]


def test_a_fault_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(SyntheticSettings(max_model_len=125)) as short:
        at = ("--base-url", short.base_url)
        assert turns.run(parse(*SMALL, *at, "--out", str(tmp_path / "none"))) == 1
    assert "turn 2 was refused: " in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_the_ratio_is_of_neighbours() -> None:
    def times(name: str, *ttft_ms: float) -> TurnTimes:
        return TurnTimes(
            name=name, prompt_tokens=[700] * 3, new_tokens=[40] * 3, ttft_ms=list(ttft_ms)
        )

    found = [times("turn 1", 9, 9, 9), times("turn 2", 12, 30, 11), times("alone", 10, 20, 10)]
    assert ratio(found) == pytest.approx(1.2)  # of 1.2, 1.5 and 1.1
    text = markdown(found)
    assert "turn 2 takes 1.20 times as long as its new tokens alone (bar: at most 1.2)" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["turn 2", "700", "40", "12.0", "11.0–30.0"] in cells


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--turns", "1"), "--turns must be at least 2"),
        (("--input-len", "0"), "all lengths must be at least 1"),
        (("--conversations", "0"), "--conversations and"),
        (("--history", "previous_response_id"), "needs --endpoint responses"),
        (("--base-url", "http://127.0.0.1:1"), "no server at"),
    ],
)
def test_settings_without_sense_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        turns.run(parse(*arguments, "--out", str(tmp_path)))
