"""`penstock bench kernels`: how near this machine's kernels come to its limits, and to torch.

On a CPU the C kernels, with the rates of memory and of matrix products measured in the same run.
With a GPU the parts of `make gpu-bench` that need no model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from penstock.engine.config import DeviceConfig
from penstock.engine.errors import ConfigError
from penstock.engine.runner.device import select_device
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import load_library
from penstock.load.arguments import add_out, counts, positive
from penstock.load.kernels.cpu_cases import Case, CaseMaker
from penstock.load.memory_rate import MemoryReader
from penstock.load.tables import table, write_report

_MATMUL_SIZE = 2048
_NUM_CEILINGS = 20
_PAUSE_S = 0.01  # the other's threads go on spinning for a while
_MAX_ERROR = 0.02  # ‖ours − float64's‖ ÷ ‖float64's‖ in 16 bits
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_GPU_SECTIONS = "decode_attention,prefill_attention,block_sizes,swap,operations"
_DISTURBED = "Something is faster than the limit: others kept this machine busy, measure again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of this machine, with the threads that the kernels have."""

    read_bytes_per_s: float
    matmul_flop_per_s: float

    def bound_s(self, case: Case) -> float:
        """Seconds that a case takes at least."""
        return max(case.num_bytes / self.read_bytes_per_s, case.num_flop / self.matmul_flop_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one call, in medians.

    Attributes:
        error: of ours against float64, relative.
    """

    name: str
    ours_s: float
    torch_s: float
    bound_s: float
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="for it")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(_DTYPES), help="on a CPU")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads; 0: one a core")
    parser.add_argument("--rows", type=counts, default="1,8,32,160", help="of linear, with commas")
    parser.add_argument(
        "--features", type=positive, default=2048, help="in; four times as many out"
    )
    parser.add_argument("--context", type=positive, default=1024, help="tokens of each sequence")
    parser.add_argument("--repeats", type=positive, default=9, help="of every case")
    parser.add_argument(
        "--copies-mib", type=positive, default=256, help="of data for a case: more than the caches"
    )
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure on the device there is; print and write the table; 0, or 1 if a kernel is wrong."""
    device = select_device(
        DeviceConfig(device=parsed.device, num_threads=parsed.num_threads or None)
    )
    if device.type == "cuda":
        # transformers, which is a rival there, need not be installed here.
        from penstock.load.gpu.command import main

        return main(["--only", _GPU_SECTIONS, "--out", str(parsed.out)])
    return _run_on_cpu(parsed)


def _run_on_cpu(parsed: argparse.Namespace) -> int:
    library = load_library(_DTYPES[parsed.dtype])
    if library is None:
        raise ConfigError("there are no C kernels to measure: see the line above")
    num_threads = library.start_threads(parsed.num_threads or num_usable_cores())
    torch.set_num_threads(num_threads)
    ceilings = measure_ceilings(library.dtype, num_threads)
    maker = CaseMaker(library=library, min_bytes=parsed.copies_mib << 20)
    costs = [measure(case, ceilings, repeats=parsed.repeats) for case in _cases(maker, parsed)]
    title = f"{parsed.dtype}, {library.isa}, CPU threads: {num_threads}"
    report = f"{title}\n\n{_tables(ceilings, costs)}"
    print(report)
    paths = write_report(
        parsed.out,
        "kernels",
        markdown=f"# CPU kernels\n\n{report}",
        data=_figures(parsed, ceilings, costs, isa=library.isa, num_threads=num_threads),
    )
    print("\nwrote", ", ".join(map(str, paths)))
    return int(any(not cost.error <= _MAX_ERROR for cost in costs))


def measure_ceilings(dtype: torch.dtype, num_threads: int) -> Ceilings:
    """Rates of reading memory that no cache holds, and of a large matrix product, at best."""
    with MemoryReader(num_threads) as reader:
        read_bytes_per_s = reader.measure(num_passes=_NUM_CEILINGS)
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).to(dtype) for _ in range(2))
    matmul_s = min(_seconds(lambda: torch.mm(left, right)) for _ in range(_NUM_CEILINGS))
    return Ceilings(
        read_bytes_per_s=read_bytes_per_s, matmul_flop_per_s=2 * _MATMUL_SIZE**3 / matmul_s
    )


def measure(case: Case, ceilings: Ceilings, *, repeats: int) -> Cost:
    """Both implementations over all copies of a case, in turns."""
    error = case.copies[0].error()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        for calls, seconds in (
            ([copy.ours for copy in case.copies], ours),
            ([partial(copy.theirs, *copy.inputs) for copy in case.copies], theirs),
        ):
            time.sleep(_PAUSE_S)
            seconds.extend(_seconds(call) for call in calls)
    return Cost(
        name=case.name,
        ours_s=statistics.median(ours),
        torch_s=statistics.median(theirs),
        bound_s=ceilings.bound_s(case),
        error=error,
    )


def _cases(maker: CaseMaker, parsed: argparse.Namespace) -> list[Case]:
    features = parsed.features
    return [
        *(maker.linear(rows, features, 4 * features) for rows in parsed.rows),
        *(maker.decode_attention(num_seqs, parsed.context) for num_seqs in (1, 8)),
        *(maker.rms_norm(rows, features) for rows in parsed.rows),
        *(maker.silu_mul(rows, 4 * features) for rows in parsed.rows),
    ]


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


# -- what is said of it -----------------------------------------------------------------------


def _tables(ceilings: Ceilings, costs: Sequence[Cost]) -> str:
    rows = [
        [
            cost.name,
            f"{1e6 * cost.ours_s:,.1f}",
            f"{cost.bound_s / cost.ours_s:.0%}",
            f"{1e6 * cost.torch_s:,.1f}",
            f"{cost.torch_s / cost.ours_s:.2f}",
            f"{cost.error:.1e}",
        ]
        for cost in costs
    ]
    return "\n\n".join(
        [
            f"Memory is read at {ceilings.read_bytes_per_s / 1e9:.1f} GB/s, matrices are "
            f"multiplied at {ceilings.matmul_flop_per_s / 1e9:,.0f} GFLOP/s.",
            table(("kernel", "µs", "of the limit", "torch µs", "speedup", "error"), rows),
            "The limit: the time to read and write each number once, or to multiply, whichever is "
            "longer. The error is against float64, relative.",
            *([_DISTURBED] if any(cost.bound_s > cost.ours_s for cost in costs) else []),
        ]
    )


def _figures(
    parsed: argparse.Namespace,
    ceilings: Ceilings,
    costs: Sequence[Cost],
    *,
    isa: str,
    num_threads: int,
) -> dict[str, Any]:
    return {
        "dtype": parsed.dtype,
        "isa": isa,
        "num_threads": num_threads,
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
        "costs": [asdict(cost) for cost in costs],
    }
