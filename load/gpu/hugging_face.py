"""A workload through `transformers`: `generate` in static batches, and its continuous batching.

Knows nothing of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from penstock.load.gpu.model import free_memory
from penstock.load.gpu.workload import Job, batches

_NO_TOKEN = -1
_NUM_WARM_UP_TOKENS = 2
# On a CPU continuous batching does not find out how much memory it may take.
_CPU_BLOCKS: dict[str, Any] = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}


@dataclass(kw_only=True)
class Throughput:
    """What was done of a workload.

    Attributes:
        batch_size: of static batches; 0 where there are none.
        outputs: tokens by the index of a job, for those that were run.
    """

    batch_size: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_static(model: Any, jobs: Sequence[Job], *, batch_size: int, limit_s: float) -> Throughput:
    """Batch after batch of `generate`, until the limit; one at least.

    A batch runs until its longest output is there; only the tokens that were asked for count.

    Args:
        jobs: in the order in which they are batched.
        batch_size: halved until a batch fits into the device's memory.
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
            _generate(model, batch, num_tokens=_NUM_WARM_UP_TOKENS)
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
    """The whole workload, submitted at once.

    Args:
        warm_up: run before; of other prompts, since it may find those of `jobs` in its cache.

    Raises:
        TimeoutError: it takes longer than the limit.
        RuntimeError: it failed.
    """
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
    """Greedy outputs of one batch, padded on the left."""
    width = max(len(job.prompt) for job in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(batch):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=num_tokens
        ),
    )
    rows: list[list[int]] = output[:, width:].tolist()  # waits for the device
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
