"""A decoder whose program runs in torch, with Triton's kernels on a GPU.

On a CPU without a compiler it is the reference that the kernels are held against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import weight_bytes
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import StepOutput
from penstock.engine.models.writer import DecoderWriter
from penstock.engine.program.torch_backend import TorchBackend, TorchMeeting
from penstock.kernels.program import Buffer
from penstock.kernels.token_masks import TokenMasks
from penstock.kernels.torch_operations import NO_STEP, TorchStep
from penstock.kernels.torch_program import Rows, TorchProgram, read


class TorchModel:
    """A `LanguageModel`: a decoder as it is.

    Args:
        make_backend: packs its layers.

    Attributes:
        program: its records before the head, as `write` wrote them.
        can_be_captured: graphs can replay its steps; the rows of adapters would stay the same.
    """

    def __init__(
        self,
        decoder: Decoder,
        make_backend: Callable[[TorchMeeting], TorchBackend] = TorchBackend,
    ) -> None:
        self.decoder, config = decoder, decoder.config
        self.state_spec, self.needs_prompt_lens = decoder.state_spec, decoder.needs_prompt_lens
        self.weight_bytes = weight_bytes(decoder)
        self.num_threads = torch.get_num_threads()
        self.can_be_captured = not decoder.has_adapters
        self._dtype, self.is_invariant = decoder.dtype, decoder.is_invariant
        meeting = TorchMeeting(
            decoder.ranks, decoder.norm.weight, decoder.vocab_size,
            has_before=not config.has_embedding, has_after=not config.has_head,
        )  # fmt: skip
        self._writer = DecoderWriter(decoder, make_backend(meeting))
        self._written_for: tuple[object, ...] = ()
        self._num_run = 0
        self.program = TorchProgram(self._dtype)
        self._hidden = Buffer("hidden", 0, torch.empty(0))
        self._heads = {each: self._write_head(are_sampled=each) for each in (False, True)}

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        hidden: Tensor = read(self._run(input_ids, context), self._hidden)
        return hidden

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,  # noqa: ARG002  (a sampler draws)
        draws: Tensor | None = None,  # noqa: ARG002
        masks: TokenMasks | None = None,  # noqa: ARG002
    ) -> StepOutput:
        rows = self._run(input_ids, context)
        features = tuple(read(rows, each) for each in self._writer.features)
        return self.end(read(rows, self._hidden), sampled_tokens, features)

    def _run(self, input_ids: Tensor, context: ForwardContext) -> Rows:
        self.write(context.kv_pool)
        rows: Rows = {}
        self.program.run(self.begin(input_ids, context), rows)
        return rows

    def write(self, kv_pool: Tensor) -> None:
        """Write the program for this pool, unless it is."""
        # A pool of another shape may begin at the same address; an empty one has none.
        pool = (kv_pool.data_ptr(), kv_pool.shape)
        if pool != self._written_for:
            self._num_run += self.program.num_run
            self.program = TorchProgram(self._dtype)
            self._hidden = self._writer.write(self.program, kv_pool)
            self.program.compile((self._hidden, *self._writer.features))
            self._written_for = pool

    @property
    def num_parts_done(self) -> int:
        """Records that were run so far."""
        return self._num_run + self.program.num_run

    def begin(self, input_ids: Tensor, context: ForwardContext) -> TorchStep:
        """What the program reads of a step."""
        positions, lens = context.positions, context.prompt_lens
        rotary = tuple(each(positions, lens, self._dtype) for each in self.decoder.rotaries)
        return TorchStep(
            token_ids=input_ids,
            layout=context.layout,
            positions=positions,
            rotary=rotary,
            is_invariant=self.is_invariant,
        )

    def hidden_of(self, rows: Rows) -> Tensor:
        """What the program leaves."""
        hidden: Tensor = read(rows, self._hidden)
        return hidden

    def end(
        self, hidden: Tensor, sampled_tokens: Tensor | None, features: tuple[Tensor, ...] = ()
    ) -> StepOutput:
        """The output of a step of these hidden states."""
        sampled = hidden if sampled_tokens is None else hidden[sampled_tokens]
        logits = self._logits(sampled, are_sampled=True)
        return StepOutput(hidden=hidden, logits=logits, features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden, are_sampled=False)

    def _write_head(self, *, are_sampled: bool) -> TorchProgram:
        program = TorchProgram(self._dtype)
        if self._writer.head is not None:
            y, x = (program.buffer(each, 0) for each in ("logits", "hidden"))
            self._writer.head.write(program, y, x, are_sampled=are_sampled)
            program.compile((y,))
        return program

    def _logits(self, hidden: Tensor, *, are_sampled: bool) -> Tensor:
        if self._writer.head is None:
            return hidden[:, :0]
        rows: Rows = {"hidden": hidden}
        self._heads[are_sampled].run(NO_STEP, rows)
        logits: Tensor = rows["logits"]
        return logits
