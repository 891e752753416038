"""The operations that mostly move memory, relative to a plain copy.

Bytes count once for each number that must be read or written. Each reads more than any cache
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from penstock.engine.batch import BlockMoves
from penstock.engine.runner.kv_swap import HostTier
from penstock.kernels.gpu_operations import gpu_operation
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.inputs import (
    QUANTIZED,
    multiply,
    quantized_matrix,
    sample,
    sampling_inputs,
)
from penstock.load.gpu.model import kv_shape

COPY = "copy_bytes_per_s"  # bytes read and bytes written
MATMUL = "matmul_flop_per_s"
TO_DEVICE = "host_to_device_bytes_per_s"
TO_HOST = "device_to_host_bytes_per_s"


def measure_ceilings(bench: Bench) -> None:
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
    """The fastest of several sizes; with random numbers, since zeros are multiplied faster."""
    rates = []
    for size in bench.sizes.matmuls:
        left, right = bench.random(size, size), bench.random(size, size)
        seconds = bench.timer.median_s(partial(torch.mm, left, right, out=torch.empty_like(left)))
        rates.append(2 * size**3 / seconds)
    bench.results.add_ceiling(MATMUL, max(rates))


_SECTION = "operations"
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    call: Callable[[], object]
    num_bytes: int

    def __str__(self) -> str:
        return self.name


def measure(bench: Bench) -> None:
    """One row per operation; they have no bars."""
    for operation in bench.in_time(_SECTION, _operations(bench)):
        seconds = bench.timer.median_s(operation.call)
        rate = operation.num_bytes / seconds
        share = rate / bench.results.ceilings[COPY]
        row = {"operation": operation.name, "ms": 1e3 * seconds, "bytes_per_s": rate}
        bench.results.add_row(_SECTION, {**row, "of_copy": share})


def _operations(bench: Bench) -> Iterator[Operation]:
    """Made one by one: each frees its tensors before the next is made."""
    yield from _norms(bench)
    yield _silu_and_mul(bench)
    yield _sample_tokens(bench)
    yield from _stores(bench)
    yield from _moves(bench)
    yield from _quantized_products(bench)


def _norms(bench: Bench) -> Iterator[Operation]:
    size = bench.sizes.model["hidden_size"]
    x, residual = bench.random(bench.sizes.num_rows, size), bench.random(bench.sizes.num_rows, size)
    weight = bench.random(size)
    norm, add_norm = gpu_operation("rms_norm"), gpu_operation("add_rms_norm", "rms_norm")
    yield Operation("rms_norm", lambda: norm(x, weight, _EPS), 2 * x.nbytes)
    yield Operation("add_rms_norm", lambda: add_norm(x, residual, weight, _EPS), 4 * x.nbytes)


def _silu_and_mul(bench: Bench) -> Operation:
    gate_up = bench.random(bench.sizes.num_rows, 2 * bench.sizes.model["intermediate_size"])
    run = gpu_operation("activate_and_mul", "activation")
    return Operation("silu_and_mul", lambda: run(gate_up, "silu"), gate_up.nbytes * 3 // 2)


def _sample_tokens(bench: Bench) -> Operation:
    """With temperature and top_p. The logits count once, however often they are read."""
    inputs = sampling_inputs(bench, bench.sizes.num_sampled, bench.sizes.model["vocab_size"])
    return Operation("sample_tokens", lambda: sample(inputs), inputs[0].nbytes)


def _stores(bench: Bench) -> Iterator[Operation]:
    """Keys and values of a step into scattered slots."""
    num_tokens, shape = bench.sizes.num_rows, kv_shape(bench.sizes, dtype=bench.sizes.dtype)
    head = (shape.num_kv_heads, shape.head_size)
    num_blocks = shape.num_blocks_for(num_tokens)
    caches = [bench.random(num_blocks, shape.block_size, *head) for _ in range(2)]
    slots = bench.permutation(num_blocks * shape.block_size)[:num_tokens]
    num_heads = bench.sizes.model["num_attention_heads"] + 2 * shape.num_kv_heads
    qkv = bench.random(num_tokens, num_heads, shape.head_size)
    cos, sin = (bench.random(num_tokens, 1, shape.head_size // 2) for _ in range(2))
    turn = gpu_operation("rotary_store_kv")
    yield Operation(
        "rotary_store_kv",
        lambda: turn(qkv, (cos, sin), *caches, slots),
        2 * (qkv.nbytes + cos.nbytes),
    )


def _moves(bench: Bench) -> Iterator[Operation]:
    """Half of a pool's blocks, scattered: into staging, back, and into the other half."""
    shape = kv_shape(bench.sizes, dtype=bench.sizes.dtype)
    num_blocks = bench.sizes.swap_blocks
    plane = (shape.block_size, shape.num_kv_heads, shape.head_size)
    pool = bench.random(shape.num_layers, 2, 2 * num_blocks, *plane)
    staging = bench.random(num_blocks, shape.num_layers, 2, *plane)
    here, there = torch.split(bench.permutation(2 * num_blocks), num_blocks)
    pairs = tuple(zip(here.tolist(), there.tolist(), strict=True))
    gather = gpu_operation("gather_blocks", "move_blocks")
    scatter = gpu_operation("scatter_blocks", "move_blocks")
    copy = gpu_operation("copy_blocks")
    yield Operation("gather_blocks", lambda: gather(pool, here, staging), 2 * staging.nbytes)
    yield Operation("scatter_blocks", lambda: scatter(staging, here, pool), 2 * staging.nbytes)
    yield Operation("copy_blocks", lambda: copy(pool, pairs), 2 * staging.nbytes)


def _quantized_products(bench: Bench) -> Iterator[Operation]:
    """The gate and up projections of a step, beside those in the model's dtype. With few rows they
    read weights; with many they compute, and their share of a copy says little."""
    model = bench.sizes.model
    in_features, out_features = model["hidden_size"], 2 * model["intermediate_size"]
    for num_rows in bench.sizes.product_rows:
        x = bench.random(num_rows, in_features)
        num_bytes = x.nbytes + num_rows * out_features * x.itemsize
        weight = bench.random(out_features, in_features)
        yield Operation(
            f"linear, {num_rows} rows",
            partial(torch.nn.functional.linear, x, weight),
            num_bytes + weight.nbytes,
        )
        del weight
        for kind, in_bytes in product(QUANTIZED, (False, True)):
            if kind == "int4" and in_bytes:
                continue  # the same
            matrix = quantized_matrix(bench, kind, out_features, in_features)
            yield Operation(
                f"linear, {kind}{', rounded inputs' * in_bytes}, {num_rows} rows",
                partial(multiply, x, matrix, in_bytes=in_bytes),
                num_bytes + matrix.nbytes,
            )


_FIGURE = "swap_of_pinned_copy"


def measure_swap(bench: Bench) -> None:
    """Blocks of all layers, scattered on both sides, in each direction."""
    num_blocks = bench.sizes.swap_blocks
    shape = kv_shape(bench.sizes, dtype=bench.sizes.dtype)
    num_bytes = num_blocks * shape.bytes_per_block
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
        rate = num_bytes / bench.timer.wall_s(partial(tier.execute, moves))
        shares.append(rate / ceiling)
        row = {"direction": direction, "blocks": num_blocks, "bytes": num_bytes}
        row |= {"bytes_per_s": rate, "of_pinned_copy": shares[-1]}
        bench.results.add_row("swap", row)
    bench.conclude(_FIGURE, shares, num_cells=2)
