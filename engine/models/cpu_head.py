"""The end of a CPU's step as C calls: logits of the sampled rows, and a token drawn from each.

Not known here: layers, what a request asked for beyond a draw.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from penstock.engine.models.packed_linear import Calls, PackedLinear
from penstock.engine.models.step_output import StepOutput
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import (
    DrawUniformsArgs,
    GatherRowsArgs,
    SampleTokensArgs,
    Step,
)


class CpuHead:
    """The matrix of the vocabulary and what follows it.

    Args:
        weight: [vocab_size, hidden_size]
        step: says how many rows are sampled, and which.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, step: Step) -> None:
        self.matrix = PackedLinear(library, weight)
        self._library = library
        self._step = step
        self._logits = torch.empty(0, self.matrix.out_features, dtype=weight.dtype)
        self._hidden = self._gathered = self._logits
        num_rows = addressof(step) + Step.num_sampled.offset
        self._product = self.matrix.args(self._logits, self._hidden, num_rows)
        self._draw = DrawUniformsArgs(num_rows=num_rows)
        self._sample = SampleTokensArgs(num_rows=num_rows, vocab_size=self.matrix.out_features)

    def calls(self, hidden: Tensor) -> Calls:
        """What follows once all rows of a step are in `hidden` [max_tokens, hidden_size]."""
        self._hidden, self._gathered = hidden, torch.empty_like(hidden)
        gather = GatherRowsArgs(
            y=self._gathered.data_ptr(),
            x=hidden.data_ptr(),
            step=addressof(self._step),
            size=hidden.shape[1],
        )
        return [
            ("gather_rows", gather),
            ("linear", self._product),
            ("draw_uniforms", self._draw),
            ("sample_tokens", self._sample),
        ]

    def skip(self) -> None:
        """Let the calls do nothing."""
        self._step.num_sampled = self._step.num_gathered = 0

    def bind(
        self, num_tokens: int, sampled_tokens: Tensor | None, parameters: Tensor, draws: Tensor | None
    ) -> StepOutput:
        """Point the calls to what they read; where they will write.

        Args:
            sampled_tokens, parameters, draws: as `CpuDecoder.step` has them; they stay where they
                are until the calls have run for the last time.
        """
        step, sample = self._step, self._sample
        num_rows = num_tokens if sampled_tokens is None else len(sampled_tokens)
        logits = self._room(num_rows)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        is_valid = torch.empty(num_rows, dtype=torch.bool)
        uniforms = torch.empty(num_rows, dtype=torch.float64)
        step.num_sampled, step.num_gathered = num_rows, 0
        if sampled_tokens is not None:
            step.num_gathered = num_rows
            step.sampled_tokens = sampled_tokens.data_ptr()
        rows = self._hidden if sampled_tokens is None else self._gathered
        self._product.x, self._product.y = rows.data_ptr(), logits.data_ptr()
        self._point_to_draws(draws, uniforms)
        sample.token_ids, sample.is_valid = token_ids.data_ptr(), is_valid.data_ptr()
        sample.logits, sample.uniforms = logits.data_ptr(), uniforms.data_ptr()
        columns = (each.data_ptr() for each in parameters)
        sample.temperature, sample.top_k, sample.top_p, sample.min_p = columns
        self._bound = (sampled_tokens, parameters, draws, uniforms)  # their memory is pointed to
        return StepOutput(
            hidden=self._hidden[:num_tokens], logits=logits, drawn=(token_ids, is_valid)
        )

    def logits(self, hidden: Tensor, *, is_shared: bool) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], good until the next call"""
        hidden, logits = hidden.contiguous(), self._room(len(hidden))
        num_rows = ctypes.c_int64(len(hidden))
        args = self.matrix.args(logits, hidden, addressof(num_rows))
        self._library.run("linear", args, is_shared=is_shared)
        return logits

    def _point_to_draws(self, draws: Tensor | None, uniforms: Tensor) -> None:
        draw = self._draw
        draw.uniforms = uniforms.data_ptr()
        draw.num_rows = addressof(self._step) + Step.num_sampled.offset
        if draws is None:
            draw.num_rows = addressof(_NO_ROWS)
        else:
            draw.seeds, draw.indices, draw.positions = (each.data_ptr() for each in draws)

    def _room(self, num_rows: int) -> Tensor:
        """Kept: fresh pages cost more than small products."""
        if num_rows > len(self._logits):
            self._logits = self._logits.new_empty(num_rows, self.matrix.out_features)
        return self._logits[:num_rows]


_NO_ROWS = ctypes.c_int64(0)
