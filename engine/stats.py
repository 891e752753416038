"""The engine's own numbers, gathered from where they are kept."""

from __future__ import annotations

from penstock.engine.messages import EngineStats
from penstock.engine.scheduling import Scheduler


def snapshot(scheduler: Scheduler, *, bytes_per_block: int) -> EngineStats:
    """All of them now. What a quick step takes is a few times this: not for every one."""
    blocks = scheduler.blocks
    device, host = blocks.tiers.device, blocks.tiers.host
    counted, moved = scheduler.counters, blocks.counters
    num_slots, num_empty = scheduler.slots()
    return EngineStats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting,
        num_tokens_waiting=scheduler.num_tokens_waiting,
        queue_tokens_per_s=scheduler.queue_tokens_per_s,
        prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
        num_requests_swapped=blocks.num_swapped_sequences,
        num_blocks_used=device.num_held,
        num_blocks_cached=device.num_cached,
        num_blocks=device.num_blocks,
        num_host_blocks_kept=host.num_held,
        num_host_blocks_cached=host.num_cached,
        num_host_blocks=host.num_blocks,
        num_slots_allocated=num_slots,
        num_slots_empty=num_empty,
        num_requests_refused_total=counted.num_refused,
        num_preemptions_total=counted.num_preemptions,
        num_swap_preemptions_total=counted.num_swaps,
        num_recompute_preemptions_total=counted.num_recomputes,
        num_swap_fallbacks_total=counted.num_fallbacks,
        num_blocks_copied_total=moved.num_copied,
        num_blocks_evicted_total=device.num_evictions,
        num_host_blocks_evicted_total=host.num_evictions,
        swapped_out_bytes_total=moved.num_swapped_out * bytes_per_block,
        swapped_in_bytes_total=moved.num_swapped_in * bytes_per_block,
        swap_out_seconds_total=counted.swap_out_s,
        swap_in_seconds_total=counted.swap_in_s,
        num_steps_total=counted.num_steps,
        prompt_tokens_total=counted.prompt_tokens,
        generation_tokens_total=counted.generation_tokens,
        prefix_cache_queries_total=moved.prefix_queries,
        prefix_cache_hits_total=moved.prefix_hits,
        prefix_cache_host_hits_total=moved.prefix_host_hits,
    )
