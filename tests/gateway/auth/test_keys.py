"""Keys, tenants and tickets: who they let in, and that no secret gets out."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest
import websockets

from penstock.engine.errors import ConfigError
from penstock.engine.protocol.messages import EngineStats
from penstock.gateway.auth.callers import ANYBODY, Caller, TenantLimits
from penstock.gateway.auth.keys import KeyRing, read_key_file
from penstock.gateway.auth.tickets import TICKET_TTL_S, MemoryTickets
from penstock.gateway.storage.tenant_shares import StoreQuota

from ..conftest import PATIENCE_S, Serve, until

FILE = """
[[keys]]
key = "sk-acme-1"
tenant = "acme"
id = "laptop"

[[keys]]
sha256 = "{digest}"
tenant = "small"

[tenants.acme]
weight = 2
priority = 3
min_priority = 0
max_priority = 5
allow_cache_salt = true
requests_per_minute = 60
tokens_per_minute = 10_000
max_concurrent_requests = 4

[tenants.small]
""".replace("{digest}", hashlib.sha256(b"sk-small-1").hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def changed(path: Path, text: str) -> None:
    """Written anew, as far as the clock of the file system can tell."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


def test_a_file_names_tenants_and_what_they_may_do(file: Path) -> None:
    ring = KeyRing((), file)
    acme = ring.find([b"sk-acme-1"])
    assert acme == Caller(
        tenant="acme",
        key_id="laptop",
        weight=2.0,
        priority=3,
        priority_bounds=(0, 5),
        allows_cache_salt=True,
        cache_salt="acme",
        limits=TenantLimits(
            requests_per_minute=60, tokens_per_minute=10_000, max_concurrent_requests=4
        ),
    )
    small = ring.find([b"wrong", b"sk-small-1"])
    assert small is not None
    assert (small.tenant, small.weight, small.priority_bounds) == ("small", 1.0, None)
    assert small.key_id.startswith("key-")
    assert ring.find([]) is ring.find([b""]) is ring.find([b"sk-acme-2"]) is None
    assert ring.by_id("laptop") is acme
    assert ring.by_id("") is None


def test_json_is_the_same(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": "k", "tenant": "t"}], "tenants": {"t": {}}}))
    caller = KeyRing((), path).find([b"k"])
    assert caller is not None
    assert caller.tenant == "t"


def test_keys_of_the_command_line_have_no_limits(file: Path) -> None:
    ring = KeyRing(("plain",), file)
    caller = ring.find([b"plain"])
    assert caller is not None
    assert (caller.tenant, caller.limits, caller.cache_salt) == ("default", TenantLimits(), "")
    assert caller.is_admin
    assert ring.find([b"sk-acme-1"]) is not None
    assert not ring.is_open
    assert KeyRing().is_open
    assert KeyRing().by_id("") is ANYBODY


def test_priority_and_salt_count_as_far_as_the_key_allows() -> None:
    free = Caller(priority_bounds=(-1, 4), priority=2)
    assert [free.priority_of(asked) for asked in (None, -9, 3, 9)] == [2, -1, 3, 4]
    bound = Caller(priority_bounds=None, priority=2)
    assert [bound.priority_of(asked) for asked in (None, -9)] == [2, 2]
    assert (ANYBODY.salt_of(None), ANYBODY.salt_of("x")) == ("", "x")
    salted = Caller(cache_salt="acme", allows_cache_salt=False)
    assert salted.salt_of("x") == salted.salt_of(None) != ""
    both = Caller(cache_salt="acme", allows_cache_salt=True)
    assert len({both.salt_of(None), both.salt_of("x"), salted.salt_of("x"), "x"}) == 3


def test_a_changed_file_counts_within_a_second(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    ring = KeyRing((), file, clock=lambda: now_s)
    changed(file, FILE.replace("sk-acme-1", "sk-acme-2"))
    now_s = 0.9
    assert ring.find([b"sk-acme-1"]) is not None
    now_s = 1.0
    assert ring.find([b"sk-acme-1"]) is None
    assert ring.find([b"sk-acme-2"]) is not None


def test_a_broken_file_leaves_everything_as_it_was(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    ring = KeyRing((), file, clock=lambda: now_s)
    for text in ('[[keys]]\nkey = "sk-secret', '[[keys]]\nkey = "sk-secret"\ntenant = "nobody"'):
        changed(file, text)
        caplog.clear()
        for _ in range(5):
            now_s += 2.0
            assert ring.find([b"sk-acme-1"]) is not None
        assert len(caplog.records) == 1
        assert "sk-secret" not in caplog.text
    file.unlink()
    caplog.clear()
    now_s += 4.0
    assert ring.find([b"sk-acme-1"]) is not None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sk-secret", "not TOML"),
        ("keys = 3", "list of tables"),
        ("[tenants.a]\nsk-secret = 1", "unknown field"),
        ("[tenants.a]\nweight = 0", "weight"),
        ("[tenants.a]\nweight = nan", "weight"),
        ("[tenants.a]\nmin_priority = 1", "max_priority"),
        ("[tenants.a]\nrequests_per_minute = true", "requests_per_minute"),
        ("[tenants.a]\nstore_bytes = 1.5", "store_bytes"),
        ("[tenants.a]\nstore_objects = 0", "store_objects"),
        ('[tenants.a]\ntokens_per_minute = "sk-secret"', "tokens_per_minute"),
        ('[tenants."a b"]', "tenant's name"),
        ('[[keys]]\nkey = "sk-secret"', "tenant"),
        ('[[keys]]\ntenant = "a"\n[tenants.a]', "either key or sha256"),
        ('[[keys]]\nsha256 = "sk-secret"\ntenant = "a"\n[tenants.a]', "hexadecimal"),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nid = "a\\nb"\n[tenants.a]', "id must be"),
        ('[[keys]]\nkey="sk-secret"\ntenant="a"\n[[keys]]\nkey="sk-secret"\ntenant="a"\n'
         '[tenants.a]', "twice"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused_without_telling_keys(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_key_file(path)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"keys": [{"key": "\\ud800sk-secret", "tenant": "a"}], "tenants": {"a": {}}}', "string"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=["half a character", "deep"],
)
def test_json_that_makes_no_sense_is_refused_too(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_key_file(path)
    assert "sk-secret" not in str(caught.value)


async def test_a_ticket_is_good_once_and_for_seconds() -> None:
    now_s = 0.0
    tickets = MemoryTickets(clock=lambda: now_s)
    first, second = await tickets.issue("laptop"), await tickets.issue("phone")
    assert await tickets.redeem(first) == "laptop"
    assert await tickets.redeem(first) is None
    now_s = TICKET_TTL_S + 0.1
    assert await tickets.redeem(second) is None
    assert await tickets.redeem("tkt_none") is None


async def test_a_flood_of_one_keys_tickets_takes_none_of_anothers() -> None:
    tickets = MemoryTickets(clock=lambda: 0.0)
    kept = await tickets.issue("phone")
    flood = [await tickets.issue("laptop") for _ in range(100_001)]
    assert await tickets.redeem(kept) == "phone"
    assert [await tickets.redeem(flood[at]) for at in (-1001, -1000)] == [None, "laptop"]


def test_a_file_says_what_a_tenant_may_store(file: Path) -> None:
    changed(file, FILE.replace("[tenants.small]", "[tenants.small]\nstore_bytes = 1_000_000"))
    ring = KeyRing((), file)
    assert ring.store_quota("small") == StoreQuota(num_bytes=1_000_000)
    assert ring.store_quota("acme") == ring.store_quota("nobody") == StoreQuota()


async def test_a_ticket_opens_one_websocket(
    serve: Serve, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(api_keys=("master",), api_keys_file=str(file)) as served:
        answer = (await served.http.post("/v1/tickets")).json()
        assert answer["expires_in"] == TICKET_TTL_S
        ticket = answer["ticket"]
        url = f"ws://127.0.0.1:{served.port}/v1/responses?x=1&ticket={ticket}"
        async with websockets.connect(url, open_timeout=PATIENCE_S):
            pass
        for wrong in (url, url.replace(ticket, "tkt_wrong"), url.partition("&")[0]):
            with pytest.raises(websockets.InvalidStatus) as caught:
                await websockets.connect(wrong, open_timeout=PATIENCE_S)
            assert caught.value.response.status_code == 401
            assert b"tkt_" not in caught.value.response.body
        served.http.headers.pop("Authorization")
        refused = await served.http.get("/v1/models", params={"ticket": ticket})
        assert refused.status_code == 401
        assert (await served.http.post("/v1/tickets")).status_code == 401
    ours = [record for record in caplog.records if record.name.startswith(("penstock", "uvicorn"))]
    assert not any(ticket in record.getMessage() for record in ours)


async def test_requests_carry_their_tenant_to_the_engine(serve: Serve, file: Path) -> None:
    async with serve(api_keys_file=str(file), info={"scheduling_policy": "priority"}) as served:
        ask = {"prompt": "x", "max_tokens": 1, "priority": 9, "cache_salt": "mine"}
        for key in ("sk-acme-1", "sk-small-1"):
            response = await served.http.post(
                "/v1/completions",
                json=ask,
                headers={"Authorization": f"Bearer {key}"},
            )
            assert response.status_code == 200
        acme, small = served.engine.submitted.values()
        assert (acme.tenant, acme.weight, acme.priority) == ("acme", 2.0, 5)
        assert (small.tenant, small.weight, small.priority) == ("small", 1.0, 0)
        assert acme.cache_salt.endswith("mine")
        assert "mine" not in small.cache_salt


@pytest.mark.parametrize("deadline", ["soon", "0", "-1", "nan", "inf", ""])
async def test_a_deadline_without_sense_is_refused(serve: Serve, deadline: str) -> None:
    async with serve() as served:
        response = await served.http.post(
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 1},
            headers={"x-request-deadline-ms": deadline},
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-deadline-ms"


async def test_a_deadline_that_cannot_be_met_is_refused(serve: Serve) -> None:
    async with serve() as served:
        served.engine.stats = EngineStats(
            num_requests_waiting=60, num_tokens_waiting=60_000, queue_tokens_per_s=1000.0
        )
        await until(lambda: served.app.state.engine.stats.num_tokens_waiting == 60_000)
        for deadline_ms, status in (("1000", 503), ("600000", 200)):
            response = await served.http.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 1},
                headers={"x-request-deadline-ms": deadline_ms},
            )
            assert response.status_code == status


async def test_limits_are_told_and_kept(serve: Serve, file: Path) -> None:
    changed(file, FILE.replace("requests_per_minute = 60", "requests_per_minute = 2"))
    async with serve(api_keys_file=str(file)) as served:
        ask = {"prompt": "x", "max_tokens": 3}
        key = {"Authorization": "Bearer sk-acme-1"}
        for left in (1, 0):
            response = await served.http.post("/v1/completions", json=ask, headers=key)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
            assert int(response.headers["x-ratelimit-remaining-tokens"]) > 9000
        for stream in (False, True):
            body = {**ask, "stream": stream}
            response = await served.http.post("/v1/completions", json=body, headers=key)
            assert response.status_code == 429
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["penstock"]["estimated_wait_ms"] > 0
            assert error["penstock"]["queue_length"] == 0
            assert 0 < int(response.headers["retry-after-ms"]) <= 120_000
        other = {"Authorization": "Bearer sk-small-1"}
        response = await served.http.post("/v1/completions", json=ask, headers=other)
        assert response.status_code == 200
        assert "x-ratelimit-limit-requests" not in response.headers


async def test_whoever_leaves_gives_back_what_it_held(serve: Serve, file: Path) -> None:
    changed(file, FILE.replace("max_concurrent_requests = 4", "max_concurrent_requests = 1"))
    async with serve(api_keys_file=str(file), step_s=0.05) as served:
        served.http.headers["Authorization"] = "Bearer sk-acme-1"
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        for number in range(3):
            async with served.http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, "the one before still holds its place"
                lines = response.aiter_lines()  # held: dropped, it would close the connection
                await anext(lines)
                again = await served.http.post("/v1/completions", json=body)
                assert again.status_code == 429
                assert "concurrent" in again.json()["error"]["message"]
            await served.aborted(number + 1)
        # Of several prompts one is not let in: then none is, and none holds anything.
        many = {**body, "prompt": ["x", "y"], "stream": False, "max_tokens": 2}
        assert (await served.http.post("/v1/completions", json=many)).status_code == 429
        one = {**many, "prompt": "x"}
        assert (await served.http.post("/v1/completions", json=one)).status_code == 200
