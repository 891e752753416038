"""The gate: what is let in, what it holds until it ends, and what others are told."""

from __future__ import annotations

import msgspec
import pytest

from penstock.engine.protocol.messages import EngineStats
from penstock.engine.request import SamplingParams
from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.engine_queue import EngineQueue, QueueBounds
from penstock.gateway.admission.quotas import LocalQuotas
from penstock.gateway.admission.refusals import NotAdmittedError
from penstock.gateway.auth.callers import ANYBODY, Caller, TenantLimits

PARAMS = SamplingParams(max_tokens=100)


class Bed:
    """A gate in front of an engine that is made of numbers."""

    def __init__(self, **bounds: float) -> None:
        self.now_s = 0.0
        self.stats = EngineStats()
        self.num_engines = 1
        self.quotas = LocalQuotas(lambda: self.now_s)
        self.queue = EngineQueue(
            QueueBounds(**bounds),  # type: ignore[arg-type]
            engine=self,
            clock=lambda: self.now_s,
        )
        self.admission = Admission(self.quotas, self.queue)

    def tell(self, **stats: float) -> None:
        self.stats = msgspec.structs.replace(self.stats, **stats)  # type: ignore[arg-type]

    async def refusal(
        self, caller: Caller = ANYBODY, num_prompt: int = 10, deadline_s: float | None = None
    ) -> NotAdmittedError:
        with pytest.raises(NotAdmittedError) as caught:
            await self.admission.admit(caller, num_prompt, PARAMS, deadline_s=deadline_s)
        return caught.value


async def test_the_queue_is_bounded_in_requests() -> None:
    bed = Bed(max_requests=3)
    first, *_ = [await bed.admission.admit(ANYBODY, 10, PARAMS) for _ in range(3)]
    error = await bed.refusal()
    assert (error.status, error.code) == (503, "server_overloaded")
    assert error.details["queue_length"] == 3
    assert 1 <= float(error.headers["Retry-After"]) <= 120
    first.started()
    await bed.admission.admit(ANYBODY, 10, PARAMS)


async def test_the_queue_is_bounded_in_tokens_bytes_and_age() -> None:
    bed = Bed(max_tokens=100)
    await bed.admission.admit(ANYBODY, 5000, PARAMS)  # an empty queue takes anything
    assert "prompt tokens" in str(await bed.refusal())

    bed = Bed(max_bytes=10_000)
    await bed.admission.admit(ANYBODY, 10, PARAMS)
    await bed.admission.admit(ANYBODY, 10, PARAMS)
    assert "bytes" in str(await bed.refusal())

    bed = Bed(max_age_s=60)
    await bed.admission.admit(ANYBODY, 10, PARAMS)
    bed.now_s = 61
    assert "waiting for more than 60 s" in str(await bed.refusal())
    await bed.admission.admit(Caller(tenant="another"), 10, PARAMS)


async def test_what_other_gateways_sent_counts() -> None:
    bed = Bed(max_requests=100)
    bed.tell(num_requests_waiting=100, num_tokens_waiting=1000)
    assert (await bed.refusal()).details["queue_length"] == 100


async def test_a_flood_leaves_another_tenant_its_share_of_the_queue() -> None:
    bed = Bed(max_requests=10)
    flood, small = Caller(tenant="flood"), Caller(tenant="small")
    for _ in range(10):
        await bed.admission.admit(flood, 10, PARAMS)
    await bed.refusal(flood)
    for _ in range(5):
        await bed.admission.admit(small, 10, PARAMS)
    await bed.refusal(small)


async def test_a_deadline_that_cannot_be_met_is_refused_early() -> None:
    bed = Bed()
    bed.tell(num_requests_waiting=50, num_tokens_waiting=10_000, queue_tokens_per_s=1000.0,
             prefill_tokens_per_s=5000.0)  # fmt: skip
    assert bed.queue.wait_s(ANYBODY, 500) == pytest.approx(10.0)
    error = await bed.refusal(num_prompt=500, deadline_s=10.05)
    assert error.status == 503
    assert "10.1 s" in str(error)
    assert error.details["queue_length"] == 50
    await bed.admission.admit(ANYBODY, 500, PARAMS, deadline_s=10.2)
    await bed.admission.admit(ANYBODY, 500, PARAMS)


async def test_the_configured_deadline_counts_where_the_caller_names_none() -> None:
    bed = Bed(deadline_s=1.0)
    bed.tell(num_requests_waiting=50, num_tokens_waiting=10_000, queue_tokens_per_s=1000.0)
    await bed.refusal()
    await bed.admission.admit(ANYBODY, 10, PARAMS, deadline_s=20.0)


async def test_behind_a_flood_another_tenant_waits_for_its_own_share_alone() -> None:
    bed = Bed()
    flood, small = Caller(tenant="flood"), Caller(tenant="small")
    for _ in range(100):
        await bed.admission.admit(flood, 100, PARAMS)
    bed.tell(num_requests_waiting=100, num_tokens_waiting=10_000, queue_tokens_per_s=1000.0)
    assert bed.queue.wait_s(flood, 100) == pytest.approx(10.0)
    assert bed.queue.wait_s(small, 100) == pytest.approx(0.1, rel=0.2)


async def test_while_nothing_is_measured_nothing_is_predicted() -> None:
    bed = Bed()
    bed.tell(num_requests_waiting=50, num_tokens_waiting=10_000)
    await bed.admission.admit(ANYBODY, 10, PARAMS, deadline_s=0.001)


async def test_a_reservation_is_released_once() -> None:
    bed = Bed()
    caller = Caller(limits=TenantLimits(tokens_per_minute=1000, max_concurrent_requests=1))
    reservation = await bed.admission.admit(caller, 200, PARAMS)
    assert bed.quotas.levels(caller).tokens == 700
    for _ in range(3):
        reservation.release(num_prompt=200, num_cached=150, num_output=20)
        reservation.started()
    levels = bed.quotas.levels(caller)
    assert (levels.tokens, levels.num_running) == (1000 - 70, 0)
    assert bed.queue.num_requests == 0


async def test_what_everybodys_queue_refuses_costs_the_tenant_nothing() -> None:
    bed = Bed(max_requests=1)
    caller = Caller(limits=TenantLimits(tokens_per_minute=1000, requests_per_minute=10))
    await bed.admission.admit(caller, 10, PARAMS)
    before = bed.quotas.levels(caller)
    await bed.refusal(caller)
    assert bed.quotas.levels(caller) == before


async def test_costs_are_learned() -> None:
    bed = Bed()
    caller = Caller(limits=TenantLimits(tokens_per_minute=1e6))
    long = SamplingParams(max_tokens=4000)

    async def cost() -> float:
        before = bed.quotas.levels(caller).tokens
        reservation = await bed.admission.admit(caller, 1000, long)
        taken = before - bed.quotas.levels(caller).tokens
        reservation.release(num_prompt=1000, num_cached=900, num_output=1000)
        return taken

    assert await cost() == 1000 + 256
    for _ in range(100):
        last = await cost()
    assert last == pytest.approx(100 + 1000, rel=0.05)
