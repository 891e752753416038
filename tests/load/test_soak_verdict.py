"""The verdict of a soak, on made-up evidence: it can be clean, and it can be not."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from penstock.load.client.records import Fault
from penstock.load.soak.journal import (
    Adversity,
    Journal,
    Kind,
    Outcome,
    Probing,
    Problem,
)
from penstock.load.soak.verdict import (
    Bounds,
    Evidence,
    Fate,
    Finding,
    costs,
    fate_of,
    findings,
    slopes,
)
from penstock.load.soak.watch import ProcessSample, Sample

MIB, KIB = 1 << 20, 1 << 10


def sample(
    at_s: float,
    *,
    rss_bytes: float = 100 * MIB,
    num_fds: int = 10,
    num_sockets: int = 4,
    pid: int = 7,
    **metrics: float,
) -> Sample:
    process = ProcessSample(
        name="gateway", pid=pid, rss_bytes=int(rss_bytes), num_fds=num_fds, num_sockets=num_sockets
    )
    return Sample(at_s=at_s, processes=(process,), metrics=metrics, num_streams=0)


def outcome(*faults: Fault, **values: Any) -> Outcome:
    defaults: dict[str, Any] = {
        "actor": "read to the end",
        "began_s": 10.0,
        "ended_s": 12.0,
        "survives_kills": False,
        "detail": "what it said",
    }
    return Outcome(faults=faults, **{**defaults, **values})


def evidence(
    samples: list[Sample] | None = None,
    *,
    before: Sample | None = None,
    after: Sample | None = None,
    **journal: Any,
) -> Evidence:
    return Evidence(
        before=before or sample(0),
        samples=[sample(at_s) for at_s in range(100)] if samples is None else samples,
        after=after or sample(100),
        journal=Journal(**journal),
    )


def whats(seen: Evidence, bounds: Bounds | None = None) -> list[str]:
    return [finding.what for finding in findings(seen, bounds or Bounds())]


def test_nothing_wrong_is_clean() -> None:
    assert findings(evidence(outcomes=[outcome()]), Bounds()) == []


def test_every_fault_of_a_stream_is_found_and_counted() -> None:
    bad = [outcome(Fault.GAP), outcome(Fault.GAP, Fault.LOST_TOKENS), outcome()]
    said = "10 s to 12 s: what it said"
    assert findings(evidence(outcomes=bad), Bounds()) == [
        Finding(what="gap (read to the end)", count=2, detail=f"{said}; {said}"),
        Finding(what="lost_tokens (read to the end)", count=1, detail=said),
    ]


def kill(victim: str, began_s: float, ended_s: float) -> Adversity:
    return Adversity(kind=Kind.KILL, victim=victim, began_s=began_s, ended_s=ended_s)


def test_the_kill_of_a_gateway_excuses_what_it_breaks_and_nothing_else() -> None:
    kills = [kill("gateway", 11.0, 14.0)]

    def excused(*faults: Fault, **values: Any) -> bool:
        return not whats(evidence(outcomes=[outcome(*faults, **values)], adversities=kills))

    assert excused(Fault.CUT)
    assert excused(Fault.UNREACHABLE, began_s=13, ended_s=13)
    assert excused(Fault.CUT, Fault.FAILED)
    assert not excused(Fault.CUT, survives_kills=True)
    assert not excused(Fault.CUT, began_s=5, ended_s=10.9)
    assert not excused(Fault.CUT, began_s=15.1, ended_s=16)
    for fault in set(Fault) - {Fault.CUT, Fault.FAILED, Fault.REFUSED, Fault.UNREACHABLE}:
        assert not excused(fault), fault
        assert not excused(Fault.CUT, fault), fault


def test_the_kill_of_an_engine_breaks_no_stream() -> None:
    kills = [kill("engine", 11.0, 14.0)]
    assert fate_of(outcome(began_s=10, ended_s=12), kills) is Fate.CARRIED
    assert fate_of(outcome(began_s=12, ended_s=15), kills) is Fate.CLEAN
    assert fate_of(outcome(Fault.REFUSED, began_s=12, ended_s=12), kills) is Fate.TURNED_AWAY
    assert fate_of(outcome(Fault.REFUSED, began_s=15.1, ended_s=16), kills) is Fate.FAULTY
    for fault in set(Fault) - {Fault.REFUSED}:
        assert fate_of(outcome(fault), kills) is Fate.FAULTY, fault
        assert fate_of(outcome(fault, Fault.REFUSED), kills) is Fate.FAULTY, fault
    both = [*kills, kill("gateway 2", 11.5, 12.5)]
    assert fate_of(outcome(Fault.CUT), both) is Fate.BROKEN


def test_problems_are_found_outside_of_kills() -> None:
    problems = [Problem(actor="nonsense", at_s=at_s, detail=f"at {at_s}") for at_s in (1, 5, 9)]
    seen = evidence(problems=problems, adversities=[kill("engine", 4.0, 6.0)])
    assert findings(seen, Bounds()) == [Finding(what="nonsense", count=2, detail="at 1")]


def noisy(slope_kib_per_min: float, *, noise_kib: float = 800, seconds: int = 600) -> list[Sample]:
    rng = random.Random(0)
    return [
        sample(
            at_s,
            rss_bytes=100 * MIB
            + slope_kib_per_min * KIB * at_s / 60
            + rng.uniform(-noise_kib, noise_kib) * KIB,
        )
        for at_s in range(seconds)
    ]


def test_a_leak_of_memory_is_found_through_noise() -> None:
    bounds = Bounds(memory_kib_per_min=600)
    assert whats(evidence(noisy(900)), bounds) == ["memory of gateway"]
    assert whats(evidence(noisy(300)), bounds) == []
    (slope,) = slopes(noisy(900), 0.3)
    assert slope.kib_per_min == pytest.approx(900, rel=0.1)


def test_each_process_has_a_warm_up_of_its_own() -> None:
    """Whoever was killed fills its caches anew; it takes no less long for a shorter life."""

    def filling(first_s: int, end_s: int, pid: int) -> list[Sample]:
        return [
            sample(at_s, rss_bytes=(100 + min(at_s - first_s, 90)) * MIB, pid=pid)
            for at_s in range(first_s, end_s)
        ]

    assert whats(evidence([*filling(0, 60, pid=7), *filling(60, 500, pid=8)])) == []
    leaking = [sample(at_s, rss_bytes=(100 + at_s / 10) * MIB, pid=9) for at_s in range(300, 600)]
    found = evidence([*filling(0, 300, pid=7), *leaking])
    assert [(finding.what, finding.count) for finding in findings(found, Bounds())] == [
        ("memory of gateway", 1)
    ]


def test_what_is_held_when_idle_is_found() -> None:
    held = {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "num_requests_swapped": 1,
        "kv_cache_usage_perc": 0.01,
        "kv_blocks used": 3,
        "kv_slots allocated": 16,
    }
    for name, value in held.items():
        assert whats(evidence(after=sample(100, **{name: value}))) == [f"{name} when idle"]
        assert whats(evidence([sample(at_s, **{name: value}) for at_s in range(100)])) == []


def test_processes_must_live() -> None:
    gone = dataclasses.replace(sample(100), processes=())
    assert whats(evidence(after=gone)) == ["process gateway"]
    assert whats(evidence(after=sample(100, pid=8))) == ["process gateway"]
    assert whats(evidence(after=sample(100, pid=8), adversities=[kill("gateway", 1.0, 2.0)])) == []


def adversity(kind: Kind, began_s: float = 10, ended_s: float = 20, victim: str = "") -> Adversity:
    return Adversity(kind=kind, began_s=began_s, ended_s=ended_s, victim=victim)


def test_a_freeze_excuses_refusals_and_no_stream_that_had_begun() -> None:
    def excused(kind: Kind, victim: str, fault: Fault, **values: Any) -> bool:
        seen = evidence(
            outcomes=[outcome(fault, **values)], adversities=[adversity(kind, victim=victim)]
        )
        return not whats(seen)

    resumed = {"survives_kills": True}
    assert excused(Kind.FREEZE_ENGINE, "engine", Fault.REFUSED)
    assert not excused(Kind.FREEZE_ENGINE, "engine", Fault.REFUSED, **resumed)
    assert not excused(Kind.FREEZE_ENGINE, "engine", Fault.CUT)
    assert excused(Kind.FREEZE_REDIS, "redis", Fault.REFUSED)
    assert excused(Kind.FREEZE_REDIS, "redis", Fault.FAILED, **resumed)
    assert not excused(Kind.FREEZE_REDIS, "redis", Fault.FAILED, began_s=21.1, ended_s=22)
    assert not excused(Kind.FREEZE_REDIS, "redis", Fault.GAP, **resumed)
    assert excused(Kind.FREEZE, "gateway 2", Fault.REFUSED)
    assert not excused(Kind.FREEZE, "gateway 2", Fault.REFUSED, **resumed)
    for fault in set(Fault) - {Fault.REFUSED}:
        assert not excused(Kind.FREEZE, "gateway 2", fault), fault
    for fault in Fault:
        assert not excused(Kind.LARGE_PROMPTS, "", fault), fault


def attacked(
    kind: Kind,
    *,
    health_s: float = 0.01,
    gap_s: float = 0.02,
    kept_bytes: int = 0,
    probing: Probing | None = None,
) -> Evidence:
    """Calm from 0 to 10 s, with gaps of 20 ms, then an adversity from 10 to 20 s."""
    measured = Probing(
        health=[(at_s / 10, health_s) for at_s in range(200)],
        gaps=[(at_s / 10, 0.02) for at_s in range(200)] + [(15.0, gap_s)],
    )
    seen = evidence(
        [sample(at_s, rss_bytes=100 * MIB + kept_bytes * (at_s > 12)) for at_s in range(100)],
        after=sample(100, rss_bytes=100 * MIB + kept_bytes),
        adversities=[adversity(Kind.CALM, 0, 10), adversity(kind)],
    )
    return dataclasses.replace(
        seen, kinds=[Kind.CALM, kind], probing=measured if probing is None else probing
    )


def test_an_adversity_that_never_happened_is_said() -> None:
    for kind in Kind:
        seen = dataclasses.replace(evidence(), kinds=[kind])
        assert whats(seen) == [f"{kind} never happened"]


def test_health_must_be_answered_while_gateways_live() -> None:
    answering = set(Kind) - {
        Kind.CALM, Kind.KILL, Kind.FREEZE, Kind.FREEZE_ENGINE, Kind.FREEZE_REDIS
    }  # fmt: skip
    for kind in set(Kind) - {Kind.CALM}:
        bar_s = 0.1 if kind is Kind.LARGE_PROMPTS else 2.0
        assert whats(attacked(kind, health_s=bar_s)) == []
        late = [f"/health during {kind}"] if kind in answering else []
        assert whats(attacked(kind, health_s=bar_s * 1.1)) == late


def test_a_probe_that_hangs_counts_for_those_that_were_due_meanwhile() -> None:
    """One connection waited for 5 s: of the answers that is less than 1 %, of the time half."""
    health = [(10 + at_s / 100, 0.01) for at_s in range(1000)]
    for hung, late in (((9.0, 6.0), ["/health during 4 MB prompts"]), ((12.0, 0.01), [])):
        probing = Probing(health=[*health, hung], gaps=[(5.0, 0.02), (15.0, 0.02)])
        assert whats(attacked(Kind.LARGE_PROMPTS, probing=probing)) == late


def test_large_prompts_may_double_the_gaps_of_others_and_no_more() -> None:
    assert whats(attacked(Kind.LARGE_PROMPTS, gap_s=0.04)) == []
    assert whats(attacked(Kind.LARGE_PROMPTS, gap_s=0.041)) == [
        "largest gap of other streams during 4 MB prompts"
    ]


def test_a_gap_counts_where_any_part_of_it_was() -> None:
    """The last event of a stream comes before the freeze, its next after the end of it."""
    for begin_s, length_s, is_met in ((9.5, 11.0, True), (9.5, 0.4, False), (20.5, 11.0, False)):
        seen = attacked(Kind.FREEZE, probing=Probing(gaps=[(begin_s, length_s)]))
        _, cost = costs(seen)
        assert cost.largest_gap_s == (length_s if is_met else None)


def test_memory_must_come_back_after_each_adversity() -> None:
    compiled = {
        Kind.TOOL_SCHEMAS, Kind.RESPONSE_FORMATS, Kind.DEEP_SCHEMAS, Kind.GRAMMARS
    }  # fmt: skip
    for kind in set(Kind) - {Kind.CALM}:
        bar = (128 << 20) + 50_000_000 if kind in compiled else 50_000_000  # grammars are kept
        assert whats(attacked(kind, kept_bytes=bar)) == []
        assert whats(attacked(kind, kept_bytes=bar + 1)) == [f"memory after {kind}"]


def beside_plain_text(kind: Kind, *, gap_s: float = 0.02, num_gaps: int = 500) -> Evidence:
    """Plain text from 0 to 10 s, with gaps of 20 ms, then something else from 10 to 20 s."""
    gaps = [(at / 50, 0.02) for at in range(500)]
    gaps += [(10 + 10 * at / num_gaps, gap_s) for at in range(num_gaps)]
    probing = Probing(health=[(at_s / 10, 0.01) for at_s in range(200)], gaps=gaps)
    seen = evidence(adversities=[adversity(Kind.PLAIN_TEXT, 0, 9.99), adversity(kind)])
    return dataclasses.replace(seen, kinds=[Kind.PLAIN_TEXT, kind], probing=probing)


@pytest.mark.parametrize("kind", [Kind.TOOL_SCHEMAS, Kind.TINY_MESSAGES, Kind.IMAGE_HOST])
def test_what_is_expensive_may_cost_others_little_more_than_plain_text(kind: Kind) -> None:
    late = [f"other streams during {kind}"]
    assert whats(beside_plain_text(kind, gap_s=0.04)) == []
    assert whats(beside_plain_text(kind, gap_s=0.041)) == late
    assert whats(beside_plain_text(kind, num_gaps=405)) == []
    assert whats(beside_plain_text(kind, num_gaps=395)) == late
    assert whats(beside_plain_text(Kind.STORE, gap_s=0.1)) == []


def test_what_was_not_measured_is_not_good() -> None:
    assert whats(attacked(Kind.LARGE_PROMPTS, probing=Probing())) == [
        "/health during 4 MB prompts",
        "largest gap of other streams during 4 MB prompts",
    ]
    assert whats(attacked(Kind.TRAILERS, probing=Probing())) == ["/health during flood of trailers"]
