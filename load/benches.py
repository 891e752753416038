"""The subcommands of `penstock bench`.

Each is a module of this package with `add_arguments(parser)` and `run(args) -> int`, imported only
when it is asked for: some load torch. Only the standard library is used here, since the command
line imports it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

# The name users type: its module, and what it shows.
BENCHES: dict[str, tuple[str, str]] = {
    "serve": (
        "penstock.load.serve_bench",
        "a running server: latencies, throughput and every stream's integrity, over SSE or "
        "WebSocket",
    ),
    "sweep": (
        "penstock.load.sweep_bench",
        "running servers, up to saturation: throughput and latency by concurrency or rate",
    ),
    "engine": (
        "penstock.load.engine.bench",
        "the engine alone: tokens per second, and where a step's time goes",
    ),
    "kernels": (
        "penstock.load.kernels.bench",
        "the kernels alone: their time against what the machine can do, and against torch",
    ),
    "quantization": (
        "penstock.load.quantization.bench",
        "int8 weights: how far logits move, and tokens per second, beside the model's own dtype",
    ),
    "startup": (
        "penstock.load.startup.bench",
        "a server's start: seconds to ready and to a first token, memory of each process",
    ),
    "turns": (
        "penstock.load.turns",
        "conversations: time to the first token of a later turn, and of its new tokens alone",
    ),
    "soak": (
        "penstock.load.soak.soak_bench",
        "minutes of mixed and hostile traffic: every stream right, nothing leaked",
    ),
    "kv": (
        "penstock.load.kv.bench",
        "KV memory: waste and sequences held by paged and by contiguous allocation",
    ),
    "policy": (
        "penstock.load.policy_cost",
        "the scheduler: milliseconds of planning per step, by sequences and pool size",
    ),
    "fairness": (
        "penstock.load.fairness",
        "admission: one tenant's time to first token, alone and beside another's flood",
    ),
    "gateway": (
        "penstock.load.gateway.bench",
        "the gateway alone: CPU per streamed token and added latency, before an engine that costs "
        "nothing",
    ),
    "overload": (
        "penstock.load.overload",
        "preemption: tokens per second with more sequences than the KV pool holds",
    ),
}


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Give a parser one subcommand per bench; without any it prints its help."""

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    benches = parser.add_subparsers(metavar="BENCH", parser_class=_BenchParser)
    for name, (module, text) in BENCHES.items():
        benches.add_parser(name, module=module, help=text, description=f"{text}.")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)


class _BenchParser(argparse.ArgumentParser):
    """Learns its arguments from its module when it is about to read some."""

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
            self.exit(2, f"{self.prog} needs {error.name}: pip install 'penstock[bench]'\n")
