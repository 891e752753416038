"""Checks before submission whether a request fits the model's context and the engine's KV memory.

Pure functions of the engine's `EngineInfo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.engine.chat_formats import OutputFormat
from penstock.engine.errors import InvalidRequestError, PromptTooLongError
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import (
    SamplingParams,
    StructuredOutputs,
    most_output_tokens,
    num_blocks_needed,
)
from penstock.gateway.auth.callers import Caller

_MIN_PROMPT_BYTES = 1 << 20
_BYTES_PER_TOKEN = 16  # four times the average of English
UNKNOWN_LIMIT = (1 << 31) - 1
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of its output, whatever API it came by.

    Attributes:
        sampling_params: with all defaults, but with `UNKNOWN_LIMIT` as `max_tokens`, which depends
            on the prompt's length.
        max_tokens: maximum of output tokens; None: what fits the context.
        is_limit_given: the caller set that maximum; a default may be lowered to what fits.
        priority: None if the caller has not set any.
        wants_queue_position: the caller wants events with its position in the engine's queue.
        continues_prompt: the text continues the prompt's instead of starting a new one.
        grammars: what has to compile of `sampling_params.structured_outputs`, with the parameters
            that it came from.
        output_format: how thoughts and tool calls are found in it; None: it is one message.
        prediction: what it may be.
        model: the name of the model, or of an adapter.
        has_end_logprobs: logprobs are reported of the token that ends it, too, which has no text.
        tells_every_token: tokens without text are told as they come, too: special ones, those of a
            character or of a stop string that is not whole.
        effort: how much to think, where `thinking_token_budget` does not say it.
    """

    sampling_params: SamplingParams
    max_tokens: int | None = None
    is_limit_given: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    wants_queue_position: bool = False
    continues_prompt: bool = False
    grammars: Sequence[tuple[str, StructuredOutputs]] = ()
    output_format: OutputFormat | None = None
    prediction: str = ""
    model: str | None = None
    has_end_logprobs: bool = False
    tells_every_token: bool = False
    effort: Effort | None = None


def default_prompt_bytes(max_model_len: int) -> int:
    """The default of `--max-prompt-bytes`: longer prompts are not tokenised."""
    return max(_MIN_PROMPT_BYTES, _BYTES_PER_TOKEN * max_model_len)


def check_prompt_bytes(
    text: str,
    *,
    max_model_len: int,
    longest_token_bytes: int | None,
    max_bytes: int | None,
    param: str,
    num_known_tokens: int = 0,
) -> None:
    """Refuse a text whose length shows that it cannot fit the context. Tokenising it would take
    seconds.

    Args:
        longest_token_bytes: length of the tokenizer's longest token; None: there is no such bound,
            or the prompt need not fit.
        max_bytes: the limit where `longest_token_bytes` is None; None: the default.
        param: the parameter that the text came from.
        num_known_tokens: tokens before the text.

    Raises:
        PromptTooLongError: the text is too long for the context, or to be tokenised.
    """
    # A character has at most four bytes, so nearly all texts pass without being encoded.
    if longest_token_bytes is None:
        limit = max_bytes or default_prompt_bytes(max_model_len)
        if len(text) * 4 > limit and (num_bytes := _num_bytes(text)) > limit:
            raise PromptTooLongError(
                f"your {param} resulted in {num_bytes} bytes of text, and this server accepts at "
                f"most {limit} (--max-prompt-bytes). Please reduce the length of the {param}.",
                max_model_len=max_model_len,
                param=param,
            )
        return
    limit = max(max_model_len - num_known_tokens, 0) * longest_token_bytes
    if len(text) * 4 > limit and (num_bytes := _num_bytes(text)) > limit:
        least = num_known_tokens + -(-num_bytes // longest_token_bytes)
        raise _too_long(f"at least {least}", max_model_len=max_model_len, param=param)


def _too_long(num_tokens: object, *, max_model_len: int, param: str) -> PromptTooLongError:
    return PromptTooLongError(
        f"your {param} resulted in {num_tokens} tokens, which leaves no room for output. "
        f"Please reduce the length of the {param}.",
        max_model_len=max_model_len,
        param=param,
    )


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def output_limit(
    options: GenerationOptions, num_prompt_tokens: int, *, max_model_len: int, param: str
) -> int:
    """The maximum of output tokens: the requested number, or less if the context has less room.

    Args:
        param: the parameter that the prompt came from.

    Raises:
        InvalidRequestError: there is no room for output, or not enough for `min_tokens`.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens", param=param)
    wanted, min_tokens = options.max_tokens, options.sampling_params.min_tokens
    room = max_model_len - num_prompt_tokens
    if room < (0 if wanted == 0 else 1):
        raise _too_long(num_prompt_tokens, max_model_len=max_model_len, param=param)
    if min_tokens > room:
        raise PromptTooLongError(
            f"you requested at least {num_prompt_tokens + min_tokens} tokens ({num_prompt_tokens} "
            f"in the {param}, {min_tokens} by min_tokens). Please reduce the length of the {param} "
            "or min_tokens.",
            max_model_len=max_model_len,
            param="min_tokens",
        )
    if wanted is not None and min_tokens > wanted:
        raise InvalidRequestError("min_tokens exceeds the output limit", param="min_tokens")
    return room if wanted is None else min(wanted, room)


def fit_branches(
    params: SamplingParams, num_prompt_tokens: int, *, info: EngineInfo, is_limit_given: bool
) -> SamplingParams:
    """Parameters whose branches all fit into KV memory at the same time, at full length.

    If the caller set no limit of output tokens, the limit is lowered to what fits.

    Raises:
        InvalidRequestError: the branches are too many or too long.
    """
    if params.num_branches == 1:
        return params
    name = "n" if params.num_branches == params.n else "best_of"
    if params.num_branches > info.max_num_seqs:
        raise InvalidRequestError(
            f"{name} requests {params.num_branches} outputs, but this server runs at most "
            f"{info.max_num_seqs} sequences at once",
            param=name,
        )

    least = params.max_tokens if is_limit_given else max(params.min_tokens, 1)
    shortest = msgspec.structs.replace(params, max_tokens=least)
    num_blocks = num_blocks_needed(shortest, num_prompt_tokens, info.block_size)
    if num_blocks > info.num_blocks:
        raise InvalidRequestError(
            f"{params.num_branches} outputs of {least} tokens for a prompt of {num_prompt_tokens} "
            f"tokens need {num_blocks} KV blocks, but this server has {info.num_blocks}",
            param=name,
        )
    limit = most_output_tokens(
        params,
        num_prompt_tokens,
        limits=range(least, params.max_tokens + 1),
        block_size=info.block_size,
        num_blocks=info.num_blocks,
    )
    return msgspec.structs.replace(params, max_tokens=limit)


def check_vocabulary(
    token_ids: Sequence[int] | Mapping[int, float], size: int, *, param: str
) -> None:
    """Refuse token ids that are not in the vocabulary.

    Raises:
        InvalidRequestError: there is such an id.
    """
    if token_ids and max(token_ids) >= size:
        raise InvalidRequestError(
            f"token id {max(token_ids)} is not in the vocabulary of {size} tokens", param=param
        )


def check_logprobs(params: SamplingParams, most: int) -> None:
    """Refuse more alternatives than `--max-logprobs` allows; -1: any number.

    Raises:
        InvalidRequestError: more are asked for.
    """
    for name, number in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if number is not None and number > most >= 0:
            raise InvalidRequestError(
                f"{number} alternatives per token are asked for, but this server gives at most "
                f"{most} (--max-logprobs)",
                param=name,
            )


def effective_priority(caller: Caller, asked: int | None, policy: str) -> int:
    """The requested priority, clamped to the caller's bounds.

    Raises:
        InvalidRequestError: a priority is requested, but the scheduler does not use priorities.
    """
    if policy == "priority":
        return caller.priority_of(asked)
    if asked and caller.priority_bounds is not None:
        raise InvalidRequestError(
            "priority is not enabled on this server; start it with --scheduling-policy priority",
            param="priority",
        )
    return 0
