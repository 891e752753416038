"""The course of a soak: warm up, look, let actors loose, wait for silence, look again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import aiohttp
from tqdm import tqdm

from penstock.load.soak import hostile, traffic
from penstock.load.soak.attack import attack, kill_once, kinds_of
from penstock.load.soak.journal import Journal
from penstock.load.soak.prober import probing
from penstock.load.soak.scene import Scene, open_scene
from penstock.load.soak.target import Target
from penstock.load.soak.verdict import Bounds, Evidence, is_settled
from penstock.load.soak.watch import Watch

Actor: TypeAlias = Callable[[Scene, random.Random], Awaitable[None]]

_ACT_WITHIN_S = 180.0
_IDLE_WITHIN_S = 20.0
_BROKEN_PAUSE_S = 0.2
_KILLS = 6  # in a soak, if that leaves some seconds between them
_KILL_EVERY_S = (3.0, 30.0)
_KILLS_SHARE = 0.5  # of a soak; the rest shows what memory does without

# Who acts, and how often.
ALWAYS: tuple[tuple[Actor, float], ...] = (
    (traffic.read_to_the_end, 8),
    (traffic.converse, 3),
    (traffic.leave, 4),
    (traffic.drop_socket, 1),
    (traffic.cancel_lanes, 2),
    (traffic.read_slowly, 2),
    (traffic.hoard, 0.3),
    (traffic.crowd, 0.3),
    (hostile.ask_nonsense, 3),
    (hostile.ask_too_much, 0.5),
    (hostile.send_nonsense, 1),
    (hostile.send_garbage, 1),
    (hostile.send_bad_frames, 1),
)
RESUMING: tuple[tuple[Actor, float], ...] = (
    (traffic.resume_sse, 3),
    (traffic.resume_socket, 3),
)
CANCELLING: tuple[tuple[Actor, float], ...] = ((traffic.cancel_by_id, 2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a soak is to be."""

    duration_s: float
    concurrency: int  # actors at once; some run several streams
    seed: int
    has_resumes: bool = False
    has_cancels_by_id: bool = False
    has_kills: bool = False
    is_attack: bool = False  # kills, freezes, floods and more besides, one at a time
    api_key: str | None = None

    @property
    def actors(self) -> tuple[tuple[Actor, float], ...]:
        resuming = RESUMING if self.has_resumes else ()
        cancelling = CANCELLING if self.has_cancels_by_id else ()
        return (*ALWAYS, *resuming, *cancelling)


async def soak(target: Target, plan: Plan, bounds: Bounds) -> Evidence:
    """Do it."""
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
            if plan.is_attack:
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
        kinds=kinds_of(target) if plan.is_attack else (),
        probing=probed,
    )


async def _warm_up(target: Target, plan: Plan) -> None:
    """One of each, so that what a server opens or loads at a first use is there before."""
    rng = random.Random(plan.seed)
    async with open_scene(target.base_url, Journal(), api_key=plan.api_key) as scene:
        for actor in (traffic.crowd, hostile.ask_nonsense, traffic.cancel_lanes):
            await actor(scene, rng)


async def _run_traffic(scene: Scene, target: Target, plan: Plan) -> None:
    until_s = time.perf_counter() + plan.duration_s
    progress = asyncio.create_task(_show(scene.journal, plan.duration_s))
    works = [
        _act_until(until_s, scene, plan.actors, random.Random(f"{plan.seed} {number}"))
        for number in range(plan.concurrency)
    ]
    last_kill_s = time.perf_counter() + plan.duration_s * _KILLS_SHARE
    if plan.is_attack:
        works.append(attack(scene, target, until_s=until_s, kill_until_s=last_kill_s))
    elif plan.has_kills:
        works.append(_kill_until(last_kill_s, scene.journal, target, plan))
    try:
        await asyncio.gather(*works)
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


async def _act_until(
    until_s: float, scene: Scene, actors: tuple[tuple[Actor, float], ...], rng: random.Random
) -> None:
    choices, weights = zip(*actors, strict=True)
    while time.perf_counter() < until_s:
        (actor,) = rng.choices(choices, weights)
        await _act(scene, actor, rng)


async def _act(scene: Scene, actor: Actor, rng: random.Random) -> None:
    """Once; whatever it raises is a problem."""
    name = actor.__name__.replace("_", " ")
    try:
        async with asyncio.timeout(_ACT_WITHIN_S):
            await actor(scene, rng)
    except TimeoutError:
        scene.journal.problem(name, f"it did not end within {_ACT_WITHIN_S:g} s")
    except (aiohttp.ClientError, OSError) as error:
        scene.journal.problem(name, f"the connection broke: {error!r}")
        await asyncio.sleep(_BROKEN_PAUSE_S)  # a server that is down is not asked without end
    except Exception:  # a bug of ours must not look like a clean soak
        scene.journal.problem(name, traceback.format_exc())
    scene.journal.num_done[name] += 1


async def _kill_until(until_s: float, journal: Journal, target: Target, plan: Plan) -> None:
    rng = random.Random(f"{plan.seed} kills")
    shortest_s, longest_s = _KILL_EVERY_S
    every_s = min(max(plan.duration_s / _KILLS, shortest_s), longest_s)
    while (pause_s := every_s * rng.uniform(0.7, 1.3)) < until_s - time.perf_counter():
        await asyncio.sleep(pause_s)
        if not await kill_once(journal, target):
            return


async def _show(journal: Journal, duration_s: float) -> None:
    """A bar that says how far it is, and what went wrong so far."""
    with tqdm(total=round(duration_s), unit="s", disable=None) as bar:
        while True:
            await asyncio.sleep(1)
            num_bad = sum(bool(outcome.faults) for outcome in journal.outcomes)
            bar.set_postfix(
                streams=len(journal.outcomes), open=journal.num_open,
                faulty=num_bad, problems=len(journal.problems),
            )  # fmt: skip
            bar.update(1)
