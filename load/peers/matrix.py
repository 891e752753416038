"""`make bench-peers`: rivals and ours on the same machine, weights and requests, in turns.

    ours, rival, ours, rival, …, for each rival, in every round

One system runs at a time. If a rival has several settings, its first round tries each, and the
fastest one stays. Results are written after every start, so that an interrupted run keeps them;
what cannot be installed, started or finished is in the report with its reason.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.load.launch import family
from penstock.load.peers import models, workloads
from penstock.load.peers.environments import OURS, InstallError
from penstock.load.peers.report import Failure, Observation, Report, chosen_setting, write
from penstock.load.peers.rivals import (
    RIVALS,
    Rival,
    RivalError,
    Running,
    Setting,
    cpu_s,
    memory_bytes,
    real_time,
)
from penstock.load.report.summary import summarize, ttft_ms
from penstock.load.workloads.driver import RunResult


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a system; `pair` is that of an `Observation`."""

    model: str
    system: str
    round: int
    pair: str


def observe(
    running: Running, start: Start, setting: Setting, names: Sequence[str]
) -> Iterator[Observation]:
    """Run every workload once, after a short warm-up. Raises RivalError if the system ended or took
    too long; earlier observations remain."""
    idle_bytes = memory_bytes(family(running.process))
    asked = [workloads.make(name, start.model) for name in names]
    running.measure(workloads.warm_up(start.model, max(each.concurrency for each in asked)))
    for workload in asked:
        before = cpu_s(family(running.process))
        result = running.measure(workload)
        summary = summarize(result)
        took = _per_1k(before, cpu_s(family(running.process)), summary.num_output_tokens)
        rate = summary.output_tokens_per_s
        if workload.name == "prefill":
            rate = summary.total_tokens_per_s - rate
        yield Observation(
            **asdict(start),
            workload=workload.name,
            setting=setting.name,
            flags=str(setting),
            output_tokens_per_s=rate,
            ttft_ms_p50=summary.ttft_ms.p50,
            ttft_ms_p99=summary.ttft_ms.p99,
            itl_ms_p50=summary.itl_ms.p50,
            itl_ms_p99=summary.itl_ms.p99,
            turn_ttft_ms=_by_turn(result) if workload.endpoint == "chat" else (),
            cpu_s_per_1k_tokens=took,
            ready_s=running.ready_s,
            idle_memory_bytes=idle_bytes,
            num_cached_tokens=summary.num_cached_tokens,
            client_cpu_share=summary.client_cpu_share,
            faults=dict(summary.faults),
        )


def _by_turn(result: RunResult) -> tuple[float, ...]:
    turns: dict[int, list[float]] = {}
    for record in result.records:
        if record.is_clean and record.event_times_s:
            turns.setdefault(record.turn, []).append(ttft_ms(record))
    return tuple(statistics.median(turns[turn]) for turn in sorted(turns))


def _per_1k(
    before: Mapping[str, float], after: Mapping[str, float], num_tokens: int
) -> dict[str, float]:
    return {
        name: 1000 * (seconds - before.get(name, 0.0)) / max(num_tokens, 1)
        for name, seconds in after.items()
    }


# -- the matrix ---------------------------------------------------------------------------------

# Within an hour in total; S has the most important workloads.
_DEFAULT_REPEATS = {
    "T": 2, "S": 2, "M": 1, "GPT2": 1, "MOE": 1, "S-cycles": 2, "M-cycles": 2,
}  # fmt: skip


@dataclass(slots=True)
class Matrix:
    """A run in progress."""

    rivals: Mapping[str, Rival]
    report: Report  # what is known so far
    out: Path

    def prepare(self, models: Iterable[str]) -> None:
        """Make environments and models; a rival without them is unavailable."""
        models = list(models)
        for name, rival in self.rivals.items():
            self._say(f"preparing {rival.title}")
            try:
                for model in models:
                    self.report.versions[name] = rival.prepare(model)
            except InstallError as error:
                self._say(f"  not available: {error}")
                self.report.unavailable[name] = str(error)

    def run(self, model: str, names: Sequence[str], repeats: int) -> None:
        """Every pair of a model, round by round; ours alone if there is no rival."""
        available = [name for name in self.rivals if name not in self.report.unavailable]
        pairs = [name for name in available if name != OURS] or [OURS]
        for number in range(repeats):
            for pair in pairs:
                for system in dict.fromkeys((OURS, pair)):
                    if system in available:
                        self._run_side(Start(model, system, number, pair), names)

    def _run_side(self, start: Start, names: Sequence[str]) -> None:
        for setting, chosen in self._plan(start, names):
            self._say(
                f"{start.model} round {start.round + 1}: {start.system} ({setting.name}) "
                f"{', '.join(chosen)}"
            )
            try:
                running = self.rivals[start.system].start(start.model, setting)
            except RivalError as error:
                self._fail(start, setting, chosen, error)
                continue
            try:
                self._measure(start, setting, chosen, running)
            finally:
                running.stop()
                write(self.report, self.out)

    def _measure(
        self, start: Start, setting: Setting, chosen: Sequence[str], running: Running
    ) -> None:
        left = list(chosen)
        try:
            for observation in observe(running, start, setting, chosen):
                self.report.observations.append(observation)
                left.remove(observation.workload)
                self._say(_line(observation))
        except RivalError as error:
            self._fail(start, setting, left, error)

    def _plan(self, start: Start, names: Sequence[str]) -> Iterator[tuple[Setting, list[str]]]:
        """The workloads of each setting: first all that fit it, then those it was best at."""
        seen = list(self.report.observations)
        best = {name: chosen_setting(seen, (start.model, name, start.system)) for name in names}
        for setting in self.rivals[start.system].options:
            chosen = [
                name for name in names if setting.fits(name) and best[name] in (None, setting.name)
            ]
            if chosen:
                yield setting, chosen

    def _fail(
        self, start: Start, setting: Setting, names: Sequence[str], error: RivalError
    ) -> None:
        self._say(f"  failed: {error}")
        self.report.failures.append(
            Failure(
                model=start.model,
                system=start.system,
                setting=str(setting),
                workloads=tuple(names),
                round=start.round,
                reason=str(error),
            )
        )

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _line(seen: Observation) -> str:
    faults = f"  FAULTS {dict(seen.faults)}" if seen.faults else ""
    return (
        f"  {seen.workload:<9} {seen.output_tokens_per_s:8,.0f} tokens/s"
        f"  TTFT {seen.ttft_ms_p50:6.1f} ms  ITL {seen.itl_ms_p50:6.2f} ms{faults}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(words)
    if parsed.files and (others := {*(parsed.workloads or ())} - {*workloads.WORKLOADS_OF_FILES}):
        parser.error(f"--workloads: files have none of {', '.join(sorted(others))}")
    # Both signals act as Ctrl-C, with or without an event loop: everything started is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with real_time() as is_real_time:
        pass
    comparison = "gguf" if parsed.files else parsed.weights
    comparison = "speculation" if parsed.speculation else comparison
    rivals = {
        rival.name: rival
        for rival in RIVALS[comparison]
        if not parsed.systems or rival.name in parsed.systems
    }
    report = Report.begin(is_real_time=is_real_time, comparison=comparison)
    matrix = Matrix(rivals, report, parsed.out)
    began_s = time.monotonic()
    usual = ["S-cycles", "M-cycles"] if parsed.speculation else ["T", "S", "M", "GPT2", "MOE"]
    chosen = [models.link(file) for file in parsed.files] or parsed.models or usual
    matrix.prepare(chosen)
    for model in chosen:
        default = workloads.DEFAULT_WORKLOADS.get(model, workloads.WORKLOADS_OF_FILES)
        repeats = parsed.repeats or _DEFAULT_REPEATS.get(model, 3)
        matrix.run(model, parsed.workloads or default, repeats)
    paths = write(matrix.report, parsed.out)
    print(f"{time.monotonic() - began_s:.0f} s; wrote", ", ".join(map(str, paths)))
    return int(not matrix.report.observations)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    names = [rival.name for rivals in RIVALS.values() for rival in rivals]
    add(
        "--systems", nargs="+", choices=dict.fromkeys(names), help="default: all of this comparison"
    )
    add("--weights", choices=("bf16", "int8", "int4"), default="bf16", help="how all store them")
    add("--speculation", action="store_true", help="each system with its own and without")
    add("--models", nargs="+", choices=_DEFAULT_REPEATS, help="default: by comparison")
    add("--files", nargs="+", type=Path, default=[], help="instead: GGUF files of real models")
    add("--workloads", nargs="+", choices=workloads.WORKLOADS, help="default: by model")
    add("--repeats", type=int, help="rounds; default: 3 of files, 2 of T and S, 1 of others")
    add("--out", type=Path, default=Path("load/results"), help="folder for the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
