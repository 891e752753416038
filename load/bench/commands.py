"""The subcommands of `penstock bench`.

Each is a module of this package with `add_arguments(parser)` and `run(args) -> int`, imported only
when asked for, since some load torch. The command line imports this module: standard library only.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from penstock.gateway.launch.arguments import OneLineParser

# The name users type, which is that of the module, and what it shows.
BENCHES: dict[str, str] = {
    "serve": "a running server: latencies, throughput and stream integrity, over SSE or WebSocket",
    "sweep": "running servers, up to saturation: throughput and latency by concurrency or rate",
    "engine": "the engine alone: tokens per second, and where a step's time goes",
    "kernels": "the kernels alone: their time compared with the machine's limits and with torch",
    "quality": "fewer bits beside the model as it is: KL of logits, perplexity, bytes, tokens/s",
    "quantization": "quantized weights beside the model's own dtype: tokens per second",
    "experts": "a mixture of experts beside a dense model that reads as many bytes for a token",
    "speculation": "drafts: tokens per second with them beside those without, and which were right",
    "adapters": "adapters (LoRA): tokens per second with them beside those without",
    "ranks": "several ranks: tokens per second beside one with as many threads, and sums' times",
    "structured": "structured outputs: schemas accepted, masks, validity, and what they cost",
    "images": "the largest gaps of streams beside images, beside text, and alone",
    "embeddings": "texts to vectors: texts per second and cosines, beside Hugging Face",
    "backend": "a model through transformers: tokens per second and start, beside our own code's",
    "startup": "a server's start: seconds to ready and to a first token, memory of each process",
    "turns": "conversations: time to the first token of a later turn, and of its new tokens alone",
    "soak": "minutes of mixed and hostile traffic: checks every stream, and for leaks",
    "kv": "KV memory: waste and sequences held by paged and by contiguous allocation",
    "policy": "the scheduler: milliseconds of planning per step, by sequences and pool size",
    "fairness": "admission: one tenant's time to first token, alone and beside another's flood",
    "replicas": "several engines: cache hits by routing, a death under streams, engines by threads",
    "gateway": "the gateway alone: CPU per streamed token and added latency, with a stub engine",
    "overload": "preemption: tokens per second with more sequences than the KV pool holds",
}


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per bench to a parser; without a subcommand it prints its help."""

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    benches = parser.add_subparsers(metavar="BENCH", parser_class=_BenchParser)
    for name, text in BENCHES.items():
        module = f"penstock.load.bench.{name}"
        benches.add_parser(name, module=module, help=text, description=f"{text}.")


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
