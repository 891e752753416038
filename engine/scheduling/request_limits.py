"""What can be served at all: a request that can never end well is refused when it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError, InvalidRequestError, PromptTooLongError
from penstock.engine.request import Request, num_blocks_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The bounds of this engine.

    Attributes:
        max_model_len: tokens of prompt and output at most; the pool must hold as many.

    Raises:
        ConfigError: the bounds do not fit each other.
    """

    config: SchedulerConfig
    max_model_len: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        config = self.config
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens "
                f"({config.max_num_batched_tokens}) to be at least the context "
                f"({self.max_model_len})"
            )
        capacity = self.num_blocks * self.block_size
        if capacity < self.max_model_len:
            raise ConfigError(
                f"the KV cache holds {capacity} tokens, fewer than one context of "
                f"{self.max_model_len}"
            )

    def check(self, request: Request) -> None:
        """Raises `InvalidRequestError`, naming numbers and parameter, if it can never be served."""
        params = request.sampling_params
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens >= self.max_model_len + (params.max_tokens == 0):
            raise PromptTooLongError(
                f"{num_tokens} tokens leave no room for output in a context of "
                f"{self.max_model_len}",
                param="prompt",
            )
        if request.output_token_ids and len(request.output_token_ids) >= params.max_tokens:
            raise InvalidRequestError("the output already fills max_tokens", param="max_tokens")
        if request.priority != 0 and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                "priority needs a server started with --scheduling-policy priority",
                param="priority",
            )
        if not 0.0 < request.weight < math.inf:
            raise InvalidRequestError("weight must be a number more than 0", param="weight")
        if params.num_branches > 1 or params.beam_search is not None:
            self._check_branches(request)

    def _check_branches(self, request: Request) -> None:
        params = request.sampling_params
        if request.output_token_ids:
            raise InvalidRequestError("only a single output can be continued", param="n")
        if params.num_branches > self.config.max_num_seqs:
            raise InvalidRequestError(
                f"{params.num_branches} sequences at once are more than the "
                f"{self.config.max_num_seqs} that can run here (--max-num-seqs)",
                param="n",
            )
        num_prompt = len(request.prompt_token_ids)
        room = self.max_model_len - num_prompt
        longest = replace(params, max_tokens=min(params.max_tokens, room), min_tokens=0)
        num_blocks = num_blocks_needed(longest, num_prompt, self.block_size)
        if num_blocks > self.num_blocks:
            raise InvalidRequestError(
                f"{params.num_branches} sequences of {num_prompt} prompt and up to "
                f"{longest.max_tokens} output tokens may need {num_blocks} KV blocks of "
                f"{self.block_size} tokens, and there are {self.num_blocks}",
                param="n",
            )
