"""`--redis-url` and the clients it makes, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from penstock.engine.errors import ConfigError
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis.health import RedisHealth
from penstock.gateway.storage.redis.link import RedisLink, Script
from penstock.gateway.storage.redis.url import RedisAddress

from ...held_port import held_port, number_of
from ...redis_server import RedisServer
from ..conftest import PATIENCE_S, RedisPath, configured

SECRET = "geheim/#?@:%"
ENCODED = "geheim%2F%23%3F%40%3A%25"


@contextlib.asynccontextmanager
async def linked(url: str, timeout_s: float = PATIENCE_S) -> AsyncIterator[RedisLink]:
    link = RedisLink(RedisAddress.parse(url), timeout_s=timeout_s)
    try:
        yield link
    finally:
        await link.aclose()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://h", "h:6379"),
        ("redis://user:geheim@h:7/3", "h:7"),
        ("redis://[::1]:7", "::1:7"),
        ("rediss://:geheim@h:7/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=no", "h:7"),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock"),
        ("redis+sentinel://:geheim@a:1,b/main/2?sentinel_password=geheim", "a:1,b:26379"),
        ("redis+cluster://a:1,b:2", "a:1,b:2"),
        ("rediss+cluster://a:1?ssl_ca_certs=/ca.pem", "a:1"),
    ],
)
def test_an_address_tells_hosts_and_no_password(url: str, text: str) -> None:
    address = RedisAddress.parse(url)
    assert str(address) == text
    assert "geheim" not in f"{address!r} {address}"


def test_what_an_address_means() -> None:
    address = RedisAddress.parse(
        f"rediss+sentinel://me:{ENCODED}@a:1,b/main/2?sentinel_password=other&ssl_ca_certs=/ca"
    )
    assert address.hosts == (("a", 1), ("b", 26379))
    assert (address.service, address.is_tls, address.is_cluster) == ("main", True, False)
    assert address.options == {
        "username": "me",
        "password": SECRET,
        "db": 2,
        "ssl_ca_certs": "/ca",
    }
    assert address.sentinel_options == {"password": "other"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:geheim@h",
        "redis://",
        "redis://:geheim@",
        "redis://:geheim@h:port",
        "redis://:geheim@h:99999",
        "redis://:geheim@h/name",
        "redis://:geheim@h/0/1",
        "redis://:geheim@a,b",
        "redis://:geheim/x@h",
        "redis://:geheim?x@h",
        "redis://:geheim#x@h",
        "redis://[:geheim@h",
        "redis://:geheim@h?colour=red",
        "redis://:geheim@h?socket_timeout=soon",
        "redis://:geheim@h?ssl_ca_certs=/ca",
        "unix://",
        "redis+cluster://:geheim@h/1",
        "redis+sentinel://:geheim@h",
        "redis+magic://:geheim@h",
    ],
)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--redis-url: ") as caught:
        RedisAddress.parse(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.redis
async def test_over_tls_with_a_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(tmp_path / "redis", password="geheim", is_tls=True) as server:
        async with linked(server.url) as link:
            assert await link.is_up()
        for url in (
            server.url.replace("geheim", "falsch"),
            server.url.partition("?")[0],  # a certificate nobody vouches for
            server.url.replace("rediss", "redis").partition("?")[0],
        ):
            async with linked(url) as link:
                assert not await link.is_up()
                with pytest.raises(StoreUnavailableError) as caught:
                    await link.run(Script("return 1"), [], [])
        assert "geheim" not in caplog.text + str(caught.value)
        assert "falsch" not in caplog.text


@pytest.mark.redis
async def test_over_a_local_socket(tmp_path: Path) -> None:
    options = {"unixsocket": str(tmp_path / "r.sock")}
    with RedisServer(tmp_path / "redis", options=options):
        async with linked(f"unix://{tmp_path}/r.sock?db=1") as link:
            assert await link.is_up()


def _sentinel(config: Path) -> subprocess.Popen[bytes]:
    command = ["redis-server", str(config), "--sentinel"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


@pytest.mark.redis
async def test_sentinels_name_the_master(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", password="geheim") as server, held_port() as held:
        port = number_of(held)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor main 127.0.0.1 {server.port} 1\n"
            "sentinel auth-pass main geheim\n"
        )
        with _sentinel(config) as sentinel:
            try:
                url = f"redis+sentinel://:geheim@127.0.0.1:1,127.0.0.1:{port}/main"
                async with linked(url) as link:
                    deadline = time.monotonic() + PATIENCE_S
                    while not await link.is_up():
                        assert time.monotonic() < deadline
                    assert await link.run(Script("return ARGV[1]"), ["k"], ["v"]) == b"v"
            finally:
                sentinel.kill()


@pytest.mark.redis
def test_a_connection_that_uvloop_closed_is_an_absence(shared_server: RedisServer) -> None:
    async def write_behind_its_end() -> None:
        async with linked(shared_server.url) as link:
            connection = await link.client.connection_pool.get_connection()
            connection._writer.transport.abort()
            with pytest.raises(exceptions.ConnectionError, match="closed"):
                await connection.send_command("PING", check_health=False)
            await link.client.connection_pool.release(connection)
            assert await link.is_up()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write_behind_its_end())


@pytest.mark.redis
async def test_a_mistake_of_ours_is_no_outage(shared_server: RedisServer) -> None:
    async with linked(shared_server.url) as link:
        with pytest.raises(exceptions.ResponseError):
            await link.run(Script("return redis.call('NONSENSE')"), [], [])


@pytest.mark.redis
@pytest.mark.parametrize(
    ("appendonly", "policy", "words"),
    [
        ("yes", "noeviction", []),
        ("no", "noeviction", ["appendonly is off"]),
        ("no", "allkeys-lru", ["maxmemory-policy is allkeys-lru", "appendonly is off"]),
    ],
)
async def test_it_warns_of_a_redis_that_forgets(
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    appendonly: str,
    policy: str,
    words: list[str],
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    with configured(redis_server, appendonly=appendonly, maxmemory_policy=policy):
        async with linked(redis_server.url) as link:
            await link.warn_unless_durable()
    assert len(caplog.records) == len(words)
    for record, word in zip(caplog.records, words, strict=True):
        assert word in record.getMessage()


@pytest.mark.redis
async def test_a_redis_that_is_away_is_complained_of_once(
    shared_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisHealth.may_complain, "__kwdefaults__", {"every_s": PATIENCE_S})
    with configured(shared_server, requirepass="geheim"):
        async with RedisPath(shared_server) as path, linked(path.url_with("geheim")) as link:
            assert await link.is_up()
            await path.lose()
            for _ in range(5):
                with pytest.raises(StoreUnavailableError):
                    await link.run(Script("return 1"), [], [])
            await link.warn_unless_durable()  # and starting goes on
    ours = [record for record in caplog.records if record.name.startswith("penstock")]
    assert len(ours) == 2
    assert "geheim" not in caplog.text


@pytest.mark.redis
async def test_a_crowd_waits_for_its_turn_and_not_for_redis(shared_server: RedisServer) -> None:
    """Also on a loop that is slow to look at the answers."""

    async def hog() -> None:
        while True:
            time.sleep(0.005)  # noqa: ASYNC251  (that is the point)
            await asyncio.sleep(0)

    script = Script("return ARGV[1]")
    async with linked(shared_server.url) as link:
        task = asyncio.create_task(hog())
        replies = await asyncio.gather(*(link.run(script, [], [n]) for n in range(100)))
        task.cancel()
        assert [int(reply) for reply in replies] == list(range(100))
        assert len(await link.client.client_list()) < 32


@pytest.mark.redis
async def test_a_crowd_is_refused_together_when_redis_is_silent(
    shared_server: RedisServer,
) -> None:
    script = Script("return 1")
    async with RedisPath(shared_server) as path, linked(path.url, timeout_s=0.3) as link:
        with path.silent():
            replies = await asyncio.gather(
                *(link.run(script, [], []) for _ in range(800)), return_exceptions=True
            )
        assert {type(reply) for reply in replies} == {StoreUnavailableError}
        # Those who found Redis silent themselves; one after the other all would.
        assert 1 <= sum(reply.__cause__ is not None for reply in replies) <= 16
        reply = None
        async with asyncio.timeout(PATIENCE_S):
            while reply != 1:
                with contextlib.suppress(StoreUnavailableError):  # as long as it is slow
                    reply = await link.run(script, [], [])


@pytest.mark.redis
async def test_a_closed_client_opens_nothing_more(shared_server: RedisServer) -> None:
    """A command that is under way then would be sent again, on a connection that nobody closes."""
    async with RedisPath(shared_server) as path:
        link = RedisLink(RedisAddress.parse(path.url), timeout_s=PATIENCE_S)
        await link.client.ping()
        with path.silent():
            asking = asyncio.create_task(link.client.get("x"))
            await asyncio.sleep(0.05)
            await link.aclose()
            await asyncio.sleep(0.05)
        with pytest.raises(exceptions.ConnectionError):
            await asking
        with pytest.raises(exceptions.ConnectionError):
            await link.client.ping()
        assert path.num_connections == 1


@pytest.mark.redis
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("num_steps", range(12))
async def test_a_client_closed_while_it_connects_leaves_nothing_open(
    shared_server: RedisServer,
    num_steps: int,
    is_cancelled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever step of connecting it has come to."""
    link = RedisLink(RedisAddress.parse(shared_server.url))
    pool = link.client.connection_pool
    opened: list[AbstractConnection] = []
    make = pool.make_connection

    def made() -> AbstractConnection:
        opened.append(make())
        return opened[-1]

    monkeypatch.setattr(pool, "make_connection", made)
    asking = asyncio.create_task(link.client.get("x"))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    await link.aclose()
    if is_cancelled:
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not any(connection.is_connected for connection in opened)
