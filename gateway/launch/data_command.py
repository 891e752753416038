"""`penstock data`: where chats are kept, how much that is, and how to take them out and in.

    path      prints the folder
    stats     counts what is in it, for each tenant
    clear     deletes everything in it
    export    writes conversations as lines of JSON (`storage.conversations.json_lines`)
    import    stores such lines; a conversation that is there stays as it is

`stats` and `export` read beside a running server; `clear` and `import` need its folder for
themselves. With `--redis-url`, `export` and `import` are about the conversations in Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from penstock.engine.errors import ConfigError
from penstock.gateway.launch.arguments import OneLineParser
from penstock.gateway.storage import data_dir

if TYPE_CHECKING:
    from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
    from penstock.gateway.storage.conversations.store import ConversationStore

_VARIABLE = "PENSTOCK_DATA_DIR"


def main(arguments: Sequence[str] | None = None) -> int:
    """A command with its options, `data` the first; its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="penstock")
    text = "Show, delete, export or import the chats that servers keep on this machine's disk."
    data = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "data", description=text
    )
    actions = data.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("path", _path, "print the folder"),
        ("stats", _stats, "count what is in it"),
        ("clear", _clear, "delete everything in it"),
        ("export", _export, "write conversations as lines of JSON"),
        ("import", _import, "read such lines; what is there stays as it is"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument(
            "--data-dir", metavar="FOLDER", default=os.environ.get(_VARIABLE),
            help=f"default: {_VARIABLE}, or the user's own folder for data",
        )  # fmt: skip
        action.set_defaults(run=run)
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="do not ask")
        if name in ("export", "import"):
            action.add_argument("--redis-url", metavar="URL", help="of conversations in Redis")
            action.add_argument("file", nargs="?", default="-", metavar="FILE",
                                help="default: -, the standard input or output")  # fmt: skip
    return parser


def _folder(parsed: argparse.Namespace) -> Path:
    """Raises: ConfigError: there is none."""
    if parsed.data_dir == data_dir.NOWHERE:
        raise ConfigError(f"{_VARIABLE} is {data_dir.NOWHERE}: chats are kept in memory")
    try:
        return data_dir.folder(parsed.data_dir)
    except data_dir.DataDirError as error:
        raise ConfigError(f"--data-dir: {error}") from error


def _path(parsed: argparse.Namespace) -> int:
    print(_folder(parsed))
    return 0


# -- on disk ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, beside a server that may have the folder.

    Raises:
        ConfigError: there is no database, or it cannot be read.
    """
    from penstock.gateway.storage.disk import FILE_NAME

    path = folder / FILE_NAME
    if not path.exists():
        raise ConfigError(f"there are no chats in {folder}")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as reader:
            reader.execute("BEGIN")  # all of it as it is at one moment
            yield reader
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _stats(parsed: argparse.Namespace) -> int:
    folder = _folder(parsed)
    with _reading(folder) as reader:
        found = reader.execute(
            "SELECT tenants.name, count(*), sum(is_listed), sum(num_bytes), "
            "(SELECT count(*) FROM turns JOIN conversations AS own ON own.id = conversation "
            " WHERE own.tenant = tenants.id), num_dropped "
            "FROM tenants JOIN conversations ON tenant = tenants.id GROUP BY tenants.id "
            "ORDER BY tenants.name"
        ).fetchall()
        (num_responses,) = reader.execute("SELECT count(*) FROM log_ended").fetchone()
    print(f"{folder}: {_size(sum(_sizes(folder)))}")
    for tenant, number, num_listed, num_bytes, num_turns, num_dropped in found:
        print(
            f"  tenant {tenant}: conversations {num_listed}, chains of responses "
            f"{number - num_listed}, turns {num_turns}, {_size(num_bytes)}, "
            f"dropped to make room {num_dropped}"
        )
    print(f"  ended responses that can be streamed again: {num_responses}")
    return 0


def _sizes(folder: Path) -> Iterator[int]:
    """Of its files; a server may delete some meanwhile."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path.stat().st_size


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def _clear(parsed: argparse.Namespace) -> int:
    folder = _folder(parsed)
    if not folder.is_dir():
        raise ConfigError(f"there are no chats in {folder}")
    if not parsed.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"penstock data clear needs --yes to delete all chats in {folder}")
        if input(f"Delete all chats in {folder}? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    from penstock.gateway.storage.disk import FILE_NAME
    from penstock.gateway.storage.response_log.journal_files import FOLDER

    with _own(parsed):
        for path in folder.glob(f"{FILE_NAME}*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / FOLDER)
    return 0


@contextlib.contextmanager
def _own(parsed: argparse.Namespace) -> Iterator[data_dir.DataDir]:
    """The folder, while no server has it. Raises: ConfigError: one has, or it cannot be written."""
    try:
        folder = data_dir.claim(str(_folder(parsed)))
    except data_dir.DataDirError as error:
        raise ConfigError(f"--data-dir: {error}; penstock data needs it for itself") from error
    try:
        yield folder
    finally:
        folder.release()


# -- export and import -----------------------------------------------------------------------


def _export(parsed: argparse.Namespace) -> int:
    number = 0
    with _opened(parsed.file, "wb") as file:
        if parsed.redis_url is None:
            for line in _lines_on_disk(_folder(parsed)):
                file.write(line)
                number += 1
        else:
            number = asyncio.run(_export_redis(parsed.redis_url, file))
    print(f"exported {number} conversations", file=sys.stderr)
    return 0


def _lines_on_disk(folder: Path) -> Iterator[bytes]:
    from penstock.gateway.storage.conversations import disk_rows
    from penstock.gateway.storage.conversations.json_lines import line_of

    with _reading(folder) as reader:
        for tenant, conversation_id, _ in disk_rows.all_by_use(reader):
            row = disk_rows.load(reader, tenant, conversation_id, leases={})
            turns = [disk_rows.turn(reader, row, each.turn_id) for each in row.tree.summaries(0)]
            yield line_of(row.tree.conversation(0), turns)


async def _export_redis(url: str, file: IO[bytes]) -> int:
    from penstock.gateway.errors import RequestRefusedError
    from penstock.gateway.storage.conversations.json_lines import line_of

    number = 0
    async with _redis(url) as store:
        async for tenant, conversation_id in store.all():
            try:
                conversation = await store.get(tenant, conversation_id)
                tree = await store.tree(tenant, conversation_id)
                turns = [await store.turn(tenant, each.turn_id) for each in tree]
            except RequestRefusedError as error:  # deleted meanwhile, or not ours
                print(f"penstock: {conversation_id} is left out: {error}", file=sys.stderr)
                continue
            file.write(line_of(conversation, turns))
            number += 1
    return number


def _import(parsed: argparse.Namespace) -> int:
    with _opened(parsed.file, "rb") as file:
        if parsed.redis_url is None:
            with _own(parsed) as folder:
                return asyncio.run(_import_into_disk(folder.path, file))
        return asyncio.run(_import_into_redis(parsed.redis_url, file))


async def _import_into_disk(folder: Path, file: IO[bytes]) -> int:
    from penstock.gateway.shared_state import migrations
    from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
    from penstock.gateway.storage.disk import Disk, DiskError, NewerSchemaError

    disk = Disk(folder, migrations())
    try:
        disk.open()
    except (DiskError, NewerSchemaError) as error:
        raise ConfigError(f"{folder}: {error}") from error
    disk.start()
    store = DiskConversationStore(disk)
    await store.start()
    try:
        return await _stored(store, file)
    finally:
        await store.close()
        await disk.close()


async def _import_into_redis(url: str, file: IO[bytes]) -> int:
    async with _redis(url) as store:
        return await _stored(store, file)


async def _stored(store: ConversationStore, file: IO[bytes]) -> int:
    """Raises: ConfigError: a line cannot be stored; those before it are."""
    from penstock.gateway.errors import RequestRefusedError
    from penstock.gateway.storage.conversations.json_lines import LineError, read_line, restore

    num_new = number = 0
    for number, line in enumerate(file, 1):
        try:
            num_new += await restore(store, *read_line(line))
        except (LineError, RequestRefusedError) as error:
            raise ConfigError(f"line {number}: {error}; {num_new} were imported") from error
    print(f"imported {num_new} conversations; {number - num_new} were there", file=sys.stderr)
    return 0


@contextlib.asynccontextmanager
async def _redis(url: str) -> AsyncIterator[RedisConversationStore]:
    """The conversations in Redis. Raises: ConfigError: they cannot be read."""
    from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
    from penstock.gateway.storage.conversations.store import StoreUnavailableError
    from penstock.gateway.storage.redis.link import RedisLink
    from penstock.gateway.storage.redis.url import RedisAddress

    link = RedisLink(RedisAddress.parse(url))
    try:
        yield RedisConversationStore(link)
    except StoreUnavailableError as error:
        raise ConfigError(f"--redis-url: {error}") from error
    finally:
        await link.aclose()


@contextlib.contextmanager
def _opened(name: str, mode: str) -> Iterator[IO[bytes]]:
    """A file, or the standard input or output. What is exported is for this user only."""
    if name == "-":
        yield sys.stdout.buffer if mode == "wb" else sys.stdin.buffer
        return
    try:
        with open(name, mode, opener=_private) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
