"""Copies a step's arrays to the device: one copy from reused pinned memory.

The host may fill a buffer while the device runs earlier steps; it waits for a buffer whose copy has
not run yet, so with two of them one step can be prepared while another runs. On a CPU the same code
runs with streams that do nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, at least that of torch's own tensors
_NUM_BUFFERS = 2
_DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Host memory, free to be written once the event `is_copied` has passed."""

    memory: Tensor  # uint8
    is_copied: Any


class InputStaging:
    """Arrays in, tensors out.

    Args:
        num_bytes: maximum size of a step's arrays, each padded by `padded_num_bytes`.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._runtime: Any = torch.cuda if is_cuda else torch.cpu
        # One is enough here: a step's copy runs after everything that reads the previous one's.
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffers = itertools.cycle(
            _Buffer(
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda),
                self._runtime.Event(),
            )
            for _ in range(_NUM_BUFFERS)
        )

    def upload(self, arrays: Iterable[npt.NDArray[Any]]) -> list[Tensor]:
        """The arrays (int32 or int64) as tensors on the device, valid until the next call."""
        buffer = next(self._buffers)
        buffer.is_copied.synchronize()
        memory = buffer.memory.numpy()
        tensors, end = [], 0
        for array in arrays:
            part = slice(end, end + array.nbytes)
            assert part.stop <= len(memory), f"no room for inputs beyond {len(memory)} bytes"
            np.copyto(memory[part].view(array.dtype).reshape(array.shape), array)
            tensor = self._on_device[part].view(_DTYPES[array.dtype.name])
            tensors.append(tensor.view(array.shape))
            end += padded_num_bytes(array.nbytes)
        self._on_device[:end].copy_(buffer.memory[:end], non_blocking=True)
        buffer.is_copied.record(self._runtime.current_stream())
        return tensors


def padded_num_bytes(num_bytes: int) -> int:
    """Rounded up, so that the next array is aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
