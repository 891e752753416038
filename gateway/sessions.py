"""Finished responses kept in memory, so that a later turn can continue one.

Bounded in bytes: the conversations continued least recently go first. Each response knows only
its parent; a conversation is the path to the root. Not known here: requests and events.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.gateway.errors import RequestRefusedError

_ENTRY_BYTES = 1024  # objects and dictionary slots around the text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One turn.

    Attributes:
        items: what the caller put in, as the chat template knows it.
        output_text: None for a turn whose prompt was only prepared.
        prompt_token_ids: the whole conversation up to the answer (4 bytes each).
        output_token_ids: of the answer, end token included.
        cache_salt: under which their KV may be cached.
        body: the finished Response object as JSON, for reading it back.
    """

    response_id: str
    parent_id: str | None
    items: tuple[Mapping[str, str], ...]
    output_text: str | None
    prompt_token_ids: array[int]
    output_token_ids: array[int]
    cache_salt: str
    body: bytes

    @property
    def num_bytes(self) -> int:
        texts = [value for item in self.items for value in item.values()]
        values = (
            self.output_text,
            self.prompt_token_ids,
            self.output_token_ids,
            self.cache_salt,
            self.body,
        )
        return _ENTRY_BYTES + sum(sys.getsizeof(value) for value in (*texts, *values))


class SessionStore:
    """Responses by id.

    Args:
        max_bytes: what may be kept in all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # oldest first

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response: StoredResponse) -> None:
        """Keep a response, at the expense of the oldest."""
        self._responses[response.response_id] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes and self._responses:
            self._drop(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse:
        """One response.

        Raises:
            RequestRefusedError: it was never stored here, or was dropped.
        """
        return self._find(response_id, code="response_not_found", param="response_id")

    def delete(self, response_id: str) -> None:
        """Forget one response; what continued it cannot be continued any more."""
        self.get(response_id)
        self._drop(response_id)

    def history(self, response_id: str) -> list[Mapping[str, str]]:
        """The messages of a conversation up to and including a response.

        Raises:
            RequestRefusedError: a turn of it is not here any more.
        """
        turns: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            turns.append(
                self._find(
                    next_id, code="previous_response_not_found", param="previous_response_id"
                )
            )
            next_id = turns[-1].parent_id
        messages: list[Mapping[str, str]] = []
        for turn in reversed(turns):
            self._responses.move_to_end(turn.response_id)  # in use: the last to be dropped
            messages += turn.items
            if turn.output_text is not None:
                messages.append({"role": "assistant", "content": turn.output_text})
        return messages

    def _find(self, response_id: str, *, code: str, param: str) -> StoredResponse:
        response = self._responses.get(response_id)
        if response is None:
            raise RequestRefusedError(
                f"no response {response_id!r} is stored here", code=code, param=param, status=404
            )
        return response

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._responses.pop(response_id).num_bytes
