"""Each trouble of Redis is called what it is: to the caller, in the log, by `/health`, as a metric.
And a distant Redis is no trouble. All through a gateway before a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.clients import AsyncClient, ConnectionLostError
from penstock.gateway.storage.redis_errors import STATES

from ...clients.cutting_proxy import CuttingProxy
from ...redis_server import RedisServer
from ...support.toxic_proxy import ToxicProxy
from ..conftest import ANSWER, PATIENCE_S, Serve, Served

pytestmark = pytest.mark.redis
_MAX_LINE_CHARS = 2048
_BODY = {"model": "tiny", "input": "hello"}

Trouble = Callable[[RedisServer], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _configured(server: RedisServer, *commands: str) -> Iterator[None]:
    with server.client() as client:
        for command in commands:
            client.execute_command(*command.split(" "))
    yield


def _after(*commands: str) -> Trouble:
    return lambda server: _configured(server, *commands)


@contextlib.contextmanager
def _busy(server: RedisServer) -> Iterator[None]:
    """A script that does not end."""
    with server.client() as client, server.client() as other:
        client.config_set("busy-reply-threshold", 1)

        def run() -> None:
            with contextlib.suppress(redis.exceptions.ResponseError):
                other.eval("while true do end", 0)

        thread = threading.Thread(target=run)
        thread.start()
        with contextlib.suppress(redis.exceptions.ResponseError):  # it is busy now
            while True:
                client.ping()
        try:
            yield
        finally:
            client.execute_command("SCRIPT KILL")
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def _full_disk(server: RedisServer) -> Iterator[None]:
    with server.client() as client:
        client.config_set("appendonly", "no")
        shutil.rmtree(server.directory)  # nothing can be written there
        client.config_set("save", "3600 1")
        client.execute_command("BGSAVE")
        while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
            pass
        yield


@contextlib.contextmanager
def _killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield


TROUBLES: dict[str, Trouble] = {
    "out_of_memory": _after("CONFIG SET maxmemory 1"),
    "read_only": _after("REPLICAOF 127.0.0.1 1"),
    "master_down": _after("CONFIG SET replica-serve-stale-data no", "REPLICAOF 127.0.0.1 1"),
    "disk_error": _full_disk,
    "unauthenticated": _after("CONFIG SET requirepass geheim", "CLIENT KILL TYPE normal"),
    "no_permission": _after("ACL SETUSER default -@scripting"),
    "busy": _busy,
    "no_replicas": _after("CONFIG SET min-replicas-to-write 1"),
    "timeout": RedisServer.paused,
    "unreachable": _killed,
}


@pytest.mark.parametrize("state", TROUBLES)
async def test_a_trouble_is_called_what_it_is(
    state: str, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        async with serve(redis_url=server.url) as served:
            async with asyncio.timeout(PATIENCE_S):  # slow, on a machine that stands still
                while (await served.http.get("/health")).json() != {"status": "ok"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            with TROUBLES[state](server):
                for _ in range(3):
                    refused = await served.http.post("/v1/responses", json=_BODY)
                    assert refused.status_code == 503, refused.text
                    error = refused.json()["error"]
                    assert error["code"] == "session_store_unavailable"
                    assert f"now: {STATES[state]};" in error["message"]
                    assert "retry-after" in refused.headers
                health = await served.http.get("/health")
                assert health.status_code == 200
                redis = {"state": state, "message": STATES[state]}
                assert health.json() == {"status": "degraded", "redis": redis}
                metrics = (await served.http.get("/metrics")).text
                assert _sample(metrics, "redis_up") == 0.0
                assert _sample(metrics, "redis_state", f'state="{state}"') == 1.0
                assert _sample(metrics, "redis_state", 'state="ok"') == 0.0
                chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
                answer = await served.http.post("/v1/chat/completions", json=chat)
                assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    _check_log(caplog)
    told = [each for each in _warnings(caplog) if STATES[state] in each]
    assert 1 <= len(told) <= 4, told


@pytest.mark.parametrize("is_stream", [True, False])
async def test_who_reads_is_told_that_nothing_can_be_resumed(
    is_stream: bool, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        async with serve(step_s=0.05, redis_url=server.patient_url) as served:
            reading = asyncio.create_task(_read(served, is_stream=is_stream))
            await served.submitted()
            with server.client() as client:
                client.config_set("maxmemory", 1)
            events = await reading
            told = [event["penstock"] for event in events if "penstock" in event]
            assert told == ([{"resumable": False}] if is_stream else [])
            response = events[-1]["response"]
            assert response["penstock"] == {"resumable": False}
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == ANSWER
            with server.client() as client:
                client.config_set("maxmemory", 0)
    _check_log(caplog)
    written = [each for each in _warnings(caplog) if "cannot be resumed" in each]
    assert len(written) == 1
    assert written[0].startswith("Redis is out of memory: 1 responses continue without it")


async def test_what_is_not_stored_for_lack_of_redis_is_told(serve: Serve, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        async with serve(redis_url=server.url, session_storage="optional") as served:
            server.kill()
            events = await _read(served, is_stream=True)
            assert len([event for event in events if "penstock" in event]) == 1
            whole = await served.http.post("/v1/responses", json=_BODY)
            assert whole.json()["penstock"] == {"resumable": False}
            wanted = await served.http.post("/v1/responses", json={**_BODY, "store": False})
            assert "penstock" not in wanted.json()


@pytest.mark.parametrize("wire", ["sse", "websocket"])
async def test_clients_do_not_resume_what_cannot_be_resumed(
    wire: str, serve: Serve, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        async with serve(step_s=0.02, redis_url=server.url, session_storage="optional") as served:
            with server.client() as redis:
                redis.config_set("maxmemory", 1)
            url = f"http://127.0.0.1:{served.port}"
            with CuttingProxy(url, 7, None) as proxy:
                async with AsyncClient(proxy.url) as client, client.connect() as socket:
                    if wire == "sse":
                        stream = client.responses.stream(model="tiny", input="hello")
                    else:
                        stream = await socket.create(model="tiny", input="hello")
                    with pytest.raises(ConnectionLostError, match="cannot be resumed"):
                        await stream.final()
            with CuttingProxy(url, 7) as proxy:
                told = await _in_a_browser(proxy.url, wire)
            assert told["kind"] == "lost"
            assert told["problem"]["code"] == "not_resumable"
            assert len(served.engine.submitted) == 2
            assert _sample((await served.http.get("/metrics")).text, "resumes_total") == 0.0


_SCRIPT = """
const { PenstockClient } = await import(process.argv[1]);
const options = { baseUrl: process.argv[2] };
if (process.argv[3] === "sse") options.WebSocket = null;
const client = new PenstockClient(options);
console.log(JSON.stringify(await client.respond({ model: "tiny", input: "hello" }).done));
client.close();
"""


async def _in_a_browser(url: str, wire: str) -> dict[str, Any]:
    """How the browser library says that an answer ended."""
    node = shutil.which("node") or pytest.skip("node is not installed")
    library = Path(__file__).parents[3] / "clients" / "browser" / "penstock-client.js"
    process = await asyncio.create_subprocess_exec(
        *(node, "--experimental-websocket", "--input-type=module", "-e", _SCRIPT),
        *(library.as_uri(), url, wire),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await process.communicate()
    told: dict[str, Any] = json.loads(out)
    return told


async def test_a_distant_redis_keeps_what_can_be_resumed(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """200 ms away, so a round trip takes 400."""
    caplog.set_level(logging.INFO, "penstock")
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        proxy = ToxicProxy("127.0.0.1", server.port)
        proxy.upstream.latency_s = proxy.downstream.latency_s = 0.2
        async with (
            proxy,
            serve(step_s=0.05, redis_url=f"redis://127.0.0.1:{proxy.port}/0") as served,
        ):
            events = await _read(served, is_stream=True)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert not any("penstock" in event for event in events)
            assert "penstock" not in events[-1]["response"]
            path = f"/v1/responses/{events[0]['response']['id']}"
            again = await served.http.get(path, params={"stream": "true", "starting_after": 4})
            assert _events(again.text) == events[5:]
            health = (await served.http.get("/health")).json()
            assert health["status"] == "degraded"
            assert health["redis"]["state"] == "slow"
            assert health["redis"]["message"].startswith("Redis is slow: a round trip takes 0.")
            metrics = (await served.http.get("/metrics")).text
            assert _sample(metrics, "redis_up") == 1.0
            assert _sample(metrics, "redis_state", 'state="slow"') == 1.0
            assert _sample(metrics, "redis_round_trip_seconds") >= 0.4
    _check_log(caplog)
    assert len([each for each in _warnings(caplog) if "Redis is slow" in each]) == 1
    assert "does not answer" not in caplog.text


async def _read(served: Served, *, is_stream: bool) -> list[dict[str, Any]]:
    """Its events; without a stream, one with the response."""
    body = {**_BODY, "stream": is_stream}
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return _events(answer.text) if is_stream else [{"response": answer.json()}]


def _events(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: ")]


def _sample(metrics: str, name: str, label: str = "") -> float:
    found = re.search(rf"^penstock:{name}{{[^}}]*{label}[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    assert found, name
    return float(found[1])


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("penstock.gateway")]
    return [each.getMessage() for each in ours if each.levelno >= logging.WARNING]


def _check_log(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback, and no line too long."""
    for record in caplog.records:
        assert record.exc_info is None, record.getMessage()
        assert len(record.getMessage()) <= _MAX_LINE_CHARS
