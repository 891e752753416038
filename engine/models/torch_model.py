"""A decoder whose program runs in torch, with Triton's kernels on a GPU.

On a CPU without a compiler it is the reference that the kernels are held against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import NUM_VERIFY_ROWS, StepOutput
from penstock.engine.models.writer import DecoderWriter
from penstock.engine.program.torch_backend import TorchBackend, TorchMeeting
from penstock.kernels.program import Buffer
from penstock.kernels.token_masks import TokenMasks
from penstock.kernels.torch_operations import NO_STEP, TorchStep
from penstock.kernels.torch_program import PoolProgram, Rows, TorchProgram, read


class TorchModel:
    """A `LanguageModel`: a decoder as it is.

    Args:
        make_backend: packs its layers.

    Attributes:
        adapter_rows: as in `Decoder`.
    """

    spares_core = False

    def __init__(
        self,
        decoder: Decoder,
        make_backend: Callable[[TorchMeeting], TorchBackend] = TorchBackend,
    ) -> None:
        self.decoder, config = decoder, decoder.config
        self.state_spec, self.needs_prompt_lens = decoder.state_spec, decoder.needs_prompt_lens
        self.weight_bytes = decoder.weight_bytes
        self.num_threads = torch.get_num_threads()
        self.num_verify_rows = NUM_VERIFY_ROWS[decoder.device.type]
        self.adapter_rows = decoder.adapter_rows
        self._dtype, self.is_invariant = decoder.dtype, decoder.is_invariant
        meeting = TorchMeeting(
            decoder.ranks, decoder.norm.weight, decoder.vocab_size,
            has_before=not config.has_embedding, has_after=not config.has_head,
        )  # fmt: skip
        self._writer = DecoderWriter(decoder, make_backend(meeting))
        self._programs = PoolProgram(self._dtype, self._write)
        self._hidden = Buffer("hidden", 0, torch.empty(0))
        self._heads = {each: self._write_head(are_sampled=each) for each in (False, True)}

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        return self.outputs(input_ids, context)[0]

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,  # noqa: ARG002  (a sampler draws)
        draws: Tensor | None = None,  # noqa: ARG002
        masks: TokenMasks | None = None,  # noqa: ARG002
    ) -> StepOutput:
        return self.end(self.outputs(input_ids, context), sampled_tokens)

    def outputs(self, input_ids: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """A step's hidden states, and its features as in `StepOutput`."""
        rows: Rows = {}
        self.program_of(context.kv_pool).run(self.begin(input_ids, context), rows)
        return self.outputs_in(rows)

    def program_of(self, kv_pool: Tensor) -> TorchProgram:
        """The records before the head, for this pool."""
        return self._programs.of(kv_pool)

    def _write(self, program: TorchProgram, kv_pool: Tensor) -> tuple[Buffer, ...]:
        self._hidden = self._writer.write(program, kv_pool)
        return self._hidden, *self._writer.features

    @property
    def num_parts_done(self) -> int:
        """Records that were run so far."""
        return self._programs.num_run

    def begin(self, input_ids: Tensor, context: ForwardContext) -> TorchStep:
        """What the program reads of a step."""
        positions, lens = context.positions, context.prompt_lens
        rotary = tuple(each(positions, lens, self._dtype) for each in self.decoder.rotaries)
        images = context.images
        return TorchStep(
            feature_rows=None if images is None else images.rows,
            features=None if images is None else images.features,
            token_ids=input_ids,
            layout=context.layout,
            positions=positions,
            rotary=rotary,
            is_invariant=self.is_invariant,
        )

    def outputs_in(self, rows: Rows) -> tuple[Tensor, ...]:
        """What the program leaves, as in `outputs`."""
        return tuple(read(rows, each) for each in (self._hidden, *self._writer.features))

    def end(self, outputs: tuple[Tensor, ...], sampled_tokens: Tensor | None) -> StepOutput:
        """The output of a step, of what the program leaves."""
        hidden, *features = outputs
        sampled = hidden if sampled_tokens is None else hidden[sampled_tokens]
        logits = self._logits(sampled, are_sampled=True)
        return StepOutput(hidden=hidden, logits=logits, features=tuple(features))

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
