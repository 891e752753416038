"""A whole workload through the engine and through Hugging Face, on the same weights.

The engine decides itself what runs together. `generate` is told: batches of every size, sorted by
the prompts' lengths, and the best of them once more sorted by the outputs' lengths, which no
caller knows beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.config import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.load.garbage import frozen_garbage
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.hugging_face import Throughput, run_continuous, run_static
from penstock.load.gpu.model import checkpoint, free_memory, hugging_face_model
from penstock.load.gpu.workload import Job, by_output, by_prompt, make_jobs

_SECTION = "end_to_end"
_MAX_NUM_SEQS, _MAX_BATCHED_TOKENS = 256, 8192
_NUM_WARM_UP_TOKENS = 4


def measure(bench: Bench) -> None:
    """Ours first, then theirs: both models at once would leave less memory for either's KV."""
    vocab_size = bench.sizes.model["vocab_size"]
    jobs = make_jobs(bench.sizes.end_to_end.trace, vocab_size=vocab_size, seed=1)
    # Other prompts than the workload's, which would be found in a prefix cache.
    warm_up = [
        replace(job, num_output_tokens=_NUM_WARM_UP_TOKENS)
        for job in make_jobs(bench.sizes.end_to_end.trace, vocab_size=vocab_size, seed=0)
    ]
    with checkpoint(bench.sizes) as model:
        ours = _run_engine(bench, model, jobs, warm_up)
        _add_row(bench, "penstock", ours, ours)
        theirs = hugging_face_model(model, bench.device)
        _run_generate(bench, theirs, jobs, ours)
        _run_continuous(bench, theirs, jobs, warm_up, ours)
    del theirs
    free_memory()


def run_jobs(core: EngineCore, jobs: Sequence[Job]) -> Throughput:
    """Submit all at once and step until the last has ended."""
    done = Throughput(outputs={job.index: [] for job in jobs})
    began_s = time.perf_counter()
    for job in jobs:
        params = SamplingParams(temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True)
        core.add(
            Request(
                request_id=str(job.index),
                prompt_token_ids=job.prompt,
                sampling_params=params,
                arrival_s=float(job.index),
            )
        )
    while core.has_work():
        for output in core.step():
            done.outputs[int(output.request_id)].extend(output.token_ids)
    done.seconds = time.perf_counter() - began_s
    done.num_tokens = sum(map(len, done.outputs.values()))
    assert done.num_tokens == sum(job.num_output_tokens for job in jobs), "an output ended early"
    return done


def _run_engine(
    bench: Bench, model: ModelConfig, jobs: Sequence[Job], warm_up: Sequence[Job]
) -> Throughput:
    longest = max(len(job.prompt) + job.num_output_tokens for job in jobs)
    core, _ = build_core(
        EngineConfig(
            model=replace(model, max_model_len=longest),
            scheduler=SchedulerConfig(
                max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_MAX_BATCHED_TOKENS
            ),
            device=DeviceConfig(device=bench.device.type),  # type: ignore[arg-type]
        )
    )
    try:
        run_jobs(core, warm_up)
        with frozen_garbage():
            return run_jobs(core, jobs)
    finally:
        core.close()
        del core
        free_memory()


def _run_generate(bench: Bench, model: Any, jobs: Sequence[Job], ours: Throughput) -> None:
    """Batches of every size; the figure is of the fastest. That one then knows the outputs'
    lengths too."""
    sizes, runs = bench.sizes.end_to_end, []
    for batch in bench.in_time(_SECTION, [*sizes.hf_batches, len(jobs)]):
        limit_s = min(sizes.hf_limit_s, bench.remaining_s)
        runs.append(run_static(model, by_prompt(jobs), batch_size=batch, limit_s=limit_s))
        _add_row(bench, f"generate, batch {runs[-1].batch_size}", runs[-1], ours)
    speedups = [ours.tokens_per_s / run.tokens_per_s for run in runs]
    bench.conclude("speedup_over_hf_generate", speedups, num_cells=len(sizes.hf_batches) + 1)
    if not runs:
        return
    best = max(runs, key=lambda run: run.tokens_per_s).batch_size
    for name in bench.in_time(_SECTION, [f"generate, batch {best}, output lengths known"]):
        limit_s = min(sizes.hf_limit_s, bench.remaining_s)
        run = run_static(model, by_output(jobs), batch_size=best, limit_s=limit_s)
        _add_row(bench, name, run, ours)


def _run_continuous(
    bench: Bench, model: Any, jobs: Sequence[Job], warm_up: Sequence[Job], ours: Throughput
) -> None:
    for name in bench.in_time(_SECTION, ["continuous batching"]):
        try:
            run = run_continuous(model, jobs, warm_up, limit_s=bench.remaining_s)
        except Exception as error:  # new there, and what is wrong with it is the result
            bench.results.add_note(_SECTION, f"{name}: {type(error).__name__}: {error}")
        else:
            _add_row(bench, name, run, ours)


def _add_row(bench: Bench, name: str, run: Throughput, ours: Throughput) -> None:
    """Note a run, and in how many of its jobs the engine's tokens are the same."""
    outputs = run.outputs
    equal = [outputs[index] == ours.outputs[index] for index in outputs]
    first = [outputs[index][0] == ours.outputs[index][0] for index in outputs]
    bench.results.add_row(
        _SECTION,
        {
            "system": name,
            "jobs": len(outputs),
            "tokens_per_s": run.tokens_per_s,
            "speedup": ours.tokens_per_s / run.tokens_per_s,
            "equal_first_tokens": sum(first) / len(first),
            "equal_outputs": sum(equal) / len(equal),
        },
    )
