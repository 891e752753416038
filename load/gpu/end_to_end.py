"""A whole workload through the engine and through Hugging Face, with the same weights.

The engine decides by itself what runs together. `generate` gets batches of every size, sorted by
prompt length, and the best of them again sorted by output length, which no caller knows
beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from penstock.engine.config import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.startup import build_core
from penstock.load.engine_runs import greedy_request
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.model import (
    Job,
    batches,
    by_output,
    by_prompt,
    checkpoint,
    free_memory,
    hugging_face_model,
    make_jobs,
)
from penstock.load.machine import frozen_garbage
from penstock.load.peers.workers.hf import padded

_NO_TOKEN = -1
_NUM_HF_WARM_UP_TOKENS = 2
# On a CPU continuous batching does not find out how much memory it may take.
_CPU_BLOCKS: dict[str, Any] = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}


@dataclass(kw_only=True)
class Throughput:
    """The part of a workload that was done; `outputs` has tokens by job index."""

    batch_size: int = 0  # of static batches; 0 where there are none
    num_tokens: int = 0
    seconds: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_static(model: Any, jobs: Sequence[Job], *, batch_size: int, limit_s: float) -> Throughput:
    """Run `generate` batch by batch up to the limit, but at least one.

    A batch runs until its longest output is complete; only the requested tokens count.
    `batch_size` is halved until a batch fits into the device's memory.
    """
    while True:
        try:
            return _run_static(model, jobs, batch_size, limit_s)
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
        batch_size = -(-batch_size // 2)
        free_memory()


def _run_static(model: Any, jobs: Sequence[Job], batch_size: int, limit_s: float) -> Throughput:
    done = Throughput(batch_size=batch_size)
    for number, batch in enumerate(batches(jobs, batch_size)):
        if number == 0:
            _generate(model, batch, num_tokens=_NUM_HF_WARM_UP_TOKENS)
        elif done.seconds >= limit_s:
            break
        began_s = time.perf_counter()
        rows = _generate(model, batch, num_tokens=max(job.num_output_tokens for job in batch))
        done.seconds += time.perf_counter() - began_s
        for job, row in zip(batch, rows, strict=True):
            done.outputs[job.index] = row[: job.num_output_tokens]
            done.num_tokens += job.num_output_tokens
    return done


def run_continuous(
    model: Any, jobs: Sequence[Job], warm_up: Sequence[Job], *, limit_s: float
) -> Throughput:
    """Run the whole workload, submitted at once, after a warm-up with other prompts, since the
    manager may cache prompts. Raises TimeoutError if it exceeds the limit, RuntimeError if it
    fails."""
    is_cuda = model.device.type == "cuda"
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**_CPU_BLOCKS if not is_cuda else {}),
    )
    manager.start()
    try:
        _submit_and_wait(manager, warm_up, prefix="warm", limit_s=limit_s)
        return _submit_and_wait(manager, jobs, prefix="job", limit_s=limit_s)
    finally:
        manager.stop(block=True)


def _generate(model: Any, batch: Sequence[Job], *, num_tokens: int) -> list[list[int]]:
    """Greedy outputs of one batch."""
    ids, mask = padded([job.prompt for job in batch])
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=num_tokens
        ),
    )
    rows: list[list[int]] = output[:, ids.shape[1] :].tolist()  # waits for the device
    assert len(rows[0]) == num_tokens, "an output ended early"
    return rows


def _submit_and_wait(
    manager: Any, jobs: Sequence[Job], *, prefix: str, limit_s: float
) -> Throughput:
    done, began_s = Throughput(), time.perf_counter()
    for job in jobs:
        manager.add_request(
            list(job.prompt),
            request_id=f"{prefix} {job.index}",
            max_new_tokens=job.num_output_tokens,
            eos_token_id=_NO_TOKEN,
        )
    while len(done.outputs) < len(jobs):
        result = manager.get_result(timeout=1.0)
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is None and not manager.is_running():
            raise RuntimeError("continuous batching has stopped")
        if result is not None and result.is_finished():
            index = int(result.request_id.split()[1])
            done.outputs[index] = list(result.generated_tokens)
        if time.perf_counter() - began_s > limit_s:
            raise TimeoutError(f"{len(done.outputs)} of {len(jobs)} in {limit_s:.0f} s")
    done.seconds = time.perf_counter() - began_s
    done.num_tokens = sum(map(len, done.outputs.values()))
    return done


# -- ours and theirs ----------------------------------------------------------------------------

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
        core.add(greedy_request(job.index, job.prompt, job.num_output_tokens))
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
    """Batches of every size; the figure is that of the fastest, which then runs once more with
    known output lengths."""
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
    """Note a run, and in how many of its jobs the tokens are the same as the engine's."""
    pairs = [(tokens, ours.outputs[index]) for index, tokens in run.outputs.items()]
    row = {
        "system": name,
        "jobs": len(pairs),
        "tokens_per_s": run.tokens_per_s,
        "speedup": ours.tokens_per_s / run.tokens_per_s,
        "equal_first_tokens": sum(its[0] == own[0] for its, own in pairs) / len(pairs),
        "equal_outputs": sum(its == own for its, own in pairs) / len(pairs),
    }
    bench.results.add_row(_SECTION, row)
