"""When a sequence ends: EOS, stop ids, length. Stop strings are `engine.text`'s."""

from __future__ import annotations

from penstock.engine.request import FinishReason, SamplingParams, Sequence


class StopRule:
    """The end of a sequence, decided token by token.

    Args:
        eos_token_ids: the model's ids that end a text.
        max_model_len: tokens of prompt and output at most.
    """

    def __init__(self, *, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Every id that ends a sequence with these parameters."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_token_ids

    def check(self, sequence: Sequence) -> FinishReason | None:
        """Whether the sequence ends with its newest token."""
        params = sequence.request.sampling_params
        newest = sequence.token_ids[-1]
        is_end = newest in params.stop_token_ids or (
            newest in self._eos_token_ids and not params.ignore_eos
        )
        if is_end and sequence.num_output_tokens >= params.min_tokens:
            return FinishReason.STOP
        is_full = self.fills(sequence, num_tokens=len(sequence.token_ids))
        return FinishReason.LENGTH if is_full else None

    def fills(self, sequence: Sequence, *, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens of prompt and output reach a length limit."""
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        max_tokens = sequence.request.sampling_params.max_tokens
        return num_output_tokens >= max_tokens or num_tokens >= self.max_model_len
