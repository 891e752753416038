"""Is every kernel right? Asked before anything is timed: a fast wrong answer is worth nothing.

Each runs on fresh random numbers of odd shapes, with NaN in all memory that nobody has written, and
is compared with the same in float64.
"""

from __future__ import annotations

from penstock.load.gpu import check_attention, check_operations
from penstock.load.gpu.bench import Bench


def run(bench: Bench) -> bool:
    """Whether all are right; what each came to is in the results."""
    print("checks", flush=True)
    is_right = True
    for module in (check_operations, check_attention):
        for name, error, bound in module.checks(bench):
            is_right &= bench.results.add_check(name, error=error, bound=bound)
    return is_right
