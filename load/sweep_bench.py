"""`penstock bench sweep`: running servers measured at one load after another, up to saturation.

A load is a number of dialogues in flight, or a rate. At each, all servers take turns (A B A B …)
with the same prompts, so that a machine that drifts wrongs none. The prompts of one load are never
those of another, or a prefix cache would know them (but `jsonl` has only its file's). A server that
is saturated (`report.sweep`) is sent no higher load. The exit code is 1 when any stream had a
fault.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from penstock.engine.errors import ConfigError
from penstock.load.arguments import counts
from penstock.load.client.records import Dialogue
from penstock.load.plotting import new_figure
from penstock.load.report.options import add_report_arguments, file_stem, settings_of, slo_of
from penstock.load.report.summary import Slo, Summary, summarize
from penstock.load.report.sweep import Curve, Point, figures, sweep_table, verdicts
from penstock.load.report.sweep_plots import draw_sweep
from penstock.load.report.text import warnings
from penstock.load.tables import write_report
from penstock.load.workloads.arrivals import Arrivals, ClosedLoop, OpenLoop, gamma_offsets
from penstock.load.workloads.measure import Target, measure, target_of, warm_up
from penstock.load.workloads.options import (
    WARM_UP_SEED,
    add_burstiness,
    add_dataset_arguments,
    make_dialogues,
)
from penstock.load.workloads.wire import Wire, add_wire_arguments, wire_of

_DEFAULT_SERVER = "penstock=http://127.0.0.1:8000"
_PROMPTS_PER_STREAM = 4
_NUM_WARM_UPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--server",
        action="append",
        metavar="NAME=URL",
        help="may be repeated: all go into one picture; else " + _DEFAULT_SERVER,
    )
    loads = group.add_mutually_exclusive_group()
    loads.add_argument(
        "--concurrency",
        type=counts,
        default="1,2,4,8,16,32,64,128,256",
        help="dialogues in flight, ascending, with commas",
    )
    loads.add_argument("--rates", type=rates, help="dialogues a second instead, as 0.5,1,2")
    add_burstiness(group)
    group.add_argument(
        "--seconds", type=float, default=10.0, help="that a rate lasts; more if --num-prompts asks"
    )
    group.add_argument(
        "--min-gain",
        type=float,
        default=0.05,
        help="a server that gains less in throughput, and answers later, is saturated; 0: no load "
        "is left out",
    )
    group.add_argument("--repeat", type=int, default=1, help="runs at each load, of each server")
    add_wire_arguments(parser)
    add_dataset_arguments(parser, num_prompts=32)
    add_report_arguments(parser)


def rates(text: str) -> tuple[float, ...]:
    """Positive numbers with commas between them.

    Raises:
        ValueError: it is none.
    """
    numbers = tuple(float(number) for number in text.split(","))
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(text)
    return numbers


def run(parsed: argparse.Namespace) -> int:
    """Sweep; print and write the report; 1 if any stream had a fault."""
    plan = _plan(parsed)
    print(plan.title, flush=True)
    curves = uvloop.run(_measure(plan))
    runs = [run for curve in curves for point in curve.points for run in point.runs]
    doubts = sorted({text for run in runs for text in warnings(run, has_cap=not plan.has_rates)})
    parts = [sweep_table(curves), verdicts(curves), *(f"warning: {text}" for text in doubts)]
    report = "\n\n".join(parts)
    print(f"\n{report}")
    stem = file_stem("sweep", parsed.label)
    paths = write_report(
        parsed.out,
        stem,
        markdown=f"# {plan.title}\n\n{report}",
        data={"settings": settings_of(parsed), "curves": figures(curves)},
    )
    if parsed.plot:
        paths.append(parsed.out / f"{stem}.png")
        draw_sweep(curves, title=plan.title, load_name=plan.load_name, path=paths[-1])
    print("\nwrote", ", ".join(map(str, paths)))
    return int(any(run.num_failed for run in runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the arguments ask for."""

    parsed: argparse.Namespace
    title: str
    has_rates: bool
    loads: Sequence[float]
    targets: Sequence[Target]
    wire: Wire
    slo: Slo

    @property
    def load_name(self) -> str:
        return "dialogues a second" if self.has_rates else "dialogues in flight"


def _plan(parsed: argparse.Namespace) -> _Plan:
    if parsed.plot:
        new_figure(1, 1)  # what is missing is missed now, not after the runs
    if parsed.repeat < 1:
        raise ConfigError("--repeat must be at least 1")
    if parsed.burstiness != 1.0 and not parsed.rates:
        raise ConfigError("--burstiness needs --rates")
    wire = wire_of(parsed)
    targets = [
        target_of(name, base_url, model=parsed.model, wire=wire)
        for name, base_url in _servers(parsed.server or [_DEFAULT_SERVER]).items()
    ]
    return _Plan(
        parsed=parsed,
        title=f"{parsed.label or 'Sweep'}: {', '.join(target.name for target in targets)} by "
        f"{'rate' if parsed.rates else 'concurrency'}, {parsed.dataset}, {wire.endpoint} by "
        f"{wire.transport}",
        has_rates=parsed.rates is not None,
        loads=sorted(set(parsed.rates or parsed.concurrency)),
        targets=targets,
        wire=wire,
        slo=slo_of(parsed),
    )


def _servers(texts: Sequence[str]) -> dict[str, str]:
    servers: dict[str, str] = {}
    for text in texts:
        name, _, base_url = text.partition("=")
        if not name or not base_url or name in servers:
            raise ConfigError(f"--server {text!r}: each needs a name of its own, as NAME=URL")
        servers[name] = base_url
    return servers


async def _measure(plan: _Plan) -> list[Curve]:
    """All servers' curves; a saturated one ends early."""
    await _warm_up(plan)
    points: dict[str, list[Point]] = {target.name: [] for target in plan.targets}
    live = plan.targets
    for index, load in enumerate(plan.loads):
        runs: dict[str, list[Summary]] = {target.name: [] for target in live}
        for repeat in range(plan.parsed.repeat):
            seed = plan.parsed.seed + index * plan.parsed.repeat + repeat
            dialogues = _dialogues(plan, load, seed)
            for target in live:
                arrivals = _arrivals(plan, load, len(dialogues), seed)
                measured = await measure(target, plan.wire, dialogues, arrivals)
                runs[target.name].append(summarize(measured.result, plan.slo))
        for name in runs:
            points[name].append(Point(load, runs[name]))
            _tell(name, points[name][-1])
        live = [target for target in live if _goes_on(plan, points[target.name])]
    return [Curve(name, points[name]) for name in points]


async def _warm_up(plan: _Plan) -> None:
    dialogues = make_dialogues(
        plan.parsed, plan.wire.endpoint, num_dialogues=_NUM_WARM_UPS, seed=WARM_UP_SEED
    )
    for target in plan.targets:
        await warm_up(target, plan.wire, dialogues)


def _goes_on(plan: _Plan, points: Sequence[Point]) -> bool:
    min_gain: float = plan.parsed.min_gain
    return min_gain <= 0 or not Curve("", points).is_saturated(min_gain=min_gain)


def _dialogues(plan: _Plan, load: float, seed: int) -> list[Dialogue]:
    """Enough of them for a load to last."""
    enough = math.ceil(load * (plan.parsed.seconds if plan.has_rates else _PROMPTS_PER_STREAM))
    num_dialogues = max(plan.parsed.num_prompts, enough)
    return make_dialogues(plan.parsed, plan.wire.endpoint, num_dialogues=num_dialogues, seed=seed)


def _arrivals(plan: _Plan, load: float, num: int, seed: int) -> Arrivals:
    if not plan.has_rates:
        return ClosedLoop(int(load))
    burstiness: float = plan.parsed.burstiness
    return OpenLoop(gamma_offsets(num, rate=load, burstiness=burstiness, seed=seed))


def _tell(name: str, point: Point) -> None:
    """A line as it goes: a sweep takes long."""
    summary = point.summary
    print(
        f"{name} at {point.load:g}: {summary.output_tokens_per_s:,.0f} tokens/s, TTFT "
        f"{summary.ttft_ms.p50:,.1f} ms, ITL {summary.itl_ms.p50:,.1f} ms",
        flush=True,
    )
