"""The parts of an engine's step: which calls make them up.

What no part accounts for is `other`: moving blocks, making the result, the step loop itself. Knows
nothing of workloads.
"""

from __future__ import annotations

import torch

from penstock.engine.models.cpu_decoder import CpuDecoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.step_output import DrawnTokens
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.sampling.sampler import ChosenTokens, Sampler
from penstock.engine.scheduling import Scheduler
from penstock.load.engine.call_timer import CallTimer, Places, no_wait

_PLACES: Places = {
    "schedule": ((Scheduler, "schedule"),),
    "prepare": ((InputBatch, "update"), (InputBatch, "prepare")),
    "forward": (
        (CpuDecoder, "step"),  # draws too, in the same call
        (CpuDecoder, "logits"),
        (Decoder, "forward"),
        (Decoder, "logits"),
    ),
    "sample": ((Sampler, "choose"), (ChosenTokens, "read"), (DrawnTokens, "read")),
    "update": ((Scheduler, "update"),),
}
OTHER = "other"
PARTS = (*_PLACES, OTHER)


def step_timer(device: str) -> CallTimer:
    """A timer of a step's parts; on a GPU each part waits for what it launched."""
    is_cuda = torch.device(device).type == "cuda"
    return CallTimer(_PLACES, wait=torch.cuda.synchronize if is_cuda else no_wait)


def split_step(timer: CallTimer, step_s: float) -> dict[str, float]:
    """Seconds of every part of the step that just took `step_s`; they add up to it."""
    parts = timer.take()
    return {**parts, OTHER: step_s - sum(parts.values())}
