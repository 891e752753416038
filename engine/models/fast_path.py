"""Which implementation of the decoder runs: torch everywhere, C where a CPU computes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.cpu_decoder import CpuDecoder, can_run
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import load_library


class LanguageModel(Protocol):
    """What a runner needs of a decoder."""

    config: DecoderConfig

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def needs_prompt_lens(self) -> bool: ...

    @property
    def num_threads(self) -> int:
        """CPU threads that compute."""
        ...

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], good until the
        next call"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        ...


def fastest(decoder: Decoder, *, num_threads: int | None = None) -> LanguageModel:
    """The decoder in the form that runs fastest where its weights are; they move into it.

    Args:
        num_threads: of a CPU; None takes what suits the form.
    """
    if decoder.device.type != "cpu" or not can_run(decoder.config):
        return decoder
    library = load_library(decoder.dtype)
    if library is None:
        return decoder
    num_threads = library.start_threads(num_threads or num_usable_cores())
    torch.set_num_threads(1)  # one pool: what little torch does beside it must not wake another
    return CpuDecoder(decoder, library, num_threads=num_threads)
