"""Tickets that any gateway takes."""

from __future__ import annotations

import pytest

from penstock.gateway.auth.redis_tickets import RedisTickets
from penstock.gateway.auth.tickets import TICKET_TTL_S
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ...redis_server import RedisServer
from ..conftest import PATIENCE_S, RedisPath


@pytest.mark.redis
async def test_another_gateway_takes_it_once(redis_server: RedisServer) -> None:
    async with RedisPath(redis_server) as path:
        links = [RedisLink(RedisAddress.parse(path.url), timeout_s=PATIENCE_S) for _ in range(2)]
        one, other = map(RedisTickets, links)
        ticket = await one.issue("laptop")
        with redis_server.client() as client:
            (key,) = client.keys("penstock:ticket:*")
            assert 0 < client.ttl(key) <= TICKET_TTL_S
            assert ticket.encode() not in key
        assert await other.redeem(ticket) == "laptop"
        assert await other.redeem(ticket) is None
        assert await one.redeem(ticket) is None
        await path.lose()
        ticket = await one.issue("laptop")
        assert await other.redeem(ticket) is None
        assert await one.redeem(ticket) == "laptop"
        for link in links:
            await link.aclose()
