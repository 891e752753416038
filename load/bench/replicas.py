"""`penstock bench replicas`: several engines behind one gateway, beside one.

    routing   tenants with long prefixes: share of prompt tokens found in the caches, and each
              engine's share of the requests, by --routing; with one engine as the reference
    failover  an engine is killed, or told to end, under many seeded streams: each stream's tokens
              beside those of an undisturbed run, and the longest wait for a next token
    drain     the same of an engine that is told to end under streams with long prompts, whose KV is
              computed again or goes along
    threads   one-thread engines beside one engine of as many threads, in alternating rounds
    steps     without a gateway: steps per second of one-thread engines on cores of their own, all
              at once and one alone, in alternating rounds

Prompts are token ids, so no tokenizer is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import httpx
import orjson
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.config import DEMO_MODEL, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.kernels.cpu.cores import share_of_cores
from penstock.load.launch import Started, server
from penstock.load.report.options import add_out, positive, settings_of
from penstock.load.report.tables import publish, table_of

_PARTS = ("routing", "failover", "drain", "threads", "steps")
_ROUTINGS = ("prefix", "least-loaded", "round-robin")
_TIMEOUT_S = 600.0
_NUM_SEQS = 16  # in each engine of `steps`
_STEPS_S = 4.0  # of a round
_FIRST_TOKEN = 20  # of a vocabulary, those before may be special


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """One run of the tenants' requests."""

    name: str
    hit_rate: float
    share_of_one: float  # of the single engine's hit rate
    largest_load: float  # requests of the busiest engine ÷ their mean
    requests: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """One disturbed run of all streams."""

    name: str
    prompt_len: int
    num_streams: int
    num_moved: int  # that the engine had when it was struck
    num_lost: int  # did not end, or with an error
    num_different: int  # than undisturbed
    longest_wait_s: float  # for a stream's next token, from the blow on
    median_wait_s: float  # of the streams' longest ones
    longest_undisturbed_s: float
    num_blocks: int  # of KV that went along


@dataclass(slots=True)
class Answer:
    """A stream as it is read."""

    tokens: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    has_ended: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what to measure")
    add("--model", default=None, help="a directory or a Hub id; default: the demo")
    add("--replicas", type=positive, default=3, help="engines of `routing`")
    add("--tenants", type=positive, default=8, help="tenants of `routing`")
    add("--prefix-len", type=positive, default=2000, help="tokens of a tenant's prefix")
    add("--requests", type=positive, default=20, help="requests of each tenant")
    add("--concurrency", type=positive, default=12, help="requests of `routing` at once")
    add("--streams", type=positive, default=50, help="streams of `failover`")
    add("--drain-streams", type=positive, default=20, help="streams of `drain`")
    add("--drain-prompt-len", type=positive, default=1000, help="tokens of their prompts")
    add("--output-len", type=positive, default=16, help="tokens of an answer of `routing`")
    add("--threads", type=positive, default=2, help="threads of the one engine of `threads`")
    add("--threads-model", default=None, help="model of `threads`; default: --model")
    add("--threads-streams", type=positive, default=32, help="streams of `threads` at once")
    add("--threads-output-len", type=positive, default=64, help="tokens of each")
    add("--rounds", type=positive, default=5, help="rounds of `threads`")
    add("--seed", type=int, default=0, help="seed of everything random")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the tables; 1 if a stream was lost or differed."""
    data: dict[str, Any] = {"settings": settings_of(parsed)}
    texts: list[str] = []
    failed = False
    if "routing" in parsed.parts:
        routed = measure_routing(parsed)
        data["routing"] = [asdict(each) for each in routed]
        texts.append(_routing_text(parsed, routed))
    if "failover" in parsed.parts:
        failovers = measure_failover(parsed)
        data["failover"] = [asdict(each) for each in failovers]
        texts.append(_failover_text(failovers))
        failed = any(each.num_lost or each.num_different for each in failovers)
    if "drain" in parsed.parts:
        drains = measure_drain(parsed)
        data["drain"] = [asdict(each) for each in drains]
        texts.append(_failover_text(drains))
        failed |= any(each.num_lost or each.num_different for each in drains)
    if "threads" in parsed.parts:
        if (num_cores := len(os.sched_getaffinity(0))) < parsed.threads:
            raise ConfigError(f"--threads {parsed.threads}: this machine has {num_cores} cores")
        rates = measure_threads(parsed)
        data["threads"] = rates
        texts.append(_threads_text(parsed, rates))
    if "steps" in parsed.parts:
        steps = measure_steps(parsed)
        data["steps"] = steps
        texts.append(_steps_text(steps))
    publish(parsed.out, "replicas", "Several engines", "\n\n".join(texts), data)
    return int(failed)


# -- routing ---------------------------------------------------------------------------------------


def measure_routing(parsed: argparse.Namespace) -> list[Routed]:
    """The reference with one engine first."""
    found: list[Routed] = []
    for num, routing in ((1, "prefix"), *((parsed.replicas, each) for each in _ROUTINGS)):
        flags = ("--replicas", str(num), "--routing", routing)
        with server(parsed.model, flags) as started:
            before = _engines(started)
            begun_s = time.perf_counter()
            uvloop.run(_send_tenants(started.base_url, parsed))
            seconds = time.perf_counter() - begun_s
            after = _engines(started)
        growth = {name: _less(after[name], before[name]) for name in after}
        rate = sum(each["prefix_cache_hits_total"] for each in growth.values())
        rate /= sum(each["prefix_cache_queries_total"] for each in growth.values())
        # All answers have the same length, so tokens are requests.
        requests = [
            round(each["engine_generation_tokens_total"] / parsed.output_len)
            for each in growth.values()
        ]
        found.append(
            Routed(
                name="one engine" if num == 1 else f"{num} engines, {routing}",
                hit_rate=rate,
                share_of_one=rate / found[0].hit_rate if found else 1.0,
                largest_load=max(requests) * len(requests) / sum(requests),
                requests=requests,
                seconds=seconds,
            )
        )
    return found


async def _send_tenants(base_url: str, parsed: argparse.Namespace) -> None:
    rng = random.Random(parsed.seed)
    prefixes = [_ids(rng, parsed.prefix_len) for _ in range(parsed.tenants)]
    prompts = [[*each, *_ids(rng, 16)] for each in prefixes for _ in range(parsed.requests)]
    rng.shuffle(prompts)
    places = asyncio.Semaphore(parsed.concurrency)

    async def send(client: httpx.AsyncClient, prompt: list[int]) -> None:
        async with places:
            body = {"prompt": prompt, "max_tokens": parsed.output_len, "ignore_eos": True}
            (await client.post("/v1/completions", json=body)).raise_for_status()

    async with _client(base_url, parsed.concurrency) as client:
        await asyncio.gather(*(send(client, prompt) for prompt in prompts))


def _routing_text(parsed: argparse.Namespace, routed: Sequence[Routed]) -> str:
    columns: Mapping[str, Callable[[Routed], str]] = {
        "": lambda row: row.name,
        "hit rate": lambda row: f"{row.hit_rate:.1%}",
        "of one engine's": lambda row: f"{row.share_of_one:.1%}",
        "requests of each": lambda row: " ".join(map(str, row.requests)),
        "busiest ÷ mean": lambda row: f"{row.largest_load:.2f}",
        "seconds": lambda row: f"{row.seconds:.1f}",
    }
    return (
        f"{parsed.tenants} tenants with prefixes of {parsed.prefix_len} tokens, "
        f"{parsed.requests} requests each in random order, {parsed.concurrency} at once.\n\n"
        + table_of(routed, columns)
    )


# -- failover --------------------------------------------------------------------------------------


def measure_failover(parsed: argparse.Namespace) -> list[Failover]:
    """An engine of two is killed, and one drains."""
    found = []
    for name, blow in (("kill -9", signal.SIGKILL), ("drain", signal.SIGTERM)):
        with server(parsed.model, ("--replicas", "2", "--shutdown-grace-s", "2")) as started:
            bodies = _bodies(parsed.seed, parsed.streams, prompt_len=32)
            found.append(uvloop.run(_strike(started, bodies, name, blow)))
    return found


def measure_drain(parsed: argparse.Namespace) -> list[Failover]:
    """One of two engines drains under long prompts."""
    found = []
    bodies = _bodies(parsed.seed, parsed.drain_streams, prompt_len=parsed.drain_prompt_len)
    for name, mode in (("computed again", "never"), ("goes along", "auto")):
        flags = ("--replicas", "2", "--shutdown-grace-s", "2", "--kv-transfer", mode)
        with server(parsed.model, flags) as started:
            strike = _strike(started, bodies, f"drain, KV {name}", signal.SIGTERM)
            found.append(uvloop.run(strike))
    return found


async def _strike(
    started: Started, bodies: Sequence[Mapping[str, Any]], name: str, blow: signal.Signals
) -> Failover:
    async with _client(started.base_url, len(bodies)) as client:
        expected = await _answers(client, bodies)
        answers = [Answer() for _ in bodies]
        reading = asyncio.create_task(_answers(client, bodies, answers))
        while not all(answer.tokens for answer in answers):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        engine = started.family()["engine"]
        health = (await client.get("/health")).json()
        struck_s = time.perf_counter()
        engine.send_signal(blow)
        await reading
        received = sum(
            each.get("kv_blocks_transferred_total received", 0.0)
            for each in _engines(started).values()
        )
    ends = [[struck_s, *(at for at in answer.times_s if at > struck_s)] for answer in answers]
    return Failover(
        name=name,
        prompt_len=len(bodies[0]["prompt"]),
        num_streams=len(answers),
        num_moved=health["engines"][0]["num_streams"],
        num_lost=sum(not answer.has_ended for answer in answers),
        num_different=sum(
            left.tokens != right.tokens for left, right in zip(answers, expected, strict=True)
        ),
        longest_wait_s=max(map(_longest_gap, ends)),
        median_wait_s=statistics.median(map(_longest_gap, ends)),
        longest_undisturbed_s=max(_longest_gap(answer.times_s) for answer in expected),
        num_blocks=round(received),
    )


def _bodies(seed: int, num: int, *, prompt_len: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "prompt": _ids(rng, prompt_len), "max_tokens": 200, "ignore_eos": True, "stream": True,
            "temperature": 0.9, "seed": number, "logprobs": 0,
        }
        for number in range(num)
    ]  # fmt: skip


async def _answers(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer] | None = None,
) -> Sequence[Answer]:
    answers = answers or [Answer() for _ in bodies]
    await asyncio.gather(
        *(_read(client, body, answer) for body, answer in zip(bodies, answers, strict=True))
    )
    return answers


async def _read(client: httpx.AsyncClient, body: Mapping[str, Any], answer: Answer) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]" or not line.startswith("data: "):
                continue
            chunk = orjson.loads(line.removeprefix("data: "))
            for choice in chunk.get("choices", ()):
                answer.tokens += (choice["logprobs"] or {}).get("tokens", ())
                answer.has_ended |= choice["finish_reason"] == "length"
            answer.times_s.append(time.perf_counter())


def _longest_gap(times_s: Sequence[float]) -> float:
    gaps = [later - sooner for sooner, later in pairwise(times_s)]
    return max(gaps, default=0.0)


def _failover_text(failovers: Sequence[Failover]) -> str:
    columns: Mapping[str, Callable[[Failover], str]] = {
        "of two engines, one": lambda row: row.name,
        "prompt": lambda row: str(row.prompt_len),
        "streams": lambda row: str(row.num_streams),
        "moved": lambda row: str(row.num_moved),
        "lost": lambda row: str(row.num_lost),
        "other tokens": lambda row: str(row.num_different),
        "KV blocks": lambda row: str(row.num_blocks),
        "median wait": lambda row: f"{row.median_wait_s:.2f} s",
        "longest wait": lambda row: f"{row.longest_wait_s:.2f} s",
        "undisturbed": lambda row: f"{row.longest_undisturbed_s:.2f} s",
    }
    return table_of(failovers, columns)


# -- threads ---------------------------------------------------------------------------------------


def measure_threads(parsed: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each round, by server."""
    num, model = parsed.threads, parsed.threads_model or parsed.model
    servers = {
        f"{num} engines with 1 thread": ("--replicas", str(num), "--num-threads", "1"),
        f"1 engine with {num} threads": ("--num-threads", str(num)),
    }
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(server(model, flags)) for name, flags in servers.items()
        }
        for number in range(parsed.rounds + 1):
            for name in started if number % 2 else reversed(started):
                rate = uvloop.run(_rate(started[name].base_url, parsed, number))
                if number:  # the first warms up
                    rates[name].append(rate)
    return dict(rates)


async def _rate(base_url: str, parsed: argparse.Namespace, number: int) -> float:
    rng = random.Random(f"{parsed.seed} {number}")
    num, length = parsed.threads_streams, parsed.threads_output_len
    async with _client(base_url, num) as client:

        async def send(prompt: list[int]) -> None:
            body = {
                "prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True,
                "temperature": 0,
            }  # fmt: skip
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass

        begun_s = time.perf_counter()
        await asyncio.gather(*(send(_ids(rng, 32)) for _ in range(num)))
        seconds = time.perf_counter() - begun_s
        return float(num * length / seconds)


def _threads_text(parsed: argparse.Namespace, rates: Mapping[str, Sequence[float]]) -> str:
    return _ratios_text(
        f"{parsed.threads_streams} streams of {parsed.threads_output_len} tokens through HTTP, in "
        "alternating rounds",
        rates,
        of="",
        unit="tokens/s",
    )


# -- steps -----------------------------------------------------------------------------------------


def measure_steps(parsed: argparse.Namespace) -> dict[str, list[float]]:
    """Steps per second of each round: of all engines together, and of one alone."""
    num, model = parsed.threads, parsed.threads_model or parsed.model or DEMO_MODEL
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num)]
    workers = [
        context.Process(target=_step_when_told, args=(theirs, index, num, model), daemon=True)
        for index, (_, theirs) in enumerate(pipes)
    ]
    ours = [pipe for pipe, _ in pipes]
    for worker in workers:
        worker.start()
    for pipe in ours:
        pipe.recv()  # it is ready
    rates: dict[str, list[float]] = {f"{num} at once": [], "1 alone": []}
    for number in range(parsed.rounds + 1):
        order = list(rates) if number % 2 else list(reversed(rates))
        for name in order:
            active = ours if name == f"{num} at once" else ours[:1]
            for pipe in active:
                pipe.send(_STEPS_S)
            rate = sum(pipe.recv() for pipe in active)
            if number:  # the first warms up
                rates[name].append(rate)
    for pipe in ours:
        pipe.send(None)
    for worker in workers:
        worker.join()
    return rates


def _step_when_told(pipe: Connection, index: int, num: int, model: str) -> None:
    """A process: steps 16 sequences for as many seconds as it is told, again and again."""
    os.sched_setaffinity(0, share_of_cores(index, num))
    config = EngineConfig(
        model=ModelConfig(model=model), device=DeviceConfig(device="cpu", num_threads=1)
    )
    core, info = build_core(config)
    rng, names = random.Random(index), itertools.count()
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        num_steps, begun_s = 0, time.perf_counter()
        while time.perf_counter() < begun_s + seconds:
            while core.scheduler.num_running + core.scheduler.num_waiting < _NUM_SEQS:
                params = SamplingParams(
                    temperature=0.0, max_tokens=info.max_model_len // 2, ignore_eos=True
                )
                core.add(
                    Request(
                        request_id=str(next(names)),
                        prompt_token_ids=tuple(_ids(rng, 32)),
                        sampling_params=params,
                    )
                )
            core.step()
            num_steps += 1
        pipe.send(num_steps / (time.perf_counter() - begun_s))


def _steps_text(rates: Mapping[str, Sequence[float]]) -> str:
    return _ratios_text(
        f"Without a gateway, {_NUM_SEQS} sequences in each engine",
        rates,
        of="engines of 1 thread",
        unit="steps/s",
    )


# -- common ----------------------------------------------------------------------------------------


def _ratios_text(lead: str, rates: Mapping[str, Sequence[float]], *, of: str, unit: str) -> str:
    """The rates of several engines and of one, and the median of the rounds' ratios."""
    several, one = rates.values()
    ratios = [left / right for left, right in zip(several, one, strict=True)]
    columns: Mapping[str, Callable[[str], str]] = {
        of: lambda name: name,
        unit: lambda name: f"{statistics.median(rates[name]):.0f}",
        "in the rounds": lambda name: " ".join(f"{rate:.0f}" for rate in rates[name]),
    }
    median = f"the median of the rounds' ratios is {statistics.median(ratios):.2f}"
    return f"{lead}; {median}.\n\n" + table_of(list(rates), columns)


def _client(base_url: str, num_streams: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=num_streams + 1)
    return httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits)


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, 250) for _ in range(num)]


def _engines(started: Started) -> dict[str, dict[str, float]]:
    """Each engine's counters, by its name."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    text = httpx.get(f"{started.base_url}/metrics", timeout=_TIMEOUT_S).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("penstock:")
            if direction := sample.labels.get("direction"):
                name += f" {direction}"
            if name.startswith(("prefix_cache_", "engine_generation", "kv_blocks_transferred")):
                found[sample.labels.get("engine", "0")][name] = sample.value
    return dict(found)


def _less(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
