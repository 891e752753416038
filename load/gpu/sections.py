"""What is measured on a GPU: ceilings in the same run, and each section's cells as shares of them.

Attention is of one layer. Decode reads every key and value once for the heads that share it, so its
bytes are those of the KV; it is compared with the same kernel without the block table look-up, over
contiguous KV and in the fastest of several configurations. The engine's decode step is compared
with reading weights and KV once at copy bandwidth; its model is only a `config.json`, whose weights
follow from a seed.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from penstock.engine.batch import BlockMoves
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.kv_swap import HostTier
from penstock.engine.startup import build_core
from penstock.kernels.gpu.measuring import (
    AttentionSizes,
    attend,
    attention_inputs,
    contiguous,
    seconds_of,
)
from penstock.kernels.gpu.tuning import Config
from penstock.load.engine_runs import make_request, run_requests
from penstock.load.gpu.bench import COPY, MATMUL, TO_DEVICE, TO_HOST, Bench
from penstock.load.limits import ReadWeights
from penstock.load.machine import frozen_garbage

# Launch configurations worth trying; the tuner tries more.
FEW_DECODE: tuple[Config | None, ...] = (
    None,  # the launcher's own choice
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
)
_MAX_BATCHED_TOKENS = 8192


def measure_ceilings(bench: Bench) -> None:
    """Copy bandwidth of the memory and of the link, and the rate of matrix products."""
    sizes, timer = bench.sizes, bench.timer
    source = bench.draw.random(sizes.copy_bytes // 4, dtype=torch.float32)
    seconds = timer.median_s(partial(torch.empty_like(source).copy_, source))
    bench.add_ceiling(COPY, 2 * source.nbytes / seconds)
    del source
    here = bench.draw.random(sizes.pinned_bytes // 4, dtype=torch.float32)
    host = torch.empty(here.shape, pin_memory=here.is_cuda)
    to_host = timer.median_s(lambda: host.copy_(here, non_blocking=True))
    to_device = timer.median_s(lambda: here.copy_(host, non_blocking=True))
    bench.add_ceiling(TO_HOST, here.nbytes / to_host)
    bench.add_ceiling(TO_DEVICE, here.nbytes / to_device)
    rates = []
    for size in sizes.matmuls:  # of random numbers, since zeros are multiplied faster
        left, right = bench.draw.random(size, size), bench.draw.random(size, size)
        seconds = timer.median_s(partial(torch.mm, left, right, out=torch.empty_like(left)))
        rates.append(2 * size**3 / seconds)
    bench.add_ceiling(MATMUL, max(rates))


# -- attention ------------------------------------------------------------------------------------


def measure_decode(bench: Bench) -> None:
    """Every batch with every context, and one of them in FP8."""
    sizes = bench.sizes.attention
    rows = [
        _decode_row(bench, batch, context)
        for context, batch in product(sizes.contexts, sizes.batches)
    ]
    _decode_row(bench, sizes.sweep_batch, sizes.long_context, is_fp8=True)
    long = [row["of_copy"] for row in rows if row["context"] >= sizes.long_context]
    bench.conclude("decode_attention_of_copy", long)
    bench.conclude("paged_over_contiguous", [row["over_contiguous"] for row in rows])


def _decode_row(
    bench: Bench, batch: int, context: int, *, is_fp8: bool = False
) -> Mapping[str, Any]:
    """One token for each of `batch` sequences: paged, in random blocks, and contiguous."""
    sizes, timer = bench.sizes.attention, bench.timer
    lens, ones = [context] * batch, [1] * batch
    query, kv = attention_inputs(bench.draw, sizes, lens, ones, is_fp8=is_fp8)
    paged_s = timer.median_s(lambda: attend(query, kv))
    side_by_side = partial(attend, query, contiguous(kv), is_contiguous=True)
    others = (seconds_of(timer, partial(side_by_side, config=each)) for each in FEW_DECODE)
    num_bytes = batch * context * sizes.kv_bytes_per_token // (1 + is_fp8)
    row = {
        "kv": "FP8" if is_fp8 else "16 bits",
        "batch": batch,
        "context": context,
        "ms": 1e3 * paged_s,
        "bytes_per_s": num_bytes / paged_s,
        "of_copy": num_bytes / paged_s / bench.ceilings[COPY],
        "over_contiguous": paged_s / min(others),
    }
    bench.add_row("decode_attention", row)
    return row


def measure_prefill(bench: Bench) -> None:
    """Whole prompts of every length."""
    sizes, name = bench.sizes.attention, "prefill_attention"
    for length in sizes.prefills:
        query, kv = attention_inputs(bench.draw, sizes, [length], [length])
        seconds = bench.timer.median_s(partial(attend, query, kv))
        rate = causal_flop(sizes, length) / seconds
        share = rate / bench.ceilings[MATMUL]
        row = {"prompt": length, "ms": 1e3 * seconds, "flop_per_s": rate, "of_matmul": share}
        bench.add_row(name, row)
        if length == sizes.bar_prefill:
            bench.conclude("prefill_attention_of_matmul", [share])


def causal_flop(sizes: AttentionSizes, length: int) -> int:
    """FLOP of scores and of mixing values, over all pairs of visible positions."""
    return 4 * sizes.num_heads * sizes.head_dim * (length * (length + 1) // 2)


# -- the swap of KV blocks to the host and back ---------------------------------------------------


def measure_swap(bench: Bench) -> None:
    """Blocks of all layers, scattered on both sides, in each direction."""
    num_blocks, model = bench.sizes.swap_blocks, bench.sizes.model
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
        ("out", BlockMoves(swap_outs=pairs), bench.ceilings[TO_HOST]),
        ("in", BlockMoves(swap_ins=back), bench.ceilings[TO_DEVICE]),
    ):
        seconds = bench.timer.wall_s(partial(tier.execute, moves))
        rate = num_blocks * shape.bytes_per_block / seconds
        shares.append(rate / ceiling)
        row = {"direction": direction, "blocks": num_blocks, "bytes_per_s": rate}
        bench.add_row("swap", {**row, "of_pinned_copy": shares[-1]})
    bench.conclude("swap_of_pinned_copy", shares)


# -- the engine's decode step ---------------------------------------------------------------------


def measure_step(bench: Bench) -> None:
    """Decode steps of the whole engine with every batch; `penstock bench engine --compare` shows
    what its settings do."""
    sizes, shares = bench.sizes.decode, []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.sizes.model), encoding="utf-8")
        core, info = build_core(_config(folder, bench))
        for batch in sizes.batches:
            context = sizes.prompt_tokens + sizes.output_tokens / 2  # on average
            step_s = _step_s(core, info, bench, batch)
            rate = bench.ceilings[COPY]
            bound_s = roofline_s(info, batch=batch, context=context, bytes_per_s=rate)
            shares.append(bound_s / step_s)
            row = {"batch": batch, "context": context, "step_ms": 1e3 * step_s}
            row |= {"roofline_ms": 1e3 * bound_s, "of_roofline": shares[-1]}
            bench.add_row("decode_step", row)
        core.close()
        del core
        gc.collect()
    bench.conclude("decode_step_of_roofline", shares)


def roofline_s(info: EngineInfo, *, batch: int, context: float, bytes_per_s: float) -> float:
    """Seconds to read the weights once and each sequence's KV once."""
    kv_bytes = batch * context * info.bytes_per_block / info.block_size
    return (ReadWeights.of(info).num_bytes + kv_bytes) / bytes_per_s


def _step_s(core: EngineCore, info: EngineInfo, bench: Bench, batch: int) -> float:
    """The median of the steps in which every sequence gets a token."""
    rng, sizes = random.Random(batch), bench.sizes.decode
    for _ in range(2):  # kernels are compiled, and pools filled, in the first
        prompts = [rng.choices(range(info.vocab_size), k=sizes.prompt_tokens) for _ in range(batch)]
        requests = [make_request(*each, sizes.output_tokens) for each in enumerate(prompts)]
        with frozen_garbage():
            run = run_requests(core, requests)
    return statistics.median(step.step_s for step in run.phase("decode"))


def _config(model: str, bench: Bench) -> EngineConfig:
    """An engine with room for the largest batch and no more."""
    sizes, block_size = bench.sizes.decode, bench.sizes.attention.block_size
    num_tokens = sizes.prompt_tokens + sizes.output_tokens
    blocks_per_seq = -(-num_tokens // block_size) + 1
    most = max(sizes.batches)
    return EngineConfig(
        model=ModelConfig(model=model, load_format="dummy", max_model_len=num_tokens),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=blocks_per_seq * (most + 1),
            swap_space=0,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=_MAX_BATCHED_TOKENS),
        device=DeviceConfig(device=bench.device.type),  # type: ignore[arg-type]
    )


SECTIONS: Mapping[str, Callable[[Bench], None]] = {
    "decode_attention": measure_decode,
    "prefill_attention": measure_prefill,
    "swap": measure_swap,
    "decode_step": measure_step,
}
