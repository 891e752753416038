"""The end of a CPU's step as C calls: logits of the sampled rows, and a token drawn from each.

Not known here: layers, what a request asked for beyond a draw.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from penstock.engine.models.packed_linear import Calls, PackedLinear
from penstock.engine.models.step_output import DrawnTokens, StepOutput
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
        self._num_rows = addressof(step) + Step.num_sampled.offset
        self._product = self.matrix.args(self._logits, self._hidden, self._num_rows)
        self._draw = DrawUniformsArgs()
        self._sample = SampleTokensArgs(vocab_size=self.matrix.out_features)
        self._uniforms = torch.empty(0)
        self._given: tuple[Tensor | None, ...] = ()

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
        self._draw.num_rows = self._sample.num_rows = addressof(_NO_ROWS)

    def bind(
        self,
        num_tokens: int,
        sampled_tokens: Tensor | None,
        parameters: Tensor | None,
        draws: Tensor | None,
    ) -> StepOutput:
        """Point the calls to what they read; where they will write.

        Args:
            sampled_tokens, parameters, draws: as `CpuDecoder.step` has them.
        """
        step = self._step
        num_rows = num_tokens if sampled_tokens is None else len(sampled_tokens)
        logits = self._room(num_rows)
        step.num_sampled, step.num_gathered = num_rows, 0
        if sampled_tokens is not None:
            step.num_gathered = num_rows
            step.sampled_tokens = sampled_tokens.data_ptr()
        rows = self._hidden if sampled_tokens is None else self._gathered
        self._product.x, self._product.y = rows.data_ptr(), logits.data_ptr()
        self._given = (sampled_tokens, parameters, draws)  # their memory is pointed to
        return StepOutput(
            hidden=self._hidden[:num_tokens],
            logits=logits,
            drawn=self._bind_draw(logits, parameters, draws),
        )

    def logits(self, hidden: Tensor, *, is_shared: bool) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], good until the next call"""
        hidden, logits = hidden.contiguous(), self._room(len(hidden))
        num_rows = ctypes.c_int64(len(hidden))
        args = self.matrix.args(logits, hidden, addressof(num_rows))
        self._library.run("linear", args, is_shared=is_shared)
        return logits

    def _bind_draw(
        self, logits: Tensor, parameters: Tensor | None, draws: Tensor | None
    ) -> DrawnTokens | None:
        draw, sample = self._draw, self._sample
        draw.num_rows = sample.num_rows = addressof(_NO_ROWS)
        if parameters is None:
            return None
        self._uniforms = uniforms = torch.empty(len(logits), dtype=torch.float64)
        drawn = DrawnTokens(len(logits))
        if draws is not None:
            draw.num_rows, draw.uniforms = self._num_rows, uniforms.data_ptr()
            draw.seeds, draw.indices, draw.positions = (each.data_ptr() for each in draws)
        sample.token_ids, sample.is_valid = drawn.token_ids.data_ptr(), drawn.is_valid.data_ptr()
        sample.num_rows = self._num_rows
        sample.logits, sample.uniforms = logits.data_ptr(), uniforms.data_ptr()
        columns = (each.data_ptr() for each in parameters)
        sample.temperature, sample.top_k, sample.top_p, sample.min_p = columns
        return drawn

    def _room(self, num_rows: int) -> Tensor:
        """Kept: fresh pages cost more than small products."""
        if num_rows > len(self._logits):
            self._logits = self._logits.new_empty(num_rows, self.matrix.out_features)
        return self._logits[:num_rows]


_NO_ROWS = ctypes.c_int64(0)
