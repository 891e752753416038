"""The ceilings, which are measured in the same run as what is compared with them, and the swap of
KV blocks to the host and back."""

from __future__ import annotations

from functools import partial

import torch

from penstock.engine.batch import BlockMoves
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.kv_swap import HostTier
from penstock.load.gpu.bench import COPY, MATMUL, TO_DEVICE, TO_HOST, Bench


def measure_ceilings(bench: Bench) -> None:
    """Copy bandwidth of the memory and of the link, and the rate of matrix products."""
    sizes, timer, results = bench.sizes, bench.timer, bench.results
    source = bench.draw.random(sizes.copy_bytes // 4, dtype=torch.float32)
    seconds = timer.median_s(partial(torch.empty_like(source).copy_, source))
    results.add_ceiling(COPY, 2 * source.nbytes / seconds)
    del source
    here = bench.draw.random(sizes.pinned_bytes // 4, dtype=torch.float32)
    host = torch.empty(here.shape, pin_memory=here.is_cuda)
    to_host = timer.median_s(lambda: host.copy_(here, non_blocking=True))
    to_device = timer.median_s(lambda: here.copy_(host, non_blocking=True))
    results.add_ceiling(TO_HOST, here.nbytes / to_host)
    results.add_ceiling(TO_DEVICE, here.nbytes / to_device)
    rates = []
    for size in sizes.matmuls:  # of random numbers, since zeros are multiplied faster
        left, right = bench.draw.random(size, size), bench.draw.random(size, size)
        seconds = timer.median_s(partial(torch.mm, left, right, out=torch.empty_like(left)))
        rates.append(2 * size**3 / seconds)
    results.add_ceiling(MATMUL, max(rates))


def measure_swap(bench: Bench) -> None:
    """Blocks of all layers, scattered on both sides, in each direction."""
    num_blocks, model, results = bench.sizes.swap_blocks, bench.sizes.model, bench.results
    shape = KVShape(
        num_layers=model["num_hidden_layers"],
        block_size=bench.sizes.attention.block_size,
        num_kv_heads=model["num_key_value_heads"],
        head_size=model["head_dim"],
        dtype=bench.sizes.dtype,
    )
    pool = shape.allocate(num_blocks, bench.device)
    pool.normal_()
    tier = HostTier(pool, num_blocks)
    pairs = tuple(zip(range(num_blocks), bench.draw.permutation(num_blocks).tolist(), strict=True))
    back = tuple((host, device) for device, host in pairs)
    shares = []
    for direction, moves, ceiling in (
        ("out", BlockMoves(swap_outs=pairs), results.ceilings[TO_HOST]),
        ("in", BlockMoves(swap_ins=back), results.ceilings[TO_DEVICE]),
    ):
        seconds = bench.timer.wall_s(partial(tier.execute, moves))
        rate = num_blocks * shape.bytes_per_block / seconds
        shares.append(rate / ceiling)
        row = {"direction": direction, "blocks": num_blocks, "bytes_per_s": rate}
        results.add_row("swap", {**row, "of_pinned_copy": shares[-1]})
    results.conclude("swap_of_pinned_copy", shares, num_cells=2)
