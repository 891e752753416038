"""`penstock bench startup`: seconds to a server that is ready and to its first token, its memory.

Real servers are started and stopped, and each of their processes once more alone, in parts. What is
imported is looked at first, which puts all files into the page cache: what a first start after boot
takes is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from penstock.engine.config import DEMO_MODEL, DTYPES
from penstock.engine.errors import ConfigError
from penstock.load.arguments import add_out
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.launch import Started, server
from penstock.load.startup import report as pages
from penstock.load.startup.parts import ProbedModel, import_times, start_alone
from penstock.load.startup.probe import IMPORTS
from penstock.load.startup.report import Start, Startup
from penstock.load.tables import write_report

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids that every vocabulary has
_OUTPUT_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights")
    parser.add_argument("--repeats", type=int, default=5, help="measured starts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Start, measure and stop; print and write the tables; 0."""
    if parsed.repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    model = ProbedModel(model=parsed.model, dtype=parsed.dtype)
    startup = measure(model, repeats=parsed.repeats)
    report = pages.markdown(model, startup)
    print(report)
    paths = write_report(
        parsed.out,
        "startup",
        markdown=f"# Start of a server\n\n{report}",
        data=pages.figures(model, startup),
    )
    print("\nwrote", ", ".join(map(str, paths)))
    return 0


def measure(model: ProbedModel, *, repeats: int) -> Startup:
    """Whole servers and single processes in turn."""
    imports = {process: import_times(process, model) for process in IMPORTS}
    starts: list[Start] = []
    alone: dict[str, list[dict[str, float]]] = {process: [] for process in IMPORTS}
    for _ in range(repeats):
        starts.append(start(model))
        for process, parts in alone.items():
            parts.append(start_alone(process, model))
    return Startup(starts=starts, alone=alone, imports=imports)


def start(model: ProbedModel) -> Start:
    """Start a server, wait for its first token, and stop it."""
    with server(model.model, ["--dtype", model.dtype]) as started:
        idle = started.memory()
        sent_s = time.perf_counter()
        first_token_s = asyncio.run(_ask(started, model)) - sent_s
        return Start(
            ready_s=started.ready_s,
            first_token_s=first_token_s,
            idle=idle,
            used=started.memory(),
        )


async def _ask(started: Started, model: ProbedModel) -> float:
    """A first request, to its end; when its first token came.

    Raises:
        ConfigError: it failed.
    """
    call = Call(
        model=model.model, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, prompt_token_ids=_PROMPT
    )
    record = StreamRecord(scheduled_s=time.perf_counter(), expected_tokens=_OUTPUT_TOKENS)
    async with SseTransport(started.base_url, "completions") as transport:
        await transport.stream(call, record)
    if not record.is_clean or not record.event_times_s:
        raise ConfigError(f"the first request failed: {record.faults} {record.detail}")
    return record.event_times_s[0]
