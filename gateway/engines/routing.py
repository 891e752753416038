"""Which engine gets a request.

    prefix         the best score: tokens of the prompt whose KV the engine has − its load in tokens
    least-loaded   the least load
    round-robin    each in turn

An engine's load is what it has to compute: half the tokens of prompts that it has not cached, as
half of them are computed by now on average, and `OUTPUT_TOKENS` for each output. Of this gateway's
requests that is known; of the others' the engine's stats tell.

So a conversation goes where its prefix lies, until that engine has more work ahead than another
would have with computing the prefix. Prompts on their way count as cached where they are going. A
new prefix goes to the engine that got the fewest requests lately, so that prefixes are spread over
idle engines too. While there is more than one request for each engine, one that got more than
`MAX_SHARE` times its share of the latest requests gets no more, so a prefix that many ask for
spreads. "Lately" is with half the weight every `HALF_LIFE_S`.

Engines publish the keys of their cached blocks (`CachedKeys`), of which 32 bits are
kept: with 100,000 blocks, one lookup in 40,000 finds what is not there, which costs a detour.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from penstock.engine.blocks.block_keys import block_key, chain_root, pack, with_images
from penstock.engine.protocol.messages import SHORT_KEY_BYTES, EngineInfo, EngineStats
from penstock.gateway.config import Routing
from penstock.gateway.engines.engine_stream import EngineStream

OUTPUT_TOKENS = 64  # what an output counts for in an engine's load, if its limit is not lower
HALF_LIFE_S = 30.0
MAX_SHARE = 1.2
_FREE_REQUESTS = 2.0  # beyond the share: with few requests, any engine is above it
_KEY = struct.Struct("<I")
_MAX_KEYS = 4 << 20  # of one engine, in 32 MiB at most
_MAX_EXPECTED = 1 << 16
_MAX_BLOCKS = 4096  # of a prompt that are looked at: 64k tokens, 5 ms
_EXPECTED_S = 60.0


class KeySet:
    """A set of 32-bit keys, in 6 to 12 bytes each: an open-addressing table.

    Source: Knuth, The Art of Computer Programming 3, 6.4, algorithms L and R (linear probing, and
    deletion without tombstones).

    Args:
        capacity: keys beyond it are not added.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = min(capacity, _MAX_KEYS)
        size = 1 << (self._capacity * 3 // 2).bit_length()
        self._mask = size - 1
        self._table = array("I", bytes(4 * size))  # 0: empty
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return len(self._table) * self._table.itemsize

    def __contains__(self, key: int) -> bool:
        return self._table[self._slot(key)] != 0

    def update(self, *, added: bytes, removed: bytes) -> None:
        """Add and remove keys, of 4 bytes each; ValueError if they are not."""
        for (key,) in _KEY.iter_unpack(removed):
            self.discard(key)
        for (key,) in _KEY.iter_unpack(added):
            self.add(key)

    def add(self, key: int) -> None:
        slot = self._slot(key)
        if not self._table[slot] and self._num_keys < self._capacity:
            self._table[slot] = key or 1
            self._num_keys += 1

    def discard(self, key: int) -> None:
        table, mask = self._table, self._mask
        hole = self._slot(key)
        if not table[hole]:
            return
        self._num_keys -= 1
        slot = hole
        while True:
            table[hole] = 0
            while True:  # find a key that may move into the hole
                slot = (slot + 1) & mask
                if not table[slot]:
                    return
                home = table[slot] & mask
                if (slot - home) & mask >= (slot - hole) & mask:
                    break
            table[hole] = table[slot]
            hole = slot

    def _slot(self, key: int) -> int:
        """Where a key is, or would be added."""
        key = key or 1
        table, mask = self._table, self._mask
        slot = key & mask
        while table[slot] and table[slot] != key:
            slot = (slot + 1) & mask
        return slot


class EngineLoad:
    """What one engine has to compute, and what it has computed.

    Attributes:
        num_streams: this gateway's.
        keys: of its cached blocks.
    """

    def __init__(self) -> None:
        self.num_streams = 0
        self.keys = KeySet(0)
        self._in_flight = 0.0  # tokens of this gateway's requests
        self._recent = 0.0
        self._recent_at_s = 0.0
        # Keys of blocks that requests on their way will add, with the time until which that counts.
        self._expected: OrderedDict[int, float] = OrderedDict()

    def enter(self, stream: EngineStream) -> None:
        self.num_streams += 1
        self._in_flight += stream.prompt_cost + stream.output_cost

    def begin(self, stream: EngineStream) -> None:
        """The stream's prompt is computed."""
        self._in_flight -= stream.prompt_cost
        stream.prompt_cost = 0.0

    def leave(self, stream: EngineStream) -> None:
        self.num_streams -= 1
        self._in_flight -= stream.prompt_cost + stream.output_cost

    def reserve(self, num_tokens: float) -> None:
        """Count this for streams that will enter; negative: no longer."""
        self._in_flight += num_tokens

    def forget(self) -> None:
        """The engine is gone, and what it had cached."""
        self.keys = KeySet(0)
        self._expected.clear()

    def has(self, key: int) -> bool:
        return key in self.keys or key in self._expected

    def expect(self, keys: Sequence[int], *, now_s: float) -> None:
        """The engine will have these blocks."""
        expected = self._expected
        for key in keys:
            expected[key] = now_s + _EXPECTED_S
            expected.move_to_end(key)
        while expected:
            oldest = next(iter(expected.values()))
            if len(expected) <= _MAX_EXPECTED and oldest > now_s:
                break
            expected.popitem(last=False)

    def note(self, *, now_s: float) -> None:
        """The engine gets a request."""
        self._recent = self.recent(now_s) + 1.0
        self._recent_at_s = now_s

    def recent(self, now_s: float) -> float:
        """Requests that it got lately."""
        return float(self._recent * 0.5 ** ((now_s - self._recent_at_s) / HALF_LIFE_S))

    def tokens(self, stats: EngineStats) -> float:
        """The load in tokens. What other gateways' prompts have cached is not known."""
        num_seen = stats.num_requests_running + stats.num_requests_waiting
        num_others = max(0, num_seen - self.num_streams)
        if not num_others:
            return self._in_flight
        waiting = stats.num_tokens_waiting / 2 * num_others / num_seen
        return self._in_flight + waiting + OUTPUT_TOKENS * num_others


class Engine(Protocol):
    """What routing knows of an engine."""

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> EngineLoad: ...


E = TypeVar("E", bound=Engine)


class Router:
    """
    Args:
        clock: monotonic seconds.
    """

    def __init__(self, routing: Routing, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.needs_keys = routing == "prefix"
        self._routing = routing
        self._clock = clock
        self._num_chosen = 0

    def choose(self, engines: Sequence[E], stream: EngineStream) -> E | None:
        """An engine for a stream that starts or continues; None if there is none."""
        if len(engines) < 2:
            return engines[0] if engines else None
        self._num_chosen += 1
        if self._routing == "round-robin":
            return engines[self._num_chosen % len(engines)]
        now_s = self._clock()
        keys = BlockKeys(engines[0].info, stream) if self._routing == "prefix" else None
        loads = [each.load for each in engines]
        cached = [0] * len(engines) if keys is None else keys.num_cached_tokens(loads)
        chosen = self._best(engines, cached, now_s=now_s)
        num_tokens = len(stream.request.prompt_token_ids) + len(stream.token_ids[0])
        params = stream.request.sampling_params
        stream.prompt_cost = (num_tokens - cached[chosen]) / 2
        stream.output_cost = min(OUTPUT_TOKENS, params.max_tokens) * params.num_branches
        loads[chosen].note(now_s=now_s)
        if keys is not None:
            loads[chosen].expect(keys.all(), now_s=now_s)
        return engines[chosen]

    def _best(self, engines: Sequence[E], cached: Sequence[int], *, now_s: float) -> int:
        """The number of the engine with the best score."""
        recent = [each.load.recent(now_s) for each in engines]
        costs = [
            each.load.tokens(each.stats) - found
            for each, found in zip(engines, cached, strict=True)
        ]
        if not any(cached):
            costs = [cost + OUTPUT_TOKENS * num for cost, num in zip(costs, recent, strict=True)]
        candidates = list(range(len(engines)))
        if sum(each.load.num_streams for each in engines) >= len(engines):
            most = MAX_SHARE * (sum(recent) + 1) / len(engines) + _FREE_REQUESTS
            # The engine with the fewest is below it.
            candidates = [index for index in candidates if recent[index] + 1 <= most]
        return min(candidates, key=lambda index: (costs[index], recent[index]))


class BlockKeys:
    """The keys of the full blocks of a stream's known tokens, computed as far as they are asked
    for: about 1 µs a block.

    Args:
        info: of any engine of the pool.
    """

    def __init__(self, info: EngineInfo | None, stream: EngineStream) -> None:
        assert info is not None, "an engine of the pool is alive"
        request = stream.request
        self._block_size = info.block_size
        self._tokens, self._images = pack(request.prompt_token_ids), request.images
        if stream.token_ids[0]:
            self._tokens += pack(stream.token_ids[0])
        # The last token is always computed.
        self._num_blocks = min((len(self._tokens) // 4 - 1) // info.block_size, _MAX_BLOCKS)
        self._parent = chain_root(
            info.cache_root,
            cache_salt=request.cache_salt,
            adapter=None if request.adapter is None else request.adapter.digest,
            num_prompt_tokens=len(request.prompt_token_ids) if info.kv_depends_on_prompt_len else 0,
        )
        self._keys: list[bytes] = []

    def num_cached_tokens(self, loads: Sequence[EngineLoad]) -> list[int]:
        """How many tokens at the start each engine has the KV of."""
        found = [0] * len(loads)
        searching = list(range(len(loads)))
        for number in range(self._num_blocks):
            key = self._key(number)
            searching = [index for index in searching if loads[index].has(short_key(key))]
            if not searching:
                break
            for index in searching:
                found[index] += self._block_size
        return found

    def full(self) -> list[bytes]:
        """All keys, whole."""
        self._key(self._num_blocks - 1)
        return self._keys

    def all(self) -> list[int]:
        """What is kept of them."""
        return list(map(short_key, self.full()))

    def _key(self, number: int) -> bytes:
        while len(self._keys) <= number:
            start = len(self._keys) * self._block_size
            end = start + self._block_size
            parent = with_images(self._parent, self._images, start, end)
            self._parent = block_key(parent, self._tokens[4 * start : 4 * end])
            self._keys.append(self._parent)
        return self._keys[number] if number >= 0 else b""


def short_key(key: bytes) -> int:
    """What is kept of a key."""
    return int.from_bytes(key[:SHORT_KEY_BYTES], "little")
