"""What every section of the GPU bench is given: device, sizes, clock, results, time left.

Knows no section.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from penstock.load.gpu.figures import BARS, Results
from penstock.load.gpu.sizes import Sizes
from penstock.load.gpu.timing import Timer

T = TypeVar("T")


@dataclass(kw_only=True)
class Bench:
    """A run.

    Attributes:
        deadline_s: of the present section, by `time.perf_counter`.
    """

    device: torch.device
    sizes: Sizes
    results: Results
    deadline_s: float = float("inf")
    timer: Timer = field(init=False)
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.timer = Timer(
            self.device, flush_bytes=self.sizes.flush_bytes, num_repeats=self.sizes.num_repeats
        )
        self._generator = torch.Generator(self.device).manual_seed(time.time_ns())

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.perf_counter())

    def in_time(self, section: str, cells: Iterable[T]) -> Iterator[T]:
        """The cells, until the section's time is up; what is left out is noted."""
        left_out = []
        for cell in cells:
            if self.remaining_s > 0:
                print(f"  {section}: {cell}", flush=True)
                yield cell
            else:
                left_out.append(cell)
        if left_out:
            self.results.add_note(
                section, f"no time left for {', '.join(str(cell) for cell in left_out)}"
            )

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, others in every run."""
        numbers = torch.empty(shape, dtype=dtype or self.sizes.dtype, device=self.device)
        return numbers.normal_(generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        """0 … size - 1 in random order: int64 [size]."""
        return torch.randperm(size, generator=self._generator, device=self.device)

    def conclude(self, figure: str, values: Sequence[float], *, num_cells: int) -> None:
        """Set a figure to the worst of its cells, if there are as many as its bar speaks of."""
        is_whole = len(values) == num_cells
        self.results.add_figure(figure, BARS[figure].worst(values) if is_whole else None)


Section = Callable[[Bench], None]
Check = tuple[str, float, float]  # what was checked, its error, the bound of that
