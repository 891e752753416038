"""`penstock keys`: the key file of `--api-keys-file`, without an editor.

    add       makes a key for a tenant, and prints it: this once, the file has only its digest
    list      prints the keys' ids, tenants and limits
    revoke    deletes a key
    limits    prints or sets what a tenant may do

A server reads the file again within a second. Keys that stand in it as they are become digests at
the first change; their ids stay. Comments stay, too. The file is replaced at once and as a whole,
and only by one that a server accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.gateway.auth.keys import digest_of, name_of, read_key_file
from penstock.gateway.launch.arguments import OneLineParser

_VARIABLE = "PENSTOCK_API_KEYS_FILE"
_PREFIX = "sk-penstock-"
_KEY_BYTES = 32
_NONE = "none"
_Values = MutableMapping[str, Any]


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# Options of `limits`. Each is a field of a tenant in the file, and checked as such.
_LIMITS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "--requests-per-minute": (_number, "requests in a minute"),
    "--tokens-per-minute": (_number, "tokens of prompts and output in a minute"),
    "--max-concurrent-requests": (int, "requests at once"),
    "--weight": (_number, "share of a busy server beside other tenants, of 1"),
    "--priority": (int, "of requests that name none"),
    "--min-priority": (int, "that a request may name"),
    "--max-priority": (int, "that a request may name"),
    "--adapters": (_names, "that it may use, with commas between them"),
    "--store-bytes": (int, "of conversations and responses that are kept"),
    "--store-objects": (int, "conversations and responses that are kept"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """A command with its options, `keys` the first; its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="penstock")
    text = "Make, list and revoke API keys, and set what tenants may do."
    keys = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "keys", description=text
    )
    actions = keys.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Any:
        added = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        added.add_argument(
            "--api-keys-file", metavar="FILE", default=os.environ.get(_VARIABLE),
            help=f"TOML, or JSON by its name; default: {_VARIABLE}",
        )  # fmt: skip
        added.set_defaults(run=run)
        return added

    add = action("add", _add, "make a key for a tenant, and print it")
    add.add_argument("tenant", metavar="TENANT", help="a new one has no limits")
    add.add_argument("--id", metavar="NAME", help="of the key in logs; default: made from it")
    add.add_argument("--admin", action="store_true", help="it may also do what operators do")
    action("list", _list, "print the keys' ids, tenants and limits")
    revoke = action("revoke", _revoke, "delete a key")
    revoke.add_argument("id", metavar="ID", help="of the key, as `penstock keys list` prints it")
    limits = action("limits", _set_limits, "print or set what a tenant may do")
    limits.add_argument("tenant", metavar="TENANT")
    for option, (_, text) in _LIMITS.items():
        limits.add_argument(option, metavar="N", help=f"{text}; {_NONE}: the default")
    return parser


def _add(parsed: argparse.Namespace) -> None:
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    digest = digest_of(key.encode())
    key_id = parsed.id or name_of(digest)
    with _changed(_path(parsed), may_be_new=True) as values:
        values.setdefault("tenants", {}).setdefault(parsed.tenant, {})
        table: dict[str, Any] = {"id": key_id, "sha256": digest.hex(), "tenant": parsed.tenant}
        if parsed.admin:
            table["admin"] = True
        values.setdefault("keys", _list_of_tables(values)).append(table)
    print(f"added {key_id}; the key is shown only now", file=sys.stderr)
    print(key)


def _list(parsed: argparse.Namespace) -> None:
    path = _path(parsed)
    callers = read_key_file(path).values()
    tenants = _read(path).get("tenants", {})
    for caller in sorted(callers, key=lambda each: (each.tenant, each.key_id)):
        marks = " admin" if caller.is_admin else ""
        print(f"{caller.key_id}  tenant {caller.tenant}{marks}{_limits_of(tenants, caller.tenant)}")


def _revoke(parsed: argparse.Namespace) -> None:
    with _changed(_path(parsed)) as values:
        tables = values.get("keys", [])
        found = [index for index, table in enumerate(tables) if _id_of(table) == parsed.id]
        if not found:
            raise ConfigError(f"there is no key with the id {parsed.id!r}")
        del tables[found[0]]
    print(f"revoked {parsed.id}", file=sys.stderr)


def _set_limits(parsed: argparse.Namespace) -> None:
    given = {option: getattr(parsed, _field(option)) for option in _LIMITS}
    given = {option: text for option, text in given.items() if text is not None}
    path = _path(parsed)
    if given:
        with _changed(path) as values:
            table = _tenant(values, parsed.tenant)
            for option, text in given.items():
                if text == _NONE:
                    table.pop(_field(option), None)
                else:
                    table[_field(option)] = _read_limit(option, text)
    else:
        read_key_file(path)
    values = _read(path)
    _tenant(values, parsed.tenant)
    print(f"tenant {parsed.tenant}{_limits_of(values['tenants'], parsed.tenant)}")


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _read_limit(option: str, text: str) -> Any:
    read, _ = _LIMITS[option]
    try:
        return read(text)
    except (ValueError, OverflowError):
        kind = "whole number" if read is int else "number"
        raise ConfigError(f"{option} must be a {kind}, or {_NONE}") from None


def _tenant(values: _Values, name: str) -> _Values:
    tenants = values.get("tenants", {})
    if name not in tenants:
        raise ConfigError(f"there is no tenant {name!r} in the file")
    table: _Values = tenants[name]
    return table


def _limits_of(tenants: Mapping[str, Any], tenant: str) -> str:
    table = tenants.get(tenant, {})
    fields = map(_field, _LIMITS)
    return "".join(f"  {name} {_text(table[name])}" for name in fields if name in table)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _id_of(table: Mapping[str, Any]) -> str:
    if "id" in table:
        return str(table["id"])
    return name_of(
        digest_of(table["key"].encode()) if "key" in table else bytes.fromhex(table["sha256"])
    )


# -- the file --------------------------------------------------------------------------------


def _path(parsed: argparse.Namespace) -> Path:
    if not parsed.api_keys_file:
        raise ConfigError(f"name the key file: --api-keys-file, or {_VARIABLE}")
    return Path(parsed.api_keys_file)


def _is_json(path: Path) -> bool:
    return path.suffix == ".json"


def _read(path: Path) -> _Values:
    import tomlkit  # no server needs it

    text = path.read_text(encoding="utf-8")
    values: _Values = json.loads(text) if _is_json(path) else tomlkit.parse(text)
    return values


def _list_of_tables(values: _Values) -> list[Any]:
    import tomlkit

    return tomlkit.aot() if isinstance(values, tomlkit.TOMLDocument) else []


@contextlib.contextmanager
def _changed(path: Path, *, may_be_new: bool = False) -> Iterator[_Values]:
    """The content, to be changed; at the end it is written.

    Raises:
        ConfigError: the file is invalid, or would be; then it stays as it was.
    """
    import tomlkit

    try:
        with _locked(path.parent):
            if may_be_new and not path.exists():
                values: _Values = {} if _is_json(path) else tomlkit.document()
            else:
                read_key_file(path)
                values = _read(path)
            for table in values.get("keys", []):
                _hide(table)
            yield values
            is_toml = isinstance(values, tomlkit.TOMLDocument)
            text = tomlkit.dumps(values) if is_toml else f"{json.dumps(values, indent=2)}\n"
            _replace(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from error


def _hide(table: _Values) -> None:
    """Put a key's digest in its place."""
    key = table.pop("key", None)
    if key is not None:
        table["sha256"] = digest_of(key.encode()).hex()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among those that change key files in a folder."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or not at all. Who may read it stays; a new one is for this user only."""
    target = path.resolve()
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=".", suffix=path.suffix, encoding="utf-8", delete=False
    ) as file:
        written = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            try:
                read_key_file(written)
            except ConfigError as error:
                raise ConfigError(re.sub(r"^the key file \S+: ", "", str(error))) from None
            if target.exists():
                before = target.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.getuid(), os.getgid()):
                    with contextlib.suppress(PermissionError):
                        os.fchown(file.fileno(), before.st_uid, before.st_gid)
            written.replace(target)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
