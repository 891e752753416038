"""`penstock keys`: what it writes is what a server reads, and no key stays in the file."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from penstock.gateway.auth.keys import KeyRing, read_key_file
from penstock.gateway.launch.keys_command import main

OLD = """\
# Who may use the server.
[[keys]]
key = "sk-acme-1"  # of the laptop
tenant = "acme"

[tenants.acme]
weight = 2  # it pays twice
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(OLD)
    path.chmod(0o640)
    return path


def run(file: Path, *arguments: str) -> int:
    action, *rest = arguments
    return main(["keys", action, "--api-keys-file", str(file), *rest])


def add(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The new key."""
    capsys.readouterr()
    assert run(file, "add", *arguments) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["new.toml", "new.json"])
def test_a_key_of_a_new_file_lets_its_tenant_in_until_it_is_revoked(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    key = add(file, capsys, "acme", "--id", "laptop")
    other = add(file, capsys, "ops", "--admin")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    now_s = 0.0
    ring = KeyRing(file=file, clock=lambda: now_s)
    found = ring.find([key.encode()])
    assert found is not None
    assert (found.tenant, found.key_id, found.is_admin) == ("acme", "laptop", False)
    admin = ring.find([other.encode()])
    assert admin is not None
    assert admin.is_admin

    assert run(file, "limits", "acme", "--requests-per-minute", "60", "--adapters", "a,b") == 0
    assert run(file, "revoke", "laptop") == 0
    now_s += 2.0  # a running server looks again
    assert ring.find([key.encode()]) is None
    found = ring.find([other.encode()])
    assert found is not None
    assert found.tenant == "ops"


def test_an_old_file_keeps_its_comments_and_loses_its_plain_keys(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_key_file(file)
    key = add(file, capsys, "acme")
    text = file.read_text()
    assert "# Who may use the server." in text
    assert "# it pays twice" in text
    assert "sk-acme-1" not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    after = read_key_file(file)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    assert run(file, "list") == 0
    listed = capsys.readouterr().out
    assert key not in listed
    assert listed.count("tenant acme  weight 2") == 2


def test_limits_are_set_and_taken_away(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens-per-minute", "1000", "--max-concurrent-requests", "4", "--weight", "none"]
    assert run(file, "limits", "acme", *options) == 0
    (caller,) = read_key_file(file).values()
    assert caller.limits.tokens_per_minute == 1000
    assert caller.limits.max_concurrent_requests == 4
    assert caller.weight == 1
    expected = "tenant acme  tokens_per_minute 1000  max_concurrent_requests 4\n"
    assert capsys.readouterr().out == expected
    assert run(file, "limits", "acme") == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["add", "no/name"], "a tenant's name must be 1 to 64"),
        (["add", "acme", "--id", "no/name"], "key 2: id must be"),
        (["revoke", "nobody"], "there is no key with the id 'nobody'"),
        (["limits", "nobody"], "there is no tenant 'nobody' in the file"),
        (["limits", "acme", "--weight", "0"], "weight must be between 0.001 and 1000"),
        (["limits", "acme", "--weight", "much"], "--weight must be a number, or none"),
        (["limits", "acme", "--store-bytes", "1.5"], "--store-bytes must be a whole number, or"),
        (["limits", "acme", "--min-priority", "2"], "must be set together"),
        (["limits", "acme", "--requests-per-minute", "nan"], "requests_per_minute must be"),
    ],
)
def test_what_a_server_would_refuse_is_not_written(
    arguments: list[str], error: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, *arguments) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1
    assert file.read_text() == OLD
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_is_missing_or_no_key_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path / "none.toml", "list") == 2
    assert "cannot read the key file" in capsys.readouterr().err
    assert run(tmp_path / "no" / "folder.toml", "add", "acme") == 2
    assert "cannot write the key file" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"keys": [{"key": "sk-secret"}]}))
    assert run(broken, "add", "acme") == 2
    err = capsys.readouterr().err
    assert "key 1: tenant must be" in err
    assert "sk-secret" not in err
    monkeypatch.delenv("PENSTOCK_API_KEYS_FILE", raising=False)
    assert main(["keys", "list"]) == 2
    assert "name the key file" in capsys.readouterr().err
