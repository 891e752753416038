"""`penstock data`."""

from __future__ import annotations

import asyncio
import io
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.gateway import shared_state
from penstock.gateway.launch.data_command import main
from penstock.gateway.storage import data_dir
from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
from penstock.gateway.storage.disk import Disk

from ...redis_server import RedisServer
from ..storage.conversations.making import TENANT, a_conversation, say


async def _fill(folder: Path) -> str:
    """A conversation of two turns, as a server stores it; its id."""
    taken = data_dir.claim(str(folder))
    disk = Disk(folder, shared_state.migrations())
    disk.open()
    disk.start()
    store = DiskConversationStore(disk)
    await store.start()
    conversation = a_conversation()
    await store.create(conversation)
    await say(store, conversation, await say(store, conversation))
    await store.close()
    await disk.close()
    taken.release()
    return conversation.conversation_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path / "data"))
    return tmp_path / "data"


def run(folder: Path, action: str, *options: str) -> int:
    return main(["data", action, "--data-dir", str(folder), *options])


def failed(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["data", *words]) == 2
    return capsys.readouterr().err


def test_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["data", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/penstock\n"
    monkeypatch.setenv("PENSTOCK_DATA_DIR", "/srv/chats")
    assert main(["data", "path"]) == 0
    assert capsys.readouterr().out == "/srv/chats\n"
    monkeypatch.setenv("PENSTOCK_DATA_DIR", "none")
    assert "kept in memory" in failed(["path"], capsys)


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "stats") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: ")
    assert f"  tenant {TENANT}: conversations 1, chains of responses 0, turns 2, " in out
    (folder / "journal").mkdir()
    (folder / "journal" / "1.log").write_bytes(bytes(8 << 20))  # of responses that run
    assert run(folder, "stats") == 0
    assert f"{folder}: 8." in capsys.readouterr().out


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert run(folder, "export", str(first)) == 0
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert run(tmp_path / "other", "import", str(first)) == 0
    assert run(tmp_path / "other", "import", str(first)) == 0  # what is there stays
    assert run(tmp_path / "other", "export", str(second)) == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().count(b"\n") == 1


def test_export_beside_a_server_that_has_the_folder(folder: Path, tmp_path: Path) -> None:
    taken = data_dir.claim(str(folder))
    assert run(folder, "export", str(tmp_path / "a.jsonl")) == 0
    assert (tmp_path / "a.jsonl").read_bytes()
    assert run(folder, "stats") == 0
    taken.release()


@pytest.mark.parametrize("words", [["clear", "--yes"], ["import", "/dev/null"]])
def test_what_changes_the_folder_waits_for_the_server_to_stop(
    folder: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = data_dir.claim(str(folder))
    error = failed([*words, "--data-dir", str(folder)], capsys)
    assert f"{folder} is used by another server" in error
    taken.release()


def test_clear_deletes_all_and_asks_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "penstock.db.damaged-20260101-000000").write_text("old")
    (folder / "journal").mkdir()
    (folder / "journal" / "1.log").write_text("what ran")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y"))
    assert "needs --yes" in failed(["clear", "--data-dir", str(folder)], capsys)
    assert run(folder, "clear", "--yes") == 0
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert "there are no chats" in failed(["stats", "--data-dir", str(folder)], capsys)


def test_a_wrong_line_is_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "a.jsonl"
    assert run(folder, "export", str(lines)) == 0
    lines.write_bytes(lines.read_bytes() + b'{"format": 9}\n')
    error = failed(["import", "--data-dir", str(tmp_path / "new"), str(lines)], capsys)
    assert "line 2: " in error
    assert "1 were imported" in error


def test_files_and_folders_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there are no chats" in failed(["export", "--data-dir", str(tmp_path)], capsys)
    missing = ["import", "--data-dir", str(tmp_path), str(tmp_path / "none")]
    assert "No such file" in failed(missing, capsys)
    nowhere = ["--redis-url", f"unix://{tmp_path}/none"]
    assert "--redis-url: " in failed(["export", *nowhere], capsys)


@pytest.mark.redis
def test_to_redis_and_back(folder: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert run(folder, "export", str(first)) == 0
    redis = ["--redis-url", redis_server.url]
    assert main(["data", "import", *redis, str(first)]) == 0
    assert main(["data", "export", *redis, str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
