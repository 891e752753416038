"""What is checked of a peer's message beside its types: what depends on an engine's sizes.

Both ends have certificates of one authority, and one of them may still be wrong: of another
release, damaged, or in somebody else's hands. An id outside the vocabulary would be read outside
the table of embeddings, and a queue of 2^62 tokens would turn every request away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from itertools import chain
from operator import attrgetter

from penstock.engine.errors import InvalidRequestError
from penstock.engine.protocol.messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    EngineStats,
    Step,
    Submit,
)
from penstock.engine.request import ImageInput, SamplingParams

_MAX_ID_CHARS = 1024
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_GRAMMAR_CHARS = 4 << 20  # of what a gateway makes of 256 KiB, or of many tools
_MAX_MARK_CHARS = 4096  # of thoughts
_token_ids, _logprobs = attrgetter("token_ids"), attrgetter("logprobs")
_of_prompt = attrgetter("prompt_logprobs")


class PeerFaultError(Exception):
    """A peer says what cannot be: nothing that it says can be relied on."""


def check_submit(submit: Submit, *, vocab_size: int) -> None:
    """
    Raises:
        InvalidRequestError: a field of a gateway's request has a value that would break a step, or
            other requests' results.
    """
    request = submit.request
    if submit.protocol_version != PROTOCOL_VERSION:
        raise InvalidRequestError(f"it is of protocol version {submit.protocol_version}")
    if not 0 < len(request.request_id) <= _MAX_ID_CHARS or len(submit.name) > _MAX_ID_CHARS:
        raise InvalidRequestError(f"a request's id has 1 to {_MAX_ID_CHARS} characters")
    for name in ("prompt_token_ids", "output_token_ids", "prediction_token_ids"):
        _check_ids(getattr(request, name), vocab_size, name)
    _check_params(request.sampling_params, vocab_size)
    pooling = request.pooling
    if pooling is not None and pooling.num_first_tokens > len(request.prompt_token_ids):
        raise InvalidRequestError("the first text is longer than both", param="pooling")
    for image in request.images:
        _check_image(image)


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
        _check_ids(getattr(params, name) or (), vocab_size, name)
    grammar = params.structured_outputs
    if grammar is not None and len(grammar.text) > _MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"a grammar has more than {_MAX_GRAMMAR_CHARS} characters", param="structured_outputs"
        )
    limit = params.thought_limit
    if limit is not None:
        texts = (*limit.begins, *limit.ends, *(text for _, text in limit.marks))
        if not all(texts) or sum(map(len, texts)) > _MAX_MARK_CHARS or not limit.end_token_ids:
            raise InvalidRequestError("thoughts are not marked", param="thinking_token_budget")
        pairs = chain(*limit.never, (token_id for token_id, _ in limit.marks))
        _check_ids((*limit.end_token_ids, *pairs), vocab_size, "thinking_token_budget")
    for token_ids in params.bad_words_token_ids:
        if not token_ids:
            raise InvalidRequestError("a bad word has no tokens", param="bad_words")
        # A tokenizer may have more than the model.
        _check_ids(token_ids, _MAX_TOKEN_ID, "bad_words")


def _check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidRequestError(
            f"token id {worst} is not in the vocabulary of {vocab_size} tokens", param=param
        )


def _check_image(image: ImageInput) -> None:
    """The features of an image, and KV computed from it, are found by its digest."""
    if image.num_features > image.num_tokens:
        raise InvalidRequestError("an image has more features than tokens", param="images")
    if image.data and hashlib.sha256(image.data).hexdigest() != image.digest:
        raise InvalidRequestError("an image's digest is not that of its file", param="images")


def check_stats(stats: EngineStats, info: EngineInfo) -> None:
    """
    Raises:
        PeerFaultError: an engine's queue cannot be as long as it says.
    """
    num_requests = (
        stats.num_requests_waiting + stats.num_requests_running + stats.num_requests_swapped
    )
    most = (num_requests + info.max_num_seqs) * info.max_model_len
    if stats.num_tokens_waiting > most:
        raise PeerFaultError(
            f"{stats.num_tokens_waiting} tokens of {num_requests} requests are waiting"
        )


def check_step(step: Step, *, vocab_size: int) -> None:
    """
    Raises:
        PeerFaultError: a token is not in the engine's vocabulary.
    """
    outputs = step.outputs
    token_ids = chain.from_iterable(map(_token_ids, outputs))
    highest = max(chain(step.tokens.values(), token_ids), default=0)
    for logprobs in chain.from_iterable(chain(map(_logprobs, outputs), map(_of_prompt, outputs))):
        highest = max(highest, logprobs.token_id, *(token_id for token_id, _ in logprobs.top))
    if highest >= vocab_size:
        raise PeerFaultError(f"token id {highest} is not in its vocabulary of {vocab_size} tokens")
