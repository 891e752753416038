"""The `penstock` command. `chat` needs this distribution alone. The others are the server's, which
names them as entry points (`penstock.commands`) and reads their options itself.

Nothing is imported before it is needed: `--help` needs no HTTP client, and `serve` keeps none in
memory.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

COMMANDS = {
    "serve": "start a server",
    "engine": "start an engine for gateways on other machines",
    "status": "show a server's engines",
    "chat": "chat with a server in the terminal",
    "models": "list the models here, or say whether and how one would run",
    "data": "show, delete, export or import the chats on this machine",
    "keys": "make, list and revoke API keys, and set limits",
    "bench": "measure parts of penstock on this machine",
}
_MAX_CHARS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """The `penstock` command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            if given and given[0] in COMMANDS and given[0] != "chat":
                return _run_of_the_server(given)
            return _chat(_parser().parse_args(given))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_of_the_server(given: list[str]) -> int:
    """A command of penstock-llm, if that is installed."""
    from importlib import metadata  # its import takes longer than all else here

    for command in metadata.entry_points(group="penstock.commands", name=given[0]):
        return int(command.load()(given))
    print(
        f"penstock: error: {given[0]} needs the server, penstock-llm: "
        "pip install -c constraints.txt . in a checkout of penstock",
        file=sys.stderr,
    )
    return 2


def _chat(parsed: argparse.Namespace) -> int:
    from .python import terminal_chat

    key = parsed.api_key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0].strip() or None
    return terminal_chat.run(
        parsed.base_url,
        api_key=key,
        model=parsed.model,
        has_tools=parsed.tools,
        thinks=parsed.think,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        description="An LLM serving system.",
        epilog="All but chat come with the server, penstock-llm.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    added = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    chat = added["chat"]
    chat.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000",
                      help="default: %(default)s")  # fmt: skip
    chat.add_argument("--api-key", metavar="TEXT", help="default: the first in PENSTOCK_API_KEY")
    chat.add_argument("--model", metavar="NAME", help="default: the server's first")
    chat.add_argument(
        "--tools",
        action="store_true",
        help="let the model call a calculator, a clock and a note keeper",
    )
    chat.add_argument("--think", action="store_true", help="ask it to think before it answers")
    return parser


class _Version(argparse.Action):
    """Prints the version and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit()


def _version() -> str:
    """The server's, or without one the client's."""
    from importlib import metadata

    try:
        return f"penstock {metadata.version('penstock-llm')}"
    except metadata.PackageNotFoundError:
        return f"penstock-client {metadata.version('penstock-client')}"


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the nearest option or command, as those of the server do.
    Options are written out, with hyphens or with underscores."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(list(map(_hyphenated, args)), namespace)
        options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if options:
            names = (name for name in self._option_string_actions if name.startswith("--"))
            self.error(f"unknown option {options[0]}{_nearest(options[0], names)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        if text.endswith("required: COMMAND"):
            *names, last = COMMANDS
            text = f"give a command: {', '.join(names)} or {last}"
        elif wrong := re.match(r"argument COMMAND: invalid choice: '([^']*)'", text):
            text = f"unknown command {wrong[1]!r}{_nearest(wrong[1], COMMANDS)}"
        elif wrong := re.fullmatch(r"argument (\S+): ignored explicit argument (.*)", text):
            text = f"{wrong[1]} takes no value, but got {wrong[2]}"
        text = text.removeprefix("argument ")
        if len(text) > _MAX_CHARS:
            text = f"{text[:_MAX_CHARS]} …"
        self.exit(2, f"{self.prog}: error: {text}; see {self.prog} --help\n")


def _hyphenated(argument: str) -> str:
    """`--base_url=a_b` → `--base-url=a_b`"""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _nearest(name: str, names: Iterable[str]) -> str:
    """A question about the most similar name, if there is one."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
