"""Tensors for the kernels' tests: random or poisoned, and how near a result must come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The interpreter has no bfloat16: it truncates.
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * torch.cuda.is_available()]
FP8 = torch.float8_e4m3fn


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def random_bits(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Every pattern of bits, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype).to(device)


def nans(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """What nobody has written yet."""
    return torch.full(shape, torch.nan).to(dtype).to(device)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While entered, torch fills new tensors with NaN, so that nothing unwritten looks right."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_near(result: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """Two roundings to the dtype from what float64 gives, and a few of float32's at the size of the
    terms it was computed from; None: of the largest number."""
    assert exact.dtype == torch.float64
    dtype, single = torch.finfo(result.dtype), torch.finfo(torch.float32)
    size = exact.abs().max() if terms is None else terms.abs()
    smallest = dtype.smallest_normal * dtype.eps + single.smallest_normal  # a GPU may flush to zero
    bound = 1.01 * dtype.eps * exact.abs() + 8 * single.eps * size + smallest
    error = (result.double() - exact).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max()} times what is allowed"
