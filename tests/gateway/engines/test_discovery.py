"""Engines on other machines: found, kept, given up."""

from __future__ import annotations

from penstock.gateway.engines.discovery import Discovery, resolve
from penstock.gateway.engines.engine_pool import EnginePool

from ..fake_engine import INFO


async def test_engines_that_are_not_found_any_more_are_given_up_when_they_are_gone() -> None:
    client = EnginePool()
    # The path of a socket is no address: it would be connected to without TLS.
    found: list[set[str] | Exception] = [{"10.0.0.1:1", "10.0.0.2:1", "/tmp/engine:1"}]

    async def find() -> set[str]:
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    discovery = Discovery(client, [find])
    await discovery.look()
    assert {link.name for link in client.links} == {"10.0.0.1:1", "10.0.0.2:1"}
    client.links[0].info = INFO  # it answers
    alive = client.links[0].name
    found[0] = OSError("Redis is away")
    await discovery.look()
    assert len(client.links) == 2
    found[0] = set()
    await discovery.look()
    assert [link.name for link in client.links] == [alive]
    assert await resolve("127.0.0.1:7000") == {"127.0.0.1:7000"}
    await client.close()
