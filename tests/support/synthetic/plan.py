"""What one answer will be, and when: settled when its request comes, and held in its id.

Token k is the text ` tk` and due at start + TTFT + k × ITL, so that no error adds up and a lost
token can be seen. The id holds all that decides this, with the start on the machine's monotonic
clock: a server that was killed and started again goes on with the answer from its id alone.


"""

from __future__ import annotations

import binascii
import functools
import random
import struct
import time
import zlib
from dataclasses import dataclass, fields
from enum import StrEnum


class Trouble(StrEnum):
    """What a server can do wrong to a stream."""

    STALL = "stall"  # silence; the connection stays
    CUT = "cut"  # a proper end of file without a terminal event
    RESET = "reset"  # the connection is reset
    LOSE = "lose"  # an event never comes, and the numbers do not tell
    GAP = "gap"  # an event never comes, and its number is left out
    REPEAT = "repeat"  # an event comes twice
    ERROR = "error"  # the stream ends with an error
    MALFORMED = "malformed"  # an event that is no JSON
    DOUBLE_END = "double_end"  # the terminal event comes twice


@dataclass(frozen=True, slots=True)
class Fault:
    """One trouble of one stream.

    Attributes:
        after: tokens that come before it.
    """

    trouble: Trouble
    after: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault | None:
        """From `cut:17`; nothing from nothing.

        Raises:
            ValueError: it is neither.
        """
        kind, _, after = text.partition(":")
        return cls(Trouble(kind), int(after or 0)) if text else None


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """One answer.

    Attributes:
        began_us: when its request came, on the monotonic clock.
        created_s: the same by the calendar.
        seed: of the jitter; it also tells equal answers apart.
        is_limited: its length is the one the request asked for.
    """

    began_us: int
    created_s: int
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_us: int
    itl_us: int
    ttft_jitter_us: int
    itl_jitter_us: int
    seed: int
    tokens_per_event: int
    is_limited: bool

    @property
    def num_events(self) -> int:
        return 1 + -(-(self.num_tokens - 1) // self.tokens_per_event)

    def tokens_through(self, event: int) -> int:
        """Tokens in the events up to and including this one; 0 for -1."""
        return min(1 + event * self.tokens_per_event, self.num_tokens) if event >= 0 else 0

    def text(self, event: int) -> str:
        first, last = self.tokens_through(event - 1), self.tokens_through(event)
        return "".join(f" t{token}" for token in range(first, last))

    def text_through(self, num_events: int) -> str:
        last = self.tokens_through(num_events - 1)
        return "".join(f" t{token}" for token in range(last))

    def due_s(self, event: int) -> float:
        """When an event comes, on the monotonic clock: with its last token. One past the last is
        the end, which comes with it."""
        token = self.tokens_through(event) - 1
        return (self.began_us + self.ttft_us + token * self.itl_us + self._offsets_us[token]) * 1e-6

    def num_due(self, at_s: float) -> int:
        """How many events have come by a time."""
        return sum(self.due_s(event) <= at_s for event in range(self.num_events))

    @functools.cached_property
    def _offsets_us(self) -> list[int]:
        """What jitter adds to each token's time."""
        if not self.ttft_jitter_us and not self.itl_jitter_us:
            return [0] * self.num_tokens
        rng = random.Random(self.seed)
        first_us = int(rng.uniform(-1, 1) * min(self.ttft_jitter_us, self.ttft_us))
        # More than half of the ITL would let a token overtake the next.
        reach_us = min(self.itl_jitter_us, self.itl_us // 2)
        later = [first_us + int(rng.uniform(-1, 1) * reach_us) for _ in range(self.num_tokens - 1)]
        return [first_us, *later]

    def response_id(self, prefix: str = "resp_") -> str:
        packed = _LAYOUT.pack(*(getattr(self, name) for name in _PACKED))
        return prefix + (packed + _CHECKSUM.pack(zlib.crc32(packed))).hex()

    @classmethod
    def from_id(cls, response_id: str) -> StreamPlan | None:
        """The plan of a response; None for an id that is not ours, or not of this boot."""
        try:
            data = binascii.unhexlify(response_id.removeprefix("resp_"))
        except ValueError:
            return None
        packed, checksum = data[: _LAYOUT.size], data[_LAYOUT.size :]
        if checksum != _CHECKSUM.pack(zlib.crc32(packed)):
            return None
        plan = cls(**dict(zip(_PACKED, _LAYOUT.unpack(packed), strict=True)))
        return plan if plan.began_us * 1e-6 <= time.monotonic() else None


_PACKED = tuple(item.name for item in fields(StreamPlan))
_LAYOUT = struct.Struct(">QIIIIIIIIIH?")
_CHECKSUM = struct.Struct(">I")
