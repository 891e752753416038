"""Whether a request fits the model's context and the engine's KV memory, said before it is sent.

Pure functions of what the engine told of itself.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from penstock.engine.errors import InvalidRequestError, PromptTooLongError
from penstock.engine.request import SamplingParams, num_blocks_needed
from penstock.engine.transport.messages import EngineInfo
from penstock.gateway.api.schema.fields import SamplingRequest
from penstock.gateway.auth.callers import Caller

_MIN_PROMPT_BYTES = 1 << 20
_BYTES_PER_TOKEN = 16  # four times those of English


def default_prompt_bytes(max_model_len: int) -> int:
    """Bytes of a prompt's text beyond which it is not tokenised, where nobody says."""
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
    """Refuse a text that cannot fit the context, by its length alone: tokenising it takes seconds.

    Args:
        longest_token_bytes: the tokenizer's; None: it has none, or the prompt need not fit.
        max_bytes: the limit in that case; None: the default.
        param: the parameter that the text came from.
        num_known_tokens: those before the text.

    Raises:
        PromptTooLongError: the text is too long to fit, or to be tokenised.
    """
    # One character has up to four bytes; nearly all texts need not be encoded to be let through.
    if longest_token_bytes is None:
        limit = max_bytes or default_prompt_bytes(max_model_len)
        if len(text) * 4 > limit and (num_bytes := _num_bytes(text)) > limit:
            raise PromptTooLongError(
                f"the prompt has {num_bytes} bytes of text, and this server tokenises at most "
                f"{limit} (--max-prompt-bytes)",
                param=param,
            )
        return
    limit = max(max_model_len - num_known_tokens, 0) * longest_token_bytes
    if len(text) * 4 > limit and (num_bytes := _num_bytes(text)) > limit:
        raise PromptTooLongError(
            f"the prompt has at least {num_known_tokens + -(-num_bytes // longest_token_bytes)} "
            f"tokens, which leaves no room for output in the model's context of {max_model_len} "
            "tokens",
            param=param,
        )


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def output_limit(
    request: SamplingRequest, num_prompt_tokens: int, *, max_model_len: int, param: str
) -> int:
    """Output tokens at most: what is asked for, as far as the context has room.

    Args:
        param: the parameter that the prompt came from.

    Raises:
        InvalidRequestError: there is no room, or not for `min_tokens`.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens", param=param)
    wanted = request.output_limit
    if wanted is None:
        wanted = request.default_output_limit
    room = max_model_len - num_prompt_tokens
    if room < (0 if wanted == 0 else 1):
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output "
            f"in the model's context of {max_model_len} tokens",
            param=param,
        )
    if request.min_tokens > room:
        raise PromptTooLongError(
            f"min_tokens is {request.min_tokens}, but beside the prompt's "
            f"{num_prompt_tokens} tokens the model's context of {max_model_len} "
            f"tokens has room for {room}",
            param="min_tokens",
        )
    if wanted is not None and request.min_tokens > wanted:
        raise InvalidRequestError("min_tokens exceeds the output limit", param="min_tokens")
    return room if wanted is None else min(wanted, room)


def fit_branches(
    params: SamplingParams, num_prompt_tokens: int, *, info: EngineInfo, is_limit_given: bool
) -> SamplingParams:
    """Parameters whose branches all fit into KV memory at once, at their longest.

    Where the caller named no limit of output tokens, it is lowered to what fits.

    Raises:
        InvalidRequestError: too many branches, or too long ones.
    """
    if params.num_branches == 1:
        return params
    name = "n" if params.num_branches == params.n else "best_of"
    if params.num_branches > info.max_num_seqs:
        raise InvalidRequestError(
            f"{name} asks for {params.num_branches} outputs at once, and this server computes at "
            f"most {info.max_num_seqs} sequences at once",
            param=name,
        )

    def num_blocks(max_tokens: int) -> int:
        longest = dataclasses.replace(params, max_tokens=max_tokens)
        return num_blocks_needed(longest, num_prompt_tokens, info.block_size)

    least = params.max_tokens if is_limit_given else max(params.min_tokens, 1)
    if num_blocks(least) > info.num_blocks:
        raise InvalidRequestError(
            f"{params.num_branches} outputs of {least} tokens to a prompt of {num_prompt_tokens} "
            f"need {num_blocks(least)} KV blocks, and this server has {info.num_blocks}",
            param=name,
        )
    # The longest that fits: blocks grow with tokens.
    limits = range(least, params.max_tokens + 1)
    num_fitting = bisect.bisect_right(limits, info.num_blocks, key=num_blocks)
    return dataclasses.replace(params, max_tokens=limits[num_fitting - 1])


def check_vocabulary(
    token_ids: Sequence[int] | Mapping[int, float], size: int, *, param: str
) -> None:
    """Refuse ids that are none of the model's.

    Raises:
        InvalidRequestError: there is one.
    """
    if token_ids and max(token_ids) >= size:
        raise InvalidRequestError(
            f"token id {max(token_ids)} is not in the vocabulary of {size} tokens", param=param
        )


def fitting_priority(caller: Caller, request: SamplingRequest, policy: str) -> int:
    """What a request runs with: what it asks for, as far as the caller may ask.

    Raises:
        InvalidRequestError: it asks for a priority that the scheduler would not heed.
    """
    asked = request.priority if "priority" in request.model_fields_set else None
    if policy == "priority":
        return caller.priority_of(asked)
    if asked and caller.priority_bounds is not None:
        raise InvalidRequestError(
            "this server serves in the order of arrival; priority needs it started with "
            "--scheduling-policy priority",
            param="priority",
        )
    return 0
