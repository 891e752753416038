"""Where a process's start goes: its parts, and the packages it imports.

Each process of the server is started alone for this (`probe`). Knows nothing of servers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

from penstock.engine.errors import ConfigError

_IMPORT_LINE = re.compile(r"import time:\s+(?P<self_us>\d+) \|\s+\d+ \|\s+(?P<name>\S+)")
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """What the processes are started with."""

    model: str
    dtype: str


def start_alone(process: str, model: ProbedModel) -> dict[str, float]:
    """Seconds of each part of a process's start."""
    parts: dict[str, float] = json.loads(_probe(process, model).stdout)
    return parts


def import_times(process: str, model: ProbedModel) -> dict[str, float]:
    """Seconds by top-level package, longest first, imported at any time of the start.

    What one package imports of another counts for that other. Taking times makes imports slower.
    """
    return parse_import_times(_probe(process, model, "-X", "importtime").stderr)


def parse_import_times(text: str) -> dict[str, float]:
    """The same from what `python -X importtime` writes."""
    seconds: Counter[str] = Counter()
    for line in text.splitlines():
        found = _IMPORT_LINE.match(line)
        if found is not None:
            package, _, _ = found["name"].partition(".")
            seconds[package] += int(found["self_us"])
    return {package: microseconds / 1e6 for package, microseconds in seconds.most_common()}


def _probe(process: str, model: ProbedModel, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the probe.

    Raises:
        ConfigError: it failed, as with a model that cannot be loaded.
    """
    probe = (*options, "-m", "penstock.load.startup.probe", process)
    launched_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603  (our own module)
        [sys.executable, *probe, repr(launched_s), model.model, model.dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
        raise ConfigError(f"the {process} did not start alone:\n{tail}")
    return done
