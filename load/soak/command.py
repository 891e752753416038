"""`penstock bench soak`: minutes of mixed and hostile traffic, and a verdict.

All kinds of streams and conversations; clients that disconnect, cancel, read slowly or not at
all; crowds, invalid requests, garbage and broken frames, all drawn from one seed. The exit code
is 1 unless the verdict is clean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import aiohttp

from penstock.engine.errors import ConfigError
from penstock.load.launch import end_as_interrupted
from penstock.load.report.options import add_out
from penstock.load.report.tables import publish, table, table_of
from penstock.load.soak import hostile, traffic
from penstock.load.soak.attack import attack, kinds_of
from penstock.load.soak.journal import Journal, Kind
from penstock.load.soak.prober import probing
from penstock.load.soak.scene import Scene, open_scene
from penstock.load.soak.target import Target, given_server, own_server
from penstock.load.soak.verdict import (
    Bounds,
    Cost,
    Evidence,
    Fate,
    Finding,
    costs,
    fate_of,
    findings,
    is_settled,
    slopes,
)
from penstock.load.soak.watch import ProcessSample, Watch

# By the names that `--only` takes.
KINDS = {kind.name.lower().replace("_", "-"): kind for kind in Kind if kind is not Kind.CALM}
_REDIS_CONNECTIONS = 128  # that a gateway keeps open once it had to open them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("server", "one of these; by default the demo model")
    which = servers.add_mutually_exclusive_group()
    add = which.add_argument
    add("--base-url", help="a running server")
    add("--model", help="start a penstock server of this model")
    add = servers.add_argument
    add("--serve-flags", default="", help="more flags for the started server")
    add("--api-key", help="sent with every request")
    traffic = parser.add_argument_group("traffic")
    add = traffic.add_argument
    add("--minutes", type=float, default=10.0, help="duration")
    add("--concurrency", type=int, default=8, help="minimum number of concurrent clients")
    add("--seed", type=int, default=0, help="seed of everything random")
    add(
        "--kills",
        action=argparse.BooleanOptionalAction,
        help="kill the started server's engine and, if there are several, its gateways in turn; "
        "each must be back within a minute; default: yes, but not with --base-url",
    )
    add(
        "--attack",
        action="store_true",
        help="kills, freezes of gateways, engine and Redis, floods, silent handshakes, an unread "
        "log, 4 MB prompts, schemas and more, one after the other; the started server has two "
        "gateways, a Redis of its own, and keys of two tenants",
    )
    add(
        "--only",
        nargs="+",
        choices=tuple(KINDS),
        metavar="KIND",
        help=f"with --attack: only some of it, in turn: {', '.join(KINDS)}",
    )
    add(
        "--images",
        action="store_true",
        help="with --attack: of a small model with random weights that takes images, with a host "
        "of images that sends bytes one by one",
    )
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument(
        "--max-memory-growth",
        type=float,
        default=Bounds().memory_kib_per_min,
        metavar="KIB_PER_MIN",
        help="limit for each process after the warm-up, the first third",
    )
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Soak; print and write the report; return 1 unless the verdict is clean. Raises ConfigError
    if the settings are invalid or the server does not start."""
    is_given = parsed.base_url is not None
    if parsed.minutes <= 0 or parsed.concurrency < 1:
        raise ConfigError("--minutes and --concurrency must be more than 0")
    if is_given and parsed.serve_flags:
        raise ConfigError("--serve-flags is for a penstock server that soak starts")
    if is_given and parsed.kills:
        raise ConfigError("--kills is for a server that soak starts, not for --base-url")
    if parsed.attack and (is_given or parsed.kills is False):
        raise ConfigError("--attack is for a server that soak starts, and needs kills")
    if parsed.only and not parsed.attack:
        raise ConfigError("--only is for --attack")
    if parsed.images and (not parsed.attack or parsed.model is not None):
        raise ConfigError("--images is for --attack, and brings its own model")
    end_as_interrupted()
    if is_given:
        return soak_target(given_server(parsed.base_url), parsed)
    is_attacked, has_images = parsed.attack, parsed.images
    with own_server(
        parsed.model, parsed.serve_flags, is_attacked=is_attacked, has_images=has_images
    ) as target:
        return soak_target(target, parsed)


def soak_target(target: Target, parsed: argparse.Namespace) -> int:
    """Soak a server; print and write the report; return 1 unless the verdict is clean."""
    has_kills = parsed.base_url is None if parsed.kills is None else parsed.kills
    kinds = [KINDS[name] for name in parsed.only or KINDS] if parsed.attack else [Kind.KILL]
    plan = Plan(
        duration_s=parsed.minutes * 60,
        concurrency=parsed.concurrency,
        seed=parsed.seed,
        kinds=kinds_of(target, kinds) if has_kills else (),
        api_key=parsed.api_key or target.api_key,
    )
    has_redis = parsed.attack or "--redis-url" in parsed.serve_flags
    bounds = Bounds(
        memory_kib_per_min=parsed.max_memory_growth,
        spare_descriptors=Bounds().spare_descriptors + _REDIS_CONNECTIONS * has_redis,
    )
    attack = " under attack" * parsed.attack
    clients = f"{plan.concurrency} clients at once{attack}"
    title = f"{parsed.minutes:g} minutes of {clients}: {target.name}"
    print(title, flush=True)
    evidence = asyncio.run(soak(target, plan, bounds))
    found = findings(evidence, bounds)
    report = report_text(evidence, bounds, found)
    print()
    figures = {"title": title, "seed": plan.seed, **report_figures(evidence, bounds, found)}
    publish(parsed.out, "soak", f"Soak\n\n{title}", report, figures)
    return int(bool(found))


# -- what is said of it -----------------------------------------------------------------------

_MIB = 1 << 20
_FATES = (Fate.FAULTY, Fate.CARRIED, Fate.TURNED_AWAY, Fate.BROKEN)
_COST_NOTES = """\
Streams: those that met it; their faults are judged above. `/health` and gaps are as a process of
its own saw them, which reads four steady streams. MB at most: by the process that grew most,
meanwhile or within 30 s. MB kept: by the process that kept most, at its best within 30 s, the worst
time. Nothing: the traffic alone, right before the 4 MB prompts."""
_NOTES = """\
KiB/min: a straight line through the calmer half of a process's memory after its warm-up.
Descriptors and sockets: idle before → idle after. Turned away meanwhile: asked while what was
killed or frozen was not back. Broken by a kill: held by the gateway that was killed, and not
resumed by its client, as must be."""


def report_text(evidence: Evidence, bounds: Bounds, found: Sequence[Finding]) -> str:
    """Everything as Markdown, the verdict last."""
    journal = evidence.journal
    acts = ", ".join(f"{name} {num:,}" for name, num in sorted(journal.num_done.items()))
    streams = [[name, *(f"{count:,}" for count in counts)] for name, *counts in _streams(evidence)]
    victims = Counter(kill.victim for kill in journal.of(Kind.KILL))
    kills = ", ".join(f"{victim} {num}" for victim, num in victims.items()) or "none"
    return "\n\n".join(
        [
            table(("streams", "ended", *_FATES), streams),
            f"Acts: {acts}. Kills: {kills}.",
            *([_costs_table(evidence)] if evidence.kinds else []),
            _processes_table(evidence, bounds),
            _NOTES,
            _verdict(found),
        ]
    )


def report_figures(evidence: Evidence, bounds: Bounds, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything as data, with every sample. All times are of one clock."""
    journal = evidence.journal
    names = ("actor", "ended", *(fate.name.lower() for fate in _FATES))
    data: dict[str, Sequence[Any]] = {
        "findings": found,
        "adversities": journal.adversities,
        "costs": costs(evidence),
        "slopes": slopes(evidence.samples, bounds.warmup_share),
        "samples": (evidence.before, *evidence.samples, evidence.after),
    }
    return {
        "is_clean": not found,
        "bounds": asdict(bounds),
        "acts": dict(journal.num_done),
        "streams": [dict(zip(names, row, strict=True)) for row in _streams(evidence)],
        **{name: [asdict(row) for row in rows] for name, rows in data.items()},
    }


def _streams(evidence: Evidence) -> list[tuple[Any, ...]]:
    """Per kind of actor: its name, its streams, and those of each of `_FATES`."""
    journal = evidence.journal
    fates: defaultdict[str, Counter[Fate]] = defaultdict(Counter)
    for outcome in journal.outcomes:
        fates[outcome.actor][fate_of(outcome, journal.outages)] += 1
    return [
        (name, counts.total(), *(counts[fate] for fate in _FATES))
        for name, counts in sorted(fates.items())
    ]


def _costs_table(evidence: Evidence) -> str:
    def ms(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds * 1000:,.0f}"

    columns: dict[str, Callable[[Cost], str]] = {
        "adversity": lambda cost: cost.kind.value,
        "times": lambda cost: f"{cost.num_times:,}",
        "s": lambda cost: f"{cost.seconds:,.0f}",
        "streams": lambda cost: f"{cost.num_streams:,}",
        "with a fault": lambda cost: f"{cost.num_broken:,}",
        "/health p99 ms": lambda cost: ms(cost.health_p99_s),
        "gap p99 ms": lambda cost: ms(cost.gap_p99_s),
        "p99.9": lambda cost: ms(cost.gap_p999_s),
        "largest": lambda cost: ms(cost.largest_gap_s),
        "events/s": lambda cost: f"{cost.events_per_s:,.0f}",
        "MB at most": lambda cost: f"{cost.peak_bytes / 1e6:,.0f}",
        "MB kept": lambda cost: f"{cost.memory_bytes / 1e6:,.1f}",
        "prober's lag p99 ms": lambda cost: ms(cost.lag_p99_s),
    }
    return f"{table_of(costs(evidence), columns)}\n\n{_COST_NOTES}"


def _processes_table(evidence: Evidence, bounds: Bounds) -> str:
    before = {process.name: process for process in evidence.before.processes}
    rates = {each.pid: each.kib_per_min for each in slopes(evidence.samples, bounds.warmup_share)}

    def change(text: Callable[[ProcessSample], str]) -> Callable[[ProcessSample], str]:
        return lambda each: f"{text(before.get(each.name, each))} → {text(each)}"

    if not evidence.after.processes:
        return "No process of the server is on this machine: memory was not watched."
    return table_of(
        evidence.after.processes,
        {
            "process": lambda each: each.name,
            "MiB": change(lambda each: f"{each.rss_bytes / _MIB:,.1f}"),
            "KiB/min": lambda each: f"{rates[each.pid]:,.0f}" if each.pid in rates else "–",
            "descriptors": change(lambda each: f"{each.num_fds}"),
            "sockets": change(lambda each: f"{each.num_sockets}"),
        },
    )


def _verdict(found: Sequence[Finding]) -> str:
    if not found:
        return "Verdict: clean."
    lines = [f"- {each.what}: {each.count:,}×, {each.detail}" for each in found]
    return "\n".join(["Verdict: not clean.", "", *lines])


# -- the course of a soak ------------------------------------------------------------------------

Actor: TypeAlias = Callable[[Scene, random.Random], Awaitable[None]]

_ACT_WITHIN_S = 180.0
_IDLE_WITHIN_S = 20.0
_BROKEN_PAUSE_S = 0.2
_KILLS = 6  # per soak, if that leaves some seconds between them
_KILL_EVERY_S = (3.0, 30.0)
_KILLS_SHARE = 0.5  # of a soak; the rest shows memory without kills

# The actors and their weights.
ACTORS: Mapping[Actor, float] = {
    traffic.read_to_the_end: 8,
    traffic.converse: 3,
    traffic.leave: 4,
    traffic.drop_socket: 1,
    traffic.cancel_lanes: 2,
    traffic.read_slowly: 2,
    traffic.hoard: 0.3,
    traffic.crowd: 0.3,
    hostile.ask_nonsense: 3,
    hostile.ask_too_much: 0.5,
    hostile.send_nonsense: 1,
    hostile.send_garbage: 1,
    hostile.send_bad_frames: 1,
    traffic.resume_sse: 3,
    traffic.resume_socket: 3,
    traffic.cancel_by_id: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a soak."""

    duration_s: float
    concurrency: int  # actors at once; some run several streams
    seed: int
    kinds: Sequence[Kind] = ()  # adversities, in turn; besides kills they are watched by a prober
    api_key: str | None = None


async def soak(target: Target, plan: Plan, bounds: Bounds) -> Evidence:
    """Warm up, sample, run the traffic, wait until idle, and sample again."""
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    journal = Journal()
    async with aiohttp.ClientSession(target.base_url, headers=headers) as http:
        watch = Watch(target.family, http, lambda: journal.num_open)
        await _warm_up(target, plan)
        probed = None
        before = await watch.settled(_IDLE_WITHIN_S, lambda sample: sample.is_idle)
        async with (
            open_scene(target.base_url, journal, api_key=plan.api_key) as scene,
            watch.running(plan.duration_s),
            contextlib.AsyncExitStack() as stack,
        ):
            if {*plan.kinds} - {Kind.KILL}:
                probed = await stack.enter_async_context(
                    probing(target.base_url, scene.model, plan.api_key, journal)
                )
            await _run_traffic(scene, target, plan)
        after = await watch.settled(
            _IDLE_WITHIN_S, lambda sample: is_settled(before, sample, bounds)
        )
    return Evidence(
        before=before,
        samples=watch.samples,
        after=after,
        journal=journal,
        kinds=plan.kinds,
        probing=probed,
    )


async def _warm_up(target: Target, plan: Plan) -> None:
    """Run some actors once, so that everything opened or loaded at first use is there before."""
    rng = random.Random(plan.seed)
    async with open_scene(target.base_url, Journal(), api_key=plan.api_key) as scene:
        for actor in (traffic.crowd, hostile.ask_nonsense, traffic.cancel_lanes):
            await actor(scene, rng)


async def _run_traffic(scene: Scene, target: Target, plan: Plan) -> None:
    until_s = time.perf_counter() + plan.duration_s
    works = [
        _act_until(until_s, scene, random.Random(f"{plan.seed} {number}"))
        for number in range(plan.concurrency)
    ]
    last_kill_s = time.perf_counter() + plan.duration_s * _KILLS_SHARE
    if {*plan.kinds} == {Kind.KILL}:
        every_s = min(max(plan.duration_s / _KILLS, _KILL_EVERY_S[0]), _KILL_EVERY_S[1])
        times = {"until_s": last_kill_s, "kill_until_s": last_kill_s, "rest_s": every_s}
    else:
        times = {"until_s": until_s, "kill_until_s": last_kill_s}
    if plan.kinds:
        works.append(attack(scene, target, plan.kinds, **times))
    await asyncio.gather(*works)


async def _act_until(until_s: float, scene: Scene, rng: random.Random) -> None:
    while time.perf_counter() < until_s:
        (actor,) = rng.choices([*ACTORS], [*ACTORS.values()])
        await _act(scene, actor, rng)


async def _act(scene: Scene, actor: Actor, rng: random.Random) -> None:
    """Run an actor once; whatever it raises is a problem."""
    name = actor.__name__.replace("_", " ")
    try:
        async with asyncio.timeout(_ACT_WITHIN_S):
            await actor(scene, rng)
    except TimeoutError:
        scene.journal.problem(name, f"it did not end within {_ACT_WITHIN_S:g} s")
    except (aiohttp.ClientError, OSError) as error:
        scene.journal.problem(name, f"the connection broke: {error!r}")
        await asyncio.sleep(_BROKEN_PAUSE_S)  # do not ask a dead server in a busy loop
    except Exception:  # a bug of ours must not look like a clean soak
        scene.journal.problem(name, traceback.format_exc())
    scene.journal.num_done[name] += 1
