"""Finished outputs, as drafts for requests that begin alike: siblings in a conversation's tree.

A regenerated answer, or one to an edited question, often repeats much of the answer before.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from penstock.engine.request import Request, Sequence

MAX_TEXTS = 256  # a look-up compares all of them
MAX_TOKENS = 1 << 18  # of all prompts and outputs, four bytes each
_MAX_OUTPUT = 4096  # tokens of one output, which a drafter indexes at once


class _Key(NamedTuple):
    tenant: str
    cache_salt: str
    prompt: bytes


class FinishedOutputs:
    """The outputs that were finished or used last, one for each prompt.

    An output is only found by requests of the same tenant and salt.
    """

    def __init__(self) -> None:
        self._outputs: OrderedDict[_Key, array[int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and outputs."""
        return self._num_bytes // 4

    def add(self, sequence: Sequence) -> None:
        """Keep a finished sequence's output."""
        start = sequence.num_prompt_tokens
        output = array("I", sequence.token_ids[start : start + _MAX_OUTPUT])
        key = _key_of(sequence.request)
        if not output or start + len(output) > MAX_TOKENS:
            return
        self._remove(key)
        self._outputs[key] = output
        self._num_bytes += len(key.prompt) + 4 * len(output)
        while len(self._outputs) > MAX_TEXTS or self.num_tokens > MAX_TOKENS:
            self._remove(next(iter(self._outputs)))

    def find(self, request: Request) -> Ordered[int]:
        """The output to the prompt that has the longest beginning in common with this request's,
        half of it at least; of several, the last used. Empty if there is none."""
        if not self._outputs:
            return ()
        wanted = _key_of(request)
        best, longest = None, -(-len(request.prompt_token_ids) // 2)
        beginning = wanted.prompt[: 4 * longest]
        for key in self._outputs:
            if key.prompt.startswith(beginning) and key[:2] == wanted[:2]:
                best, longest = key, _num_shared(key.prompt, wanted.prompt, longest)
                beginning = wanted.prompt[: 4 * longest]
        if best is None:
            return ()
        self._outputs.move_to_end(best)
        return self._outputs[best]

    def drop(self, token_ids: Ordered[int], *, cache_salt: str) -> None:
        """Forget the outputs to prompts that these tokens begin with, or that begin with them."""
        dropped = array("I", token_ids).tobytes()
        for key in list(self._outputs):
            shorter = min(len(key.prompt), len(dropped))
            if key.cache_salt == cache_salt and key.prompt[:shorter] == dropped[:shorter]:
                self._remove(key)

    def _remove(self, key: _Key) -> None:
        output = self._outputs.pop(key, None)
        if output is not None:
            self._num_bytes -= len(key.prompt) + 4 * len(output)


def _key_of(request: Request) -> _Key:
    prompt = array("I", request.prompt_token_ids).tobytes()
    return _Key(request.tenant, request.cache_salt, prompt)


def _num_shared(left: bytes, right: bytes, least: int) -> int:
    """Tokens of the common beginning, `least` or more, by bisection: Python compares slices fast,
    tokens slowly."""
    low, high = 4 * least, min(len(left), len(right))
    if left[low : low + 4] != right[low : low + 4]:  # often it is no longer
        return least
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // 4
