"""Swapping blocks between the device's KV pool and the host tier, against plain pinned copies."""

from __future__ import annotations

from functools import partial

from penstock.engine.batch import BlockMoves
from penstock.engine.runner.kv_swap import HostTier
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.ceilings import TO_DEVICE, TO_HOST
from penstock.load.gpu.model import kv_shape

_FIGURE = "swap_of_pinned_copy"


def measure(bench: Bench) -> None:
    """Blocks of all layers, scattered on both sides, each way by itself."""
    num_blocks = bench.sizes.swap_blocks
    shape = kv_shape(bench.sizes, dtype=bench.sizes.dtype)
    pool = shape.allocate(num_blocks, bench.device)
    pool.normal_()
    tier = HostTier(pool, num_blocks)
    ids = bench.permutation(num_blocks).tolist()
    pairs = tuple(zip(range(num_blocks), ids, strict=True))
    back = tuple((host, device) for device, host in pairs)
    ceilings, shares = bench.results.ceilings, []
    for direction, moves, ceiling in (
        ("out", BlockMoves(swap_outs=pairs), ceilings[TO_HOST]),
        ("in", BlockMoves(swap_ins=back), ceilings[TO_DEVICE]),
    ):
        seconds = bench.timer.wall_s(partial(tier.execute, moves))
        rate = num_blocks * shape.bytes_per_block / seconds
        shares.append(rate / ceiling)
        bench.results.add_row(
            "swap",
            {
                "direction": direction,
                "blocks": num_blocks,
                "bytes": num_blocks * shape.bytes_per_block,
                "bytes_per_s": rate,
                "of_pinned_copy": shares[-1],
            },
        )
    bench.conclude(_FIGURE, shares, num_cells=2)
