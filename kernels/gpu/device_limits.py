"""Properties of a device on which launch configurations depend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """
    Attributes:
        num_processors: streaming multiprocessors, or compute units.
        shared_bytes: the shared memory one program can have.
    """

    num_processors: int
    shared_bytes: int


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a GPU, or of an imagined small one where kernels are interpreted on a CPU."""
    if device.type == "cpu":
        return DeviceLimits(num_processors=4, shared_bytes=64 * 1024)
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return DeviceLimits(
        num_processors=found["multiprocessor_count"], shared_bytes=found["max_shared_mem"]
    )
