"""Anthropic's Claude Code, unedited, writes ten lines through its shell tool, one in each turn.

The model has random weights; what it writes is what a grammar leaves it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..system.processes import Served, serve, wait_until
from . import scripted_server
from .test_codex import call, tiny_model

pytestmark = [pytest.mark.external]

SAID = "All lines are written."
SUMMARY = "<summary>Lines are written to lines.txt.</summary>"
KILLED = (2, 6)  # turns, which take long enough
RUNNING = "penstock:num_requests_running"


def thought(text: str, *, num_words: int = 1) -> str:
    return f"{'Hm ' * num_words}</think>\n\n{text}"


def written(number: int, *, num_words: int = 1) -> str:
    command = f"echo {number} >> lines.txt"
    return thought(call("Bash", command=command, description="Write a line"), num_words=num_words)


@contextmanager
def scripted(folder: Path, texts: Sequence[str]) -> Iterator[Served]:
    """A server that answers its prompts with these texts."""
    (folder / "grammars.json").write_text(json.dumps([f"start: {json.dumps(t)}" for t in texts]))
    command = (
        *("env", f"{scripted_server.FILE}={folder / 'grammars.json'}"),
        *(sys.executable, "-m", scripted_server.__name__),
    )
    model = (str(tiny_model(folder / "model")), "--served-model-name", "tiny")
    with serve(*model, log=folder / "log", command=command) as served:
        yield served


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


def lines(folder: Path) -> list[str]:
    file = folder / "work" / "lines.txt"
    return file.read_text().split() if file.exists() else []


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


def check_hits(found: Sequence[tuple[int, int]]) -> None:
    """From the second turn on, the previous prompt was cached."""
    for (before, _), (num_tokens, num_cached) in itertools.pairwise(found):
        assert num_tokens > before
        assert num_cached >= 0.98 * before


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
@pytest.mark.parametrize("victim", ["engine", "gateway"])
def test_no_call_is_made_twice(claude_code: Path, tmp_path: Path, victim: str) -> None:
    """Although engine or gateway are killed in the middle of turns."""
    texts = [written(n, num_words=500 if n in KILLED else 1) for n in range(10)]
    with scripted(tmp_path, [*texts, thought(SAID)]) as server:
        killer = threading.Thread(target=_kill, args=(server, tmp_path, victim))
        killer.start()
        events = run(claude_code, server, tmp_path, "-p", "Write ten lines.")
        killer.join()
        assert lines(tmp_path) == [str(number) for number in range(10)]
        assert events[-1]["result"] == SAID
        assert server.log.read_text().count(f"the {victim} died") == 2


def _kill(server: Served, folder: Path, victim: str) -> None:
    for number in KILLED:
        wait_until(lambda number=number: len(lines(folder)) == number and _is_busy(server))
        server.renew_family()
        server.child(f"penstock-{victim}").kill()


def _is_busy(server: Served) -> bool:
    try:
        metrics = httpx.get(f"{server.base_url}/metrics").text
    except httpx.HTTPError:
        return False
    values = [line.split()[-1] for line in metrics.splitlines() if line.startswith(RUNNING)]
    return any(float(value) > 0 for value in values)
