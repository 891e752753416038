"""`make gpu-bench`: ceilings, then figures as shares of them, on this machine's GPU.

    PYTHONPATH=.namespace python3 -m penstock.load.gpu [--only SECTION…]

That the kernels are right, the tests show that `make gpu` runs before. Sections run in turn.
Every result is on disk at once, under `load/results/gpu` and, if
`$OUT` is set, there too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from penstock.load.gpu.bench import Bench, Sizes, full_sizes
from penstock.load.gpu.sections import SECTIONS, measure_ceilings
from penstock.load.machine import commit

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a section failed, 2 without a GPU."""
    parsed = parser().parse_args(words)
    if not torch.cuda.is_available():
        print("penstock: error: torch finds no GPU here", file=sys.stderr)
        return 2
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    return measure(parsed, device, full_sizes(), device_name=name)


def measure(
    parsed: argparse.Namespace, device: torch.device, sizes: Sizes, *, device_name: str
) -> int:
    """`main` for any kind of device."""
    about = {
        "is_measurement": device.type == "cuda",
        "device": device_name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() if parsed.commit is None else parsed.commit,
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    bench = Bench(device=device, sizes=sizes, about=about, paths=_paths(parsed, about))
    print("ceilings", flush=True)
    measure_ceilings(bench)
    has_failed = False
    for name in parsed.only:
        try:
            SECTIONS[name](bench)
        except Exception as error:  # the other sections may still work
            traceback.print_exc()
            bench.add_note(f"{name} failed: {type(error).__name__}: {error}")
            has_failed = True
    bench.is_complete = True
    bench.save()
    print(bench.markdown())
    print("\nwrote", ", ".join(map(str, bench.paths)))
    return int(has_failed)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m penstock.load.gpu", description=__doc__)
    add = made.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="default: all of them")
    add("--commit", help="commit of these sources, where git is not available")
    add("--out", type=Path, help="folder for the JSON")
    return made


def _paths(parsed: argparse.Namespace, about: dict[str, Any]) -> tuple[Path, ...]:
    """The JSON's paths; a run of some sections does not replace a run of all."""
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    words = [about["date"], device]
    if parsed.only != [*SECTIONS]:
        words.extend(parsed.only)
    name = "-".join(words) + ".json"
    folders = [parsed.out or _RESULTS]
    if os.environ.get("OUT"):
        folders.append(Path(os.environ["OUT"]))
    return tuple(folder / name for folder in folders)


if __name__ == "__main__":
    sys.exit(main())
