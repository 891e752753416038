"""A stream that was refused before it began is told as such, whoever asked for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from penstock.load.client.records import Fault
from penstock.load.soak import traffic
from penstock.load.soak.command import Actor
from penstock.load.soak.journal import Journal
from penstock.load.soak.scene import open_scene
from penstock.load.soak.target import Target

from ..support.synthetic_target import synthetic_server


@pytest.fixture(scope="module")
def refusing() -> Iterator[Target]:
    with synthetic_server("--refuse-share 1 --refuse-status 503") as target:
        yield target


@pytest.mark.parametrize(
    "actor",
    [
        traffic.read_to_the_end,
        traffic.resume_sse,
        traffic.resume_socket,
        traffic.cancel_by_id,
    ],
)
async def test_a_503_is_a_refusal(refusing: Target, actor: Actor) -> None:
    journal = Journal()
    async with open_scene(refusing.base_url, journal, api_key=None) as scene:
        await actor(scene, random.Random(0))
    assert [outcome.faults for outcome in journal.outcomes] == [(Fault.REFUSED,)]
