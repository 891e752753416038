"""The subcommands of `penstock bench`: modules that distributions name as entry points
(`penstock.benches`).

Each has `add_arguments(parser)` and `run(args) -> int`, and is imported only when asked for, since
some load torch. Its docstring begins with its command, a colon, and a sentence for the help.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.gateway.launch.arguments import OneLineParser

GROUP = "penstock.benches"
_SENTENCE = re.compile(r'"""`[^`]+`: ((?:[^.]|\.\S)+)\.')


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per bench to a parser; without a subcommand it prints its help."""

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    benches = parser.add_subparsers(metavar="BENCH", parser_class=_BenchParser)
    for name, module in find_benches().items():
        text = _described(module)
        benches.add_parser(name, module=module, help=text, description=f"{text}.")


def find_benches() -> dict[str, str]:
    """The modules of all installed benches by their names. A wheel has some of a checkout's."""
    found = {point.name: point.value for point in metadata.entry_points(group=GROUP)}
    return {name: found[name] for name in sorted(found) if _source(found[name]) is not None}


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # nor is its package there
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _described(module: str) -> str:
    source = _source(module)
    found = _SENTENCE.match(source.read_text("utf-8")) if source is not None else None
    return " ".join(found[1].split()) if found else ""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)


class _BenchParser(OneLineParser):
    """Adds its arguments from its module when it parses."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **settings)
        self._module = module

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        bench = self._import()
        bench.add_arguments(self)
        self.set_defaults(run=bench.run)
        return super().parse_known_args(args, namespace)

    def _import(self) -> Any:
        try:
            return importlib.import_module(self._module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("penstock"):
                raise
            self.exit(2, f"{self.prog} needs {error.name}: pip install 'penstock-llm[bench]'\n")
