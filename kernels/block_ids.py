"""Lists of block ids on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def block_ids_on(device: torch.device, ids: Sequence[int]) -> Tensor:
    """int64 [n] on the device. A GPU gets them by way of pinned memory, behind what it was given
    before: the host would wait for all of that if they came from memory of any other kind."""
    host_ids = torch.tensor(ids, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host_ids.to(device, non_blocking=True)
