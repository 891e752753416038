"""Sampled tokens: as inputs of the next step, and copied to the host.

On a CPU tokens are known when the step ends (`TokensAtOnce`). On a GPU the next step is launched
before that (`TokensOnDevice`): the device keeps the last token of every row and writes it into the
next step's inputs; the host has a placeholder until its copy arrives.

    compute   step N … sample → last ┐  step N + 1: last → inputs …
    side                             └ token ids → pinned memory ◆    the host waits for ◆ alone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.config import SchedulerConfig
from penstock.engine.runner.input_batch import InputBatch, StepInputs, staging_num_bytes
from penstock.engine.runner.staging import InputStaging
from penstock.engine.sampling.sampler import ChosenTokens, Sampled


class Tokens(Protocol):
    """The tokens of one step."""

    def read(self) -> Sampled:
        """Wait for the tokens and return them."""
        ...


class TokenPath(Protocol):
    """How sampled tokens reach the next step and the host."""

    @property
    def async_scheduling(self) -> bool:
        """Whether a step can be launched before the previous step's tokens are read."""
        ...

    def input_ids(self, inputs: StepInputs) -> Tensor:
        """int64 [num_tokens], including tokens sampled by earlier steps."""
        ...

    def wait_for_tokens(self) -> None:
        """Wait until the host knows every token of earlier steps."""
        ...

    def append(self, inputs: StepInputs, chosen: ChosenTokens | Sampled) -> Tokens:
        """Append a step's tokens to their sequences."""
        ...


class TokensAtOnce:
    """Tokens are read as soon as they are sampled."""

    async_scheduling = False

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch

    def input_ids(self, inputs: StepInputs) -> Tensor:
        return inputs.input_ids

    def wait_for_tokens(self) -> None:
        """Nothing to wait for."""

    def append(self, inputs: StepInputs, chosen: ChosenTokens | Sampled) -> Sampled:
        return self._batch.append(inputs, chosen.read())


class TokensInFlight:
    """A step's tokens while they are copied to the host.

    Args:
        chosen: on the device, kept until they are copied.
        copied: the same in host memory, once the event `is_copied` has passed.
        destinations: where to store the tokens of some rows: row → its sequence's token list, and
            an index into it.
        select: checks the drafts, if there are any, and keeps what they leave.
    """

    def __init__(
        self,
        chosen: ChosenTokens,
        copied: ChosenTokens,
        is_copied: Any,
        destinations: dict[int, tuple[list[int], int]],
        select: Callable[[Sampled], Sampled] | None,
    ) -> None:
        self._on_device: ChosenTokens | None = chosen
        self._copied, self._is_copied, self._destinations = copied, is_copied, destinations
        self._select = select
        self._sampled: Sampled | None = None

    @property
    def is_read(self) -> bool:
        return self._sampled is not None

    def read(self) -> Sampled:
        if self._sampled is None:
            self._is_copied.synchronize()
            sampled, self._on_device = self._copied.read(), None
            for row, (token_ids, index) in self._destinations.items():
                token_ids[index] = sampled.token_ids[row]
            self._sampled = sampled if self._select is None else self._select(sampled)
        return self._sampled


class TokensOnDevice:
    """Tokens are inputs of the next step before the host knows them.

    Args:
        num_rows: rows of the batch.
    """

    async_scheduling = True

    def __init__(self, batch: InputBatch, num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._runtime: Any = torch.cuda if is_cuda else torch.cpu
        self._side = self._runtime.Stream()
        self._is_pinned = is_cuda
        self._batch = batch
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._in_flight: deque[TokensInFlight] = deque()

    def input_ids(self, inputs: StepInputs) -> Tensor:
        assert inputs.token_rows is not None
        indices, rows = inputs.token_rows.awaited_indices, inputs.token_rows.awaited_rows
        if len(indices):
            inputs.input_ids.index_copy_(0, indices, self._last.index_select(0, rows))
        return inputs.input_ids

    def wait_for_tokens(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().read()

    def append(self, inputs: StepInputs, chosen: ChosenTokens | Sampled) -> TokensInFlight:
        assert isinstance(chosen, ChosenTokens), "tokens of a CPU"
        assert inputs.token_rows is not None
        self._last.index_copy_(0, inputs.token_rows.sampled_rows, chosen.token_ids)
        self._side.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._side):
            copied = chosen.map(self._copy)
        is_copied = self._runtime.Event()
        is_copied.record(self._side)
        plain = inputs.plain_rows
        expected = self._batch.expect([inputs.sampled_seq_ids[row] for row in plain])
        destinations = dict(zip(plain, expected, strict=True))
        # Its sequences with drafts are not in a later step yet.
        select = partial(self._batch.append_checked, inputs) if inputs.drafts else None
        tokens = TokensInFlight(chosen, copied, is_copied, destinations, select)
        while self._in_flight and self._in_flight[0].is_read:
            self._in_flight.popleft()
        self._in_flight.append(tokens)
        return tokens

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy to host memory, on the current stream."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
        return host.copy_(tensor, non_blocking=True)


def make_token_path(
    config: SchedulerConfig,
    *,
    max_blocks: int,
    block_size: int,
    device: torch.device,
    draws_tokens: bool = True,
) -> tuple[InputBatch, TokenPath]:
    """The sequences of a device, and how their tokens travel.

    Args:
        draws_tokens: as in `InputBatch`.
    """
    is_overlapped = can_schedule_async(device)
    num_seqs, staging = config.max_num_seqs, None
    if is_overlapped:
        num_bytes = staging_num_bytes(config.max_num_batched_tokens, num_seqs, max_blocks)
        staging = InputStaging(num_bytes, device)
    batch = InputBatch(
        max_num_seqs=num_seqs,
        max_blocks=max_blocks,
        block_size=block_size,
        device=device,
        staging=staging,
        draws_tokens=draws_tokens,
    )
    if is_overlapped:
        return batch, TokensOnDevice(batch, num_seqs, device)
    return batch, TokensAtOnce(batch)


def can_schedule_async(device: torch.device) -> bool:
    """Whether launches on the device return before they are done."""
    return device.type == "cuda"
