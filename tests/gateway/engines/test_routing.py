"""Which engine gets a request, and what is known of the engines' caches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from penstock.engine.blocks.block_keys import block_key, pack
from penstock.engine.blocks.prefix_cache import CachedBlock, PrefixCache
from penstock.engine.protocol.messages import EngineInfo, EngineStats
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.config import Routing
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.routing import BlockKeys, EngineLoad, KeySet, Router, short_key

from ..fake_engine import INFO

_PREFIX = 2000


@dataclass
class Engine:
    info: EngineInfo = INFO
    stats: EngineStats = field(default_factory=EngineStats)
    load: EngineLoad = field(default_factory=EngineLoad)
    cached: set[bytes] = field(default_factory=set)

    def run(self, stream: EngineStream) -> int:
        """Compute a prompt; how many of its tokens were cached. Its keys get published."""
        self.load.keys = self.load.keys if len(self.load.keys) else KeySet(100_000)
        tokens, size, num_hits = stream.request.prompt_token_ids, INFO.block_size, 0
        for end in range(size, len(tokens), size):
            known = pack(tokens[:end])
            num_hits += size * (known in self.cached and num_hits == end - size)
            self.cached.add(known)
        for key in BlockKeys(INFO, stream).all():
            self.load.keys.add(key)
        return num_hits


def _stream(tokens: list[int], *, max_tokens: int = 16) -> EngineStream:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(request_id="r", prompt_token_ids=tuple(tokens), sampling_params=params)
    return EngineStream(request)


def _tenants(num: int, turns: int, rng: random.Random) -> list[list[int]]:
    """Prompts in random order: each tenant's with its own prefix, and an end of their own."""
    prefixes = [[rng.randrange(1000) for _ in range(_PREFIX)] for _ in range(num)]
    prompts = [
        prefix + [rng.randrange(1000) for _ in range(40)]
        for prefix in prefixes
        for _ in range(turns)
    ]
    rng.shuffle(prompts)
    return prompts


def _play(
    routing: Routing, prompts: list[list[int]], num_engines: int, *, num_open: int = 6
) -> tuple[float, list[int]]:
    """The hit rate, and the requests of each engine, with `num_open` requests at once."""
    clock = [0.0]
    router = Router(routing, clock=lambda: clock[0])
    engines = [Engine() for _ in range(num_engines)]
    running: list[tuple[Engine, EngineStream]] = []
    num_hits, counts = 0, Counter[int]()
    for prompt in prompts:
        stream = _stream(prompt)
        engine = router.choose(engines, stream)
        assert engine is not None
        engine.load.enter(stream)
        running.append((engine, stream))
        counts[engines.index(engine)] += 1
        if len(running) > num_open:
            first, ended = running.pop(0)
            num_hits += first.run(ended)
            first.load.leave(ended)
        clock[0] += 0.05
    num_hits += sum(engine.run(stream) for engine, stream in running)
    rate = num_hits / sum(map(len, prompts))
    return rate, [counts[index] for index in range(num_engines)]


@pytest.mark.parametrize(("turns", "seed"), [(4, 0), (30, 1)])
def test_tenants_keep_their_engines_and_the_engines_an_even_load(seed: int, turns: int) -> None:
    prompts = _tenants(8, turns, random.Random(seed))
    single, _ = _play("prefix", prompts, 1)
    rate, counts = _play("prefix", prompts, 3)
    assert rate >= 0.9 * single
    assert max(counts) <= 1.3 * sum(counts) / 3, counts
    assert rate > _play("round-robin", prompts, 3)[0]


def test_a_hot_prefix_spreads() -> None:
    rng = random.Random(1)
    prompts = _tenants(1, 300, rng)
    rate, counts = _play("prefix", prompts, 3, num_open=30)
    assert min(counts) > 50, counts
    assert rate > 0.9


def test_a_conversation_sticks_though_others_come_and_go() -> None:
    clock = [0.0]
    router = Router("prefix", clock=lambda: clock[0])
    engines = [Engine() for _ in range(3)]
    rng = random.Random(2)
    histories = [[rng.randrange(1000) for _ in range(600)] for _ in range(12)]
    homes: dict[int, set[int]] = {number: set() for number in range(len(histories))}
    for _ in range(8):
        for number, history in enumerate(histories):
            stream = _stream(history)
            engine = router.choose(engines, stream)
            assert engine is not None
            engine.run(stream)
            homes[number].add(engines.index(engine))
            history += [rng.randrange(1000) for _ in range(30)]
            clock[0] += 0.2
    assert sum(map(len, homes.values())) <= len(histories) + 2, homes


def test_the_salt_and_the_adapter_part_the_caches() -> None:
    tokens = list(range(100))
    params = SamplingParams(max_tokens=1)
    keys = {
        tuple(BlockKeys(INFO, EngineStream(Request(
            request_id="r", prompt_token_ids=tuple(tokens), sampling_params=params, cache_salt=salt,
        ))).all())
        for salt in ("", "a")
    }  # fmt: skip
    assert len(keys) == 2


def test_round_robin_and_least_loaded() -> None:
    engines = [Engine(), Engine(), Engine()]
    router = Router("round-robin")
    chosen = [router.choose(engines, _stream([1])) for _ in range(6)]
    assert Counter(engines.index(each) for each in chosen if each) == {0: 2, 1: 2, 2: 2}
    busy = EngineStats(num_requests_running=9)
    engines[0].stats = engines[2].stats = busy
    assert Router("least-loaded").choose(engines, _stream([1])) is engines[1]
    assert Router("prefix").choose([], _stream([1])) is None


def test_the_set_of_keys_is_a_set() -> None:
    rng = random.Random(3)
    ours, true = KeySet(600), set[int]()
    pool = [rng.randrange(1, 1 << 32) for _ in range(800)]
    pool += [each & 0xFF for each in pool[:100]]  # which collide
    for _ in range(20_000):
        key = rng.choice(pool) or 1
        if rng.random() < 0.45 and key not in true and len(true) < 600:
            ours.add(key)
            true.add(key)
        elif rng.random() < 0.6:
            ours.discard(key)
            true.discard(key)
        assert len(ours) == len(true)
    assert all((key in ours) == (key in true) for key in pool if key)
    for key in range(1, 2000):
        ours.add(key)
    assert len(ours) == 600  # no more than its table was made for


def test_the_journal_says_what_came_and_went() -> None:
    cache = PrefixCache()
    blocks = [
        CachedBlock(parent=b"", tokens=pack([n]), key=block_key(b"", pack([n]))) for n in range(3)
    ]
    cache.insert(blocks[0])
    assert cache.journal.take() is None  # nobody had read it: all keys are due
    cache.insert(blocks[1])
    cache.insert(blocks[2])
    cache.remove(blocks[0])
    cache.remove(blocks[2])
    assert cache.journal
    assert cache.journal.take() == ([blocks[1].key], [blocks[2].key, blocks[0].key])
    assert not cache.journal
    assert short_key(block_key(b"", pack([1]))) == int.from_bytes(blocks[1].key[:4], "little")  # type: ignore[index]
