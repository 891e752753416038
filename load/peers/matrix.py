"""`make bench-peers`: rivals and ours on the same machine, weights and requests, in turns.

    ours, rival, ours, rival, …, for each rival, in every round

One system runs at a time. If a rival has several settings, its first round tries each, and the
fastest one stays. Results are written after every start, so that an interrupted run keeps them;
what cannot be installed, started or finished is in the report with its reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil

from penstock.engine.errors import ConfigError
from penstock.load.launch import end_as_interrupted, family
from penstock.load.machine import commit, machine
from penstock.load.peers import models, workloads
from penstock.load.peers.environments import OURS, InstallError
from penstock.load.peers.report import Row, chosen_setting, write
from penstock.load.peers.rivals import RIVALS, Rival, Running, Setting, real_time
from penstock.load.report.summary import summarize


def observe(running: Running, model: str, names: Sequence[str]) -> Iterator[Row]:
    """Run every workload once, after a short warm-up. Raises ConfigError if the system ended or
    took too long; earlier observations remain."""
    idle_bytes = memory_bytes(family(running.process))
    asked = [workloads.make(name, model) for name in names]
    running.measure(workloads.warm_up(model, max(each.concurrency for each in asked)))
    for workload in asked:
        before = cpu_s(family(running.process))
        result = running.measure(workload)
        summary, after = summarize(result), cpu_s(family(running.process))
        thousands = max(summary.num_output_tokens, 1) / 1000
        rate = summary.output_tokens_per_s
        if workload.name == "prefill":
            rate = summary.total_tokens_per_s - rate
        yield {
            "workload": workload.name,
            "output_tokens_per_s": rate,
            "ttft_ms_p50": summary.ttft_ms.p50,
            "ttft_ms_p99": summary.ttft_ms.p99,
            "itl_ms_p50": summary.itl_ms.p50,
            "itl_ms_p99": summary.itl_ms.p99,
            "cpu_s_per_1k_tokens": {
                name: (seconds - before.get(name, 0.0)) / thousands
                for name, seconds in after.items()
            },
            "ready_s": running.ready_s,
            "idle_memory_bytes": idle_bytes,
            "num_cached_tokens": summary.num_cached_tokens,
            "client_cpu_share": summary.client_cpu_share,
            "faults": dict(summary.faults),
        }


def cpu_s(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by the processes' names; equal names are added up.

    A process that has given itself no name is `main`.
    """
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times, name = process.cpu_times(), process.name()
            name = "main" if name.startswith("python") else name
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """What they hold together: a page that several share counts once."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


# -- the matrix ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Matrix:
    """A run in progress; `data` is what is known so far."""

    rivals: Mapping[str, Rival]
    data: Row
    out: Path

    @classmethod
    def begin(cls, comparison: str, rivals: Mapping[str, Rival], out: Path) -> Matrix:
        with real_time() as is_real_time:
            scheduling = "SCHED_RR" if is_real_time else "normal: real time not permitted"
        data = {
            "date": date.today().isoformat(),
            "comparison": comparison,  # a key of `RIVALS`
            "machine": {**machine(), "client_scheduling": scheduling},
            "commit": commit(),
            "versions": {},
            "unavailable": {},
            "failures": [],
            "observations": [],
        }
        return cls(rivals, data, out)

    def prepare(self, models: Sequence[str]) -> None:
        """Make environments and models; a rival without them is unavailable."""
        for name, rival in self.rivals.items():
            _say(f"preparing {name}")
            try:
                for model in models:
                    self.data["versions"][name] = rival.prepare(model)
            except InstallError as error:
                _say(f"  not available: {error}")
                self.data["unavailable"][name] = str(error)

    def run(self, model: str, names: Sequence[str], repeats: int) -> None:
        """Every pair of a model, round by round; ours alone if there is no rival."""
        available = [name for name in self.rivals if name not in self.data["unavailable"]]
        pairs = [name for name in available if name != OURS] or [OURS]
        for number in range(repeats):
            for pair in pairs:
                for system in dict.fromkeys((OURS, pair)):
                    if system in available:
                        start = {"model": model, "system": system, "round": number, "pair": pair}
                        self._run_side(start, names)

    def _run_side(self, start: Row, names: Sequence[str]) -> None:
        """One start of a system with each of its settings that count."""
        model, system = start["model"], start["system"]
        for setting, chosen in list(self._plan(model, system, names)):
            title = f"{model} round {start['round'] + 1}: {system} ({setting.name})"
            _say(f"{title} {', '.join(chosen)}")
            left = list(chosen)
            try:
                with self.rivals[system].started(model, setting) as running:
                    for seen in observe(running, model, chosen):
                        names_of = {"setting": setting.name, "flags": str(setting)}
                        self.data["observations"].append({**start, **names_of, **seen})
                        left.remove(seen["workload"])
                        _say(f"  {seen['workload']}: {seen['output_tokens_per_s']:,.0f} tokens/s")
            except ConfigError as error:
                _say(f"  failed: {error}")
                failed = {
                    "setting": str(setting),
                    "workloads": left,
                    "reason": " / ".join(str(error).split("\n")),
                }
                self.data["failures"].append({**start, **failed})
            write(self.data, self.out)

    def _plan(
        self, model: str, system: str, names: Sequence[str]
    ) -> Iterator[tuple[Setting, list[str]]]:
        """The workloads of each setting: first all that fit it, then those it was best at."""
        seen = self.data["observations"]
        best = {name: chosen_setting(seen, (model, name, system)) for name in names}
        for setting in self.rivals[system].settings:
            chosen = [
                name for name in names if setting.fits(name) and best[name] in (None, setting.name)
            ]
            if chosen:
                yield setting, chosen


def _say(text: str) -> None:
    print(text, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(words)
    of_files = workloads.PLAN_OF_FILES.workloads
    if parsed.files and (others := {*(parsed.workloads or ())} - {*of_files}):
        parser.error(f"--workloads: files have none of {', '.join(sorted(others))}")
    end_as_interrupted()
    comparison = "gguf" if parsed.files else parsed.weights
    rivals = {
        rival.name: rival
        for rival in RIVALS[comparison]
        if not parsed.systems or rival.name in parsed.systems
    }
    matrix = Matrix.begin(comparison, rivals, parsed.out)
    began_s = time.monotonic()
    chosen = [models.link(file) for file in parsed.files] or parsed.models or [*workloads.PLANS]
    matrix.prepare(chosen)
    for model in chosen:
        plan = workloads.plan_of(model)
        matrix.run(model, parsed.workloads or plan.workloads, parsed.repeats or plan.rounds)
    paths = write(matrix.data, parsed.out)
    print(f"{time.monotonic() - began_s:.0f} s; wrote", ", ".join(map(str, paths)))
    return int(not matrix.data["observations"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    names = dict.fromkeys(rival.name for rivals in RIVALS.values() for rival in rivals)
    add("--systems", nargs="+", choices=names, help="default: all of this comparison")
    add("--weights", choices=("bf16", "int8", "int4"), default="bf16", help="how all store them")
    add("--models", nargs="+", choices=workloads.PLANS, help="default: all")
    add("--files", nargs="+", type=Path, default=[], help="instead: GGUF files of real models")
    add("--workloads", nargs="+", choices=workloads.WORKLOADS, help="default: by model")
    add("--repeats", type=int, help="rounds; default: 3 of files, 2 of T and S, 1 of others")
    add("--out", type=Path, default=Path("load/results"), help="folder for the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
