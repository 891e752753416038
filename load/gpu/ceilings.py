"""What the device can do at best, measured in the run whose figures are shares of it."""

from __future__ import annotations

import torch

from penstock.load.gpu.bench import Bench

COPY = "copy_bytes_per_s"  # bytes read and bytes written
MATMUL = "matmul_flop_per_s"
TO_DEVICE = "host_to_device_bytes_per_s"
TO_HOST = "device_to_host_bytes_per_s"


def measure(bench: Bench) -> None:
    """Copy bandwidth of the memory and of the link, and the rate of matrix products."""
    _copies(bench)
    _link(bench)
    _products(bench)


def _copies(bench: Bench) -> None:
    source = bench.random(bench.sizes.copy_bytes // 4, dtype=torch.float32)
    destination = torch.empty_like(source)
    seconds = bench.timer.median_s(lambda: destination.copy_(source))
    bench.results.add_ceiling(COPY, 2 * source.nbytes / seconds)


def _link(bench: Bench) -> None:
    here = bench.random(bench.sizes.pinned_bytes // 4, dtype=torch.float32)
    host = torch.empty(here.shape, pin_memory=here.is_cuda)
    to_host = bench.timer.median_s(lambda: host.copy_(here, non_blocking=True))
    to_device = bench.timer.median_s(lambda: here.copy_(host, non_blocking=True))
    bench.results.add_ceiling(TO_HOST, here.nbytes / to_host)
    bench.results.add_ceiling(TO_DEVICE, here.nbytes / to_device)


def _products(bench: Bench) -> None:
    """The fastest of several sizes; random numbers, since zeros are multiplied faster."""
    rates = []
    for size in bench.sizes.matmuls:
        left, right = bench.random(size, size), bench.random(size, size)
        product = torch.empty_like(left)
        seconds = bench.timer.median_s(
            lambda left=left, right=right, product=product: torch.mm(left, right, out=product)  # type: ignore[misc]
        )
        rates.append(2 * size**3 / seconds)
    bench.results.add_ceiling(MATMUL, max(rates))
