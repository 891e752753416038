"""What an answer is made from: a prompt, and the deltas of the outputs that answer it.

`generation.Generation` has them from an engine, `responses.replay.LoggedGeneration` from a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.request import Request, TokenLogprobs
from penstock.gateway.branch import Delta


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class DeltaSource(Protocol):
    """Used as a context, as `Generation` is."""

    def __enter__(self) -> DeltaSource: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    async def next(self) -> list[Delta] | None:
        """All that came since the last call, in order; None at the end.

        Raises:
            Exception: it failed.
        """
        ...

    @property
    def request(self) -> Request: ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Of the prompt's tokens from the second on, if they were asked for."""
        ...

    @property
    def usage(self) -> Usage:
        """So far."""
        ...

    @property
    def num_wanted(self) -> int:
        """Outputs that the caller is to see."""
        ...

    def best(self) -> Sequence[int]:
        """The indices of the outputs wanted, best first."""
        ...

    def output_token_ids(self, rank: int) -> Sequence[int]:
        """So far, of one of the outputs wanted."""
        ...
