"""Anthropic's Claude Code, unedited, writes ten lines through its shell tool, one in each turn.

The model has random weights; what it writes is what a grammar leaves it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..system.processes import Served
from .agents import KILLED, VICTIMS, call, check_hits, killed, lines, scripted

pytestmark = [pytest.mark.external]

SAID = "All lines are written."
SUMMARY = "<summary>Lines are written to lines.txt.</summary>"


def thought(text: str, *, num_words: int = 1) -> str:
    return f"{'Hm ' * num_words}</think>\n\n{text}"


def written(number: int, *, num_words: int = 1) -> str:
    command = f"echo {number} >> lines.txt"
    return thought(call("Bash", command=command, description="Write a line"), num_words=num_words)


def run(program: Path, server: Served, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What Claude Code tells of its messages."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    own = {
        "ANTHROPIC_BASE_URL": server.base_url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CONFIG_DIR": str(folder / "home"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    told = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Bash")
    done = subprocess.run(
        [program, *arguments, *told],
        cwd=work,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def prompts(events: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each message: how many tokens its prompt has, and how many of them were cached."""
    found: dict[str, tuple[int, int]] = {}
    for event in events:
        if event["type"] == "assistant":
            usage = event["message"]["usage"]
            parts = [
                usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_")
            ]
            found[event["message"]["id"]] = sum(parts), parts[2]
    return list(found.values())


def test_ten_turns_of_prompts_that_only_grow(claude_code: Path, tmp_path: Path) -> None:
    """With a compaction between them."""
    early = [*map(written, range(5)), thought(SAID)]
    late = [*map(written, range(5, 10)), thought(SAID)]
    with scripted(tmp_path, [*early, thought(SUMMARY), *late]) as server:
        events = run(claude_code, server, tmp_path, "-p", "Write five lines.")
        assert lines(tmp_path) == [str(number) for number in range(5)]
        assert events[-1]["result"] == SAID
        assert len(prompts(events)) == 6
        check_hits(prompts(events))
        run(claude_code, server, tmp_path, "-c", "-p", "/compact")
        events = run(claude_code, server, tmp_path, "-c", "-p", "Write five more.")
        assert lines(tmp_path) == [str(number) for number in range(10)]
        assert events[-1]["result"] == SAID
        check_hits(prompts(events))
        assert " 400 in" not in server.log.read_text()


@pytest.mark.process_kills
@pytest.mark.parametrize("victim", VICTIMS)
def test_no_call_is_made_twice(claude_code: Path, tmp_path: Path, victim: str) -> None:
    """Although engine or gateway are killed in the middle of turns."""
    texts = [written(n, num_words=500 if n in KILLED else 1) for n in range(10)]
    with scripted(tmp_path, [*texts, thought(SAID)]) as server:
        with killed(server, tmp_path, victim):
            events = run(claude_code, server, tmp_path, "-p", "Write ten lines.")
        assert lines(tmp_path) == [str(number) for number in range(10)]
        assert events[-1]["result"] == SAID
        assert len(prompts(events)) == 11
        check_hits(prompts(events), victim)
