"""What a large pool costs, from costs measured here: `python -m penstock.load.pool_arithmetic`.

It measures single operations (a heartbeat decoded, a key added, a request routed, a lease renewed,
the registry read) and simulates how often each happens with many gateways and engines: the
simulation draws engines that join, leave and publish keys, and requests that come, second by
second, and adds up what each party has to do. Where a party needs more than all of its time, the
pool has broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import socket
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from penstock.engine.request import Request, SamplingParams
from penstock.engine.transport.frames import decode, encode, framed
from penstock.engine.transport.messages import (
    HEARTBEAT_INTERVAL_S,
    CachedKeys,
    EngineInfo,
    EngineStats,
    Heartbeat,
)
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.routing import EngineLoad, KeySet, Router
from penstock.gateway.storage.redis_engines import (
    MAX_FULL_READ_S,
    EngineRecord,
    RedisEngines,
    full_read_s,
)
from penstock.gateway.storage.redis_link import RedisLink
from penstock.gateway.storage.redis_url import RedisAddress
from penstock.load.launch import redis_server
from penstock.load.report.options import add_out, settings_of
from penstock.load.report.tables import publish, table

_NUM_BLOCKS = 50_000  # of an engine
_RENEW_S = 1.0
_PUBLISH_PER_S = 10.0  # as often as a busy engine publishes keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes of one operation each."""

    heartbeat_s: float  # a gateway decodes one and sends its own
    key_s: float  # a gateway adds or removes one
    key_bytes: float  # that it keeps of one
    frame_s: float  # an engine encodes and sends one to a gateway
    route_s: float  # a prompt of 2,000 tokens, per engine of the pool
    hash_s: float  # the keys of that prompt
    renew_s: float  # Redis' time for a lease
    version_s: float  # Redis' time for a gateway's question whether anything has changed
    change_s: float  # Redis' time for the same with a change, which is read
    read_s: float  # Redis' time for one record of a full read
    record_bytes: float  # on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool and its traffic."""

    num_gateways: int
    num_engines: int
    joins_per_s: float  # engines that join or leave: 10,000 restarted in an hour are 5.6
    requests_per_s: float  # at each gateway
    keys_per_s: float  # changed blocks of an engine: 2,000 tokens a second are 125
    seconds: int = 60


@dataclass(slots=True)
class Demand:
    """What the parties need, second by second."""

    redis_cores: list[float] = field(default_factory=list)
    redis_bytes: list[float] = field(default_factory=list)
    gateway_cores: list[float] = field(default_factory=list)
    engine_cores: float = 0.0
    key_bytes: float = 0.0  # in a gateway


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gateways", type=int, default=1000, help="gateways of the largest pool")
    add("--engines", type=int, default=10_000, help="engines of the largest pool")
    add("--seed", type=int, default=0, help="seed of the simulation")
    add_out(parser)


def simulate(pool: Pool, costs: Costs, rng: random.Random) -> Demand:
    """Second by second: who joins, who asks, who publishes."""
    demand = Demand()
    num_gateways, num_engines = pool.num_gateways, pool.num_engines
    full_s = full_read_s(num_engines)
    phases = [rng.random() * full_s for _ in range(num_gateways)]
    for second in range(pool.seconds):
        num_joins = sum(rng.random() < pool.joins_per_s / 100 for _ in range(100))
        # A gateway reads what has changed, and everything every `full_s`.
        num_reads = sum((second - phase) % full_s < 1.0 for phase in phases)
        cores = num_engines / _RENEW_S * costs.renew_s
        cores += num_gateways * (costs.change_s if num_joins else costs.version_s)
        cores += num_reads * num_engines * costs.read_s
        demand.redis_cores.append(cores)
        num_records = num_reads * num_engines + num_gateways * num_joins
        demand.redis_bytes.append(num_records * costs.record_bytes)
        num_requests = sum(rng.random() < pool.requests_per_s / 100 for _ in range(100))
        per_gateway = num_engines / HEARTBEAT_INTERVAL_S * costs.heartbeat_s
        per_gateway += num_engines * pool.keys_per_s * costs.key_s
        per_gateway += num_requests * (costs.hash_s + num_engines * costs.route_s)
        per_gateway += num_engines * costs.read_s / full_s
        demand.gateway_cores.append(per_gateway)
    frames_per_s = num_gateways * (1 / HEARTBEAT_INTERVAL_S + _PUBLISH_PER_S)
    demand.engine_cores = frames_per_s * costs.frame_s
    demand.key_bytes = num_engines * _NUM_BLOCKS * costs.key_bytes
    return demand


# -- measuring -------------------------------------------------------------------------------------


def measure() -> Costs:
    """The costs on this machine, in CPU time of one thread."""
    beat = encode(Heartbeat(stats=EngineStats(num_requests_running=3), since_step_s=0.1))
    heartbeat_s = _each(lambda: (decode(beat), encode(Heartbeat())), 20_000)
    keys = array("I", (random.Random(0).randrange(1 << 32) for _ in range(_NUM_BLOCKS))).tobytes()
    filled = KeySet(_NUM_BLOCKS)
    key_s = _each(lambda: filled.update(added=keys, removed=b""), 1) / _NUM_BLOCKS
    key_s = (key_s + _each(lambda: filled.update(added=b"", removed=keys), 1) / _NUM_BLOCKS) / 2
    route_s, hash_s = _routing()
    sender, receiver = socket.socketpair()
    with sender, receiver:
        receiver.settimeout(5.0)

        def send() -> None:
            sender.sendall(framed(encode(CachedKeys(number=1, added=bytes(4 * 13)))))
            receiver.recv(4096)

        frame_s = _each(send, 5000)
    renew_s, version_s, change_s, read_s, record_bytes = asyncio.run(_registry())
    return Costs(
        heartbeat_s=heartbeat_s,
        key_s=key_s,
        key_bytes=filled.num_bytes / _NUM_BLOCKS,
        frame_s=frame_s,
        route_s=route_s,
        hash_s=hash_s,
        renew_s=renew_s,
        version_s=version_s,
        change_s=change_s,
        read_s=read_s,
        record_bytes=record_bytes,
    )


@dataclass
class _Engine:
    info: EngineInfo
    stats: EngineStats = field(default_factory=EngineStats)
    load: EngineLoad = field(default_factory=EngineLoad)


def _routing() -> tuple[float, float]:
    """Seconds per engine, and for the keys, of routing a prompt of 2,000 tokens that none has."""
    info = EngineInfo(
        model="m", model_path="/m", max_model_len=4096, vocab_size=1000, num_blocks=_NUM_BLOCKS,
        block_size=16, num_host_blocks=0, max_num_seqs=64, scheduling_policy="fcfs", dtype="f",
        device="cpu", eos_token_ids=(), pid=1,
    )  # fmt: skip
    params = SamplingParams(max_tokens=64)
    request = Request(request_id="r", prompt_token_ids=tuple(range(2000)), sampling_params=params)

    def cost(num_engines: int) -> float:
        engines, router = [_Engine(info) for _ in range(num_engines)], Router("prefix")
        stream = EngineStream(request)

        def forget() -> None:
            for engine in engines:
                engine.load.forget()

        def choose() -> None:
            router.choose(engines, stream)
            forget()

        return _each(choose, 200) - _each(forget, 200)

    few, many = cost(2), cost(202)
    return (many - few) / 200, few


async def _registry() -> tuple[float, float, float, float, float]:
    """Redis' CPU for a renewal, a question without a change and with one, and a record of a full
    read; and its bytes."""
    with redis_server() as (url, process):
        link = RedisLink(RedisAddress.parse(url))
        engines = RedisEngines(link, "m")
        record = EngineRecord(
            address="10.0.0.1:7000", model="m", cache_root=bytes(32), block_size=16
        )
        renew_s = await _of_redis(process, lambda: engines.register(record), 3000)
        many = RedisEngines(link, "many")
        for number in range(1000):
            address = f"10.0.{number // 250}.{number % 250}:1"
            await many.register(msgspec.structs.replace(record, address=address))
        read_s = await _of_redis(process, many.records, 50) / 1000
        assert len(await many.records()) == 1000, "leases ended while they were read"
        version_s = await _of_redis(process, engines.addresses, 3000)
        # The clock stands still, so nobody reads all of them again.
        gateways = [RedisEngines(link, "n", clock=lambda: 0.0) for _ in range(200)]
        for gateway in gateways:
            await gateway.addresses()
        change_s = 0.0
        for number in range(15):
            joining = msgspec.structs.replace(record, address=f"10.1.0.{number}:1")
            await gateways[0].register(joining)
            asking = iter(gateways)
            change_s += await _of_redis(process, lambda: next(asking).addresses(), 200) / 15  # noqa: B023
        await engines.close()
    return (
        renew_s,
        version_s,
        change_s,
        read_s,
        2.0 * len(record.address) + len(msgspec.msgpack.encode(record)),
    )


async def _of_redis(process: Any, call: Callable[[], Awaitable[object]], num: int) -> float:
    """Redis' CPU seconds for one call."""
    before = sum(process.cpu_times()[:2])
    for _ in range(num):
        await call()
    return float(sum(process.cpu_times()[:2]) - before) / num


def _each(call: Callable[[], object], num: int) -> float:
    """CPU seconds of one call."""
    call()
    before = time.process_time()
    for _ in range(num):
        call()
    return (time.process_time() - before) / num


# -- the page --------------------------------------------------------------------------------------


def run(parsed: argparse.Namespace) -> int:
    """Measure, simulate, and write the page."""
    costs, rng = measure(), random.Random(parsed.seed)
    largest = Pool(
        num_gateways=parsed.gateways,
        num_engines=parsed.engines,
        joins_per_s=5.6,
        requests_per_s=20.0,
        keys_per_s=125.0,
    )
    pools = {
        f"{num_gateways:,} × {num_engines:,}": replace(
            largest,
            num_gateways=num_gateways,
            num_engines=num_engines,
            joins_per_s=num_engines / largest.num_engines * largest.joins_per_s,
        )
        for num_gateways, num_engines in (
            (2, 3), (10, 100), (100, 100), (100, 1000), (parsed.gateways, parsed.engines),
        )
    }  # fmt: skip
    demands = {name: simulate(pool, costs, rng) for name, pool in pools.items()}
    text = f"{_costs_text(costs)}\n\n{_demand_text(demands)}\n\n{_breaks_text(largest, costs)}"
    data = {
        "settings": settings_of(parsed),
        "costs": asdict(costs),
        "pools": {name: asdict(pool) for name, pool in pools.items()},
        "demands": {name: asdict(demand) for name, demand in demands.items()},
    }
    publish(parsed.out, "pool", "What a large pool costs", text, data)
    return 0


def _costs_text(costs: Costs) -> str:
    rows = {
        "a gateway: an engine's heartbeat, and its own": f"{costs.heartbeat_s * 1e6:.1f} µs",
        "a gateway: a key of a block that comes or goes": f"{costs.key_s * 1e6:.2f} µs",
        "a gateway: memory of a key": f"{costs.key_bytes:.1f} bytes",
        "an engine: a frame of keys to a gateway": f"{costs.frame_s * 1e6:.1f} µs",
        "a gateway: the keys of a prompt of 2,000 tokens": f"{costs.hash_s * 1e6:.0f} µs",
        "a gateway: the same prompt, for each engine": f"{costs.route_s * 1e6:.1f} µs",
        "Redis: an engine's lease": f"{costs.renew_s * 1e6:.0f} µs",
        "Redis: a gateway asks whether anything changed": f"{costs.version_s * 1e6:.0f} µs",
        "Redis: the same, and it reads a change": f"{costs.change_s * 1e6:.0f} µs",
        "Redis: one record of a full read": f"{costs.read_s * 1e6:.2f} µs",
    }
    return "Measured, in CPU time:\n\n" + table(["", "costs"], [list(row) for row in rows.items()])


def _demand_text(demands: Mapping[str, Demand]) -> str:
    rows = [
        [
            name,
            f"{_mean(demand.redis_cores):.3f}",
            f"{max(demand.redis_cores):.2f}",
            f"{max(demand.redis_bytes) / 1e6:,.1f}",
            f"{_mean(demand.gateway_cores):.3f}",
            f"{demand.key_bytes / 1e6:,.0f}",
            f"{demand.engine_cores:.3f}",
        ]
        for name, demand in demands.items()
    ]
    header = [
        "gateways × engines", "Redis, cores", "worst second", "MB/s", "a gateway, cores",
        "its MB of keys", "an engine, cores",
    ]  # fmt: skip
    return (
        "Simulated, with 20 requests a second at each gateway and 125 changed blocks a second at "
        "each engine, all engines restarted within half an hour:\n\n" + table(header, rows)
    )


def _breaks_text(pool: Pool, costs: Costs) -> str:
    """The number of engines at which each party is full, others being as in the largest pool."""
    share = costs.heartbeat_s + pool.keys_per_s * costs.key_s + pool.requests_per_s * costs.route_s
    questions = pool.num_gateways * costs.change_s
    reads = pool.num_gateways * costs.read_s / MAX_FULL_READ_S
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    rows = {
        "a gateway's core: keys, heartbeats and routing": 1.0 / share,
        "Redis' core: leases, changes, and all records once a minute": (
            max(1.0 - questions, 0.0) / (costs.renew_s / _RENEW_S + reads)
        ),
        "a gateway's open files": float(files),
    }
    ordered = sorted(rows.items(), key=lambda row: row[1])
    return (
        f"With {pool.num_gateways:,} gateways, what is full first, and with how many engines:\n\n"
        + table(["", "engines"], [[what, f"{num:,.0f}"] for what, num in ordered])
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    raise SystemExit(run(_parser.parse_args()))
