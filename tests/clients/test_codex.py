"""OpenAI's Codex, unedited, reads a file through its shell tool, and writes ten lines, one in each
turn, with a compaction between them and deaths in the middle of turns.

The model has random weights; what it writes is what a grammar leaves it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..system.processes import Served
from .agents import CONTEXT, KILLED, VICTIMS, call, check_hits, killed, lines, scripted

pytestmark = [pytest.mark.node, pytest.mark.external]

COMPACTS_AT = 14_400  # tokens: after five turns of 1,250 each, and 9,700 before them
TRANSPORTS = ("sse", "websocket")
SAID = "I read the note."
EXAMPLE = Path(__file__).parents[2] / "clients" / "examples" / "codex.toml"
IN_EXAMPLE = ("Qwen/Qwen3-4B", "40960", "http://127.0.0.1:8000", "supports_websockets = true")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of each two requests, it answers the first with a call and the second with `SAID`."""
    texts = [call("exec_command", cmd="cat note.txt"), SAID]
    with scripted(tmp_path_factory.mktemp("codex"), texts * len(TRANSPORTS)) as served:
        yield served


def run(codex: Path, server: Served, folder: Path, config: str, prompt: str) -> str:
    """What Codex tells, one JSON object a line."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir(exist_ok=True)
    (home / "config.toml").write_text(config)
    asked = [codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    done = subprocess.run(
        [*asked, prompt],
        cwd=work,
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def config_of(server: Served, *, has_websockets: bool) -> str:
    config = EXAMPLE.read_text()
    websockets = f"supports_websockets = {json.dumps(has_websockets)}"
    for text, ours in zip(
        IN_EXAMPLE, ("tiny", str(CONTEXT), server.base_url, websockets), strict=True
    ):
        assert config.count(text) == 1
        config = config.replace(text, ours)
    return config


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_file_is_read(codex: Path, server: Served, tmp_path: Path, transport: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("The secret word is marzipan.\n")
    before = server.log.read_text()
    config = config_of(server, has_websockets=transport == "websocket")
    told = run(codex, server, tmp_path, config, "What does note.txt say?")
    log = server.log.read_text().removeprefix(before)
    assert ("WEBSOCKET /v1/responses" in log) == (transport == "websocket")
    events = [json.loads(line) for line in told.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [ran] = [item for item in items if item["type"] == "command_execution"]
    assert "marzipan" in ran["aggregated_output"]
    assert ran["exit_code"] == 0
    assert items[-1]["text"] == SAID
    assert events[-1]["type"] == "turn.completed"


def written(number: int, *, more: str = "", num_words: int = 0) -> str:
    command = f"echo {number} >> lines.txt{more}"
    return "Hm " * num_words + call("exec_command", cmd=command)


def turns(folder: Path) -> list[list[tuple[int, int]]]:
    """Of each turn, how many tokens its prompt has, and how many of them were cached; a list from
    each compaction to the next."""
    [file] = (folder / "home" / "sessions").rglob("*.jsonl")
    found: list[list[tuple[int, int]]] = [[]]
    for line in file.read_text().splitlines():
        event = json.loads(line)
        if event["type"] == "compacted":
            found.append([])
        elif event["payload"].get("type") == "token_count" and event["payload"]["info"]:
            used = event["payload"]["info"]["last_token_usage"]
            turn = (used["input_tokens"], used["cached_input_tokens"])
            if turn[0] and found[-1][-1:] != [turn]:  # told again where a stream broke off
                found[-1].append(turn)
    return found


def test_ten_turns_with_a_compaction(codex: Path, tmp_path: Path) -> None:
    """It asks the server for one where it takes it for OpenAI's."""
    early = [written(number, more="; seq 300") for number in range(5)]  # of 1,250 tokens each
    late = [written(number) for number in range(5, 10)]
    with scripted(tmp_path, [*early, "Lines are written.", *late, SAID]) as server:
        config = config_of(server, has_websockets=False).replace(
            '"penstock"\nbase', '"OpenAI"\nbase'
        )
        limit = f"model_auto_compact_token_limit = {COMPACTS_AT}\n"
        told = run(codex, server, tmp_path, limit + config, "Write ten lines.")
        assert lines(tmp_path) == [str(number) for number in range(10)]
        assert json.loads(told.splitlines()[-1])["type"] == "turn.completed"
        before, after = turns(tmp_path)
        assert (len(before), len(after)) == (5, 6)
        check_hits(before)
        check_hits(after)
        assert " 400 in" not in server.log.read_text()


@pytest.mark.process_kills
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_no_call_is_made_twice(codex: Path, tmp_path: Path, victim: str, transport: str) -> None:
    """Although engine or gateway are killed in the middle of turns."""
    texts = [written(n, num_words=500 if n in KILLED else 0) for n in range(10)]
    with scripted(tmp_path, [*texts, SAID]) as server:
        config = config_of(server, has_websockets=transport == "websocket")
        with killed(server, tmp_path, victim):
            told = run(codex, server, tmp_path, config, "Write ten lines.")
        assert lines(tmp_path) == [str(number) for number in range(10)]
        items = [json.loads(line).get("item", {}) for line in told.splitlines()]
        assert [item["text"] for item in items if item.get("text")][-1] == SAID
        [found] = turns(tmp_path)
        assert len(found) == 11
        check_hits(found, victim)
