"""Copying lists of block ids to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def block_ids_on(device: torch.device, ids: Sequence[int]) -> Tensor:
    """int64 [n] on the device. A GPU gets them from pinned memory, asynchronously: a copy from
    pageable memory would make the host wait for all earlier launches."""
    host_ids = torch.tensor(ids, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host_ids.to(device, non_blocking=True)
