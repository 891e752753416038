"""The folder of chats: whose it is, and what happens where it cannot be used."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.errors import ConfigError
from penstock.gateway import shared_state
from penstock.gateway.config import GatewayConfig
from penstock.gateway.storage import data_dir
from penstock.gateway.storage.data_dir import DataDir, DataDirError, claim, default_folder
from penstock.gateway.storage.disk import Disk


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has set nothing."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def claimed(home: Path) -> Iterator[DataDir]:
    found = claim(None)
    yield found
    found.release()


def place_of(**settings: object) -> str:
    """Where chats are kept with these settings."""
    config = GatewayConfig(engine_address="unused", **{"data_dir": None, **settings})
    return shared_state.shared_state(config).place


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.local/share/penstock"),
        ({"HOME": "/home/me", "XDG_DATA_HOME": "/data"}, "/data/penstock"),
        ({"HOME": "/home/me", "XDG_DATA_HOME": "data"}, "/home/me/.local/share/penstock"),
        ({"HOME": "/home/me", "XDG_DATA_HOME": ""}, "/home/me/.local/share/penstock"),
        ({"XDG_DATA_HOME": "/data"}, "/data/penstock"),
    ],
)
def test_it_is_the_users_own(environment: dict[str, str], folder: str) -> None:
    assert default_folder(environment) == Path(folder)


def test_it_is_private(claimed: DataDir, home: Path) -> None:
    assert claimed.path == home / ".local/share/penstock"
    assert stat.S_IMODE(claimed.path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(each.stat().st_mode) for each in claimed.path.iterdir()] == [0o600]


def test_one_server_has_it_until_it_ends(claimed: DataDir) -> None:
    for asked in (None, str(claimed.path)):
        with pytest.raises(DataDirError, match="is used by another server"):
            claim(asked)
    claimed.release()
    claim(None).release()


def test_a_folder_that_the_user_has_made_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    claim(str(tmp_path)).release()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_where_it_is_taken_chats_are_in_memory(claimed: DataDir) -> None:
    assert place_of() == (
        f"in memory, until the server stops, because {claimed.path} is used by another server"
    )
    with pytest.raises(ConfigError, match=r"--data-dir: .* is used by another server"):
        place_of(data_dir=str(claimed.path))


def test_where_nothing_can_be_written_chats_are_in_memory(home: Path) -> None:
    (home / ".local").write_text("no folder")
    assert "cannot be written" in place_of()
    with pytest.raises(ConfigError, match="cannot be written"):
        place_of(data_dir=str(home / ".local" / "chats"))


def test_without_a_home_chats_are_in_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert place_of().endswith("because HOME is not set")


def test_a_network_file_system_is_not_used_unasked(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_dir, "file_system", lambda _: "nfs4")
    assert "is on a network file system (nfs4)" in place_of()
    with caplog.at_level(logging.WARNING):
        claim(str(home / "chats")).release()
    assert "network file system (nfs4): chats may be lost" in caplog.text
    claim(str(home / ".local/share/penstock")).release()  # it was not left locked


def test_a_file_system_is_found_by_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 27 0:99999 / /proc rw - proc proc rw\n"
        f"31 1 {device >> 8}:{device & 0xFF} / / rw,relatime shared:1 - fuse.sshfs me@host: rw\n"
    )
    assert data_dir.file_system(tmp_path, mounts) in ("fuse.sshfs", "")
    assert data_dir.file_system(tmp_path, tmp_path / "none") == ""


def test_a_later_version_keeps_its_folder(home: Path) -> None:
    later = claim(None)
    disk = Disk(later.path, ["CREATE TABLE a (b)"] * 1 + ["SELECT 1"] * 99)
    disk.open()
    later.release()
    assert "was written by a later version of penstock" in place_of()
    with pytest.raises(ConfigError, match="later version"):
        place_of(data_dir=str(later.path))
    claim(None).release()


def test_who_asks_for_memory_gets_it(home: Path) -> None:
    for settings in ({"data_dir": "none"}, {"num_workers": 2}):
        assert place_of(**settings) == "in memory, until the server stops"
    assert list(home.iterdir()) == []
