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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.clients import AsyncClient, ConnectionLostError
from penstock.gateway.storage.redis.errors import STATES
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings

from ...clients.cutting_proxy import CuttingProxy
from ...redis_server import RedisServer
from ..conftest import ANSWER, PATIENCE_S, RedisPath, Serve, Served, configured

pytestmark = pytest.mark.redis
_MAX_LINE_CHARS = 2048
_BODY = {"model": "tiny", "input": "hello"}

Trouble = Callable[[RedisServer, RedisPath], contextlib.AbstractAsyncContextManager[None]]


def _commands(*commands: str, undo: Sequence[str]) -> Trouble:
    @contextlib.asynccontextmanager
    async def trouble(server: RedisServer, _: RedisPath) -> AsyncIterator[None]:
        with server.client() as client:
            try:
                for command in commands:
                    client.execute_command(*command.split(" "))
                yield
            finally:
                for command in undo:
                    client.execute_command(*command.split(" "))

    return trouble


def _settings(**settings: object) -> Trouble:
    @contextlib.asynccontextmanager
    async def trouble(server: RedisServer, path: RedisPath) -> AsyncIterator[None]:
        with configured(server, **settings):
            path.reset_all()  # who comes back is asked for a password
            yield

    return trouble


@contextlib.asynccontextmanager
async def _busy(server: RedisServer, _: RedisPath) -> AsyncIterator[None]:
    """A script that does not end."""
    with configured(server, busy_reply_threshold=1), server.client() as other:

        def run() -> None:
            with contextlib.suppress(redis.exceptions.ResponseError):
                other.eval("while true do end", 0)

        thread = threading.Thread(target=run)
        with server.client() as client:
            thread.start()
            with contextlib.suppress(redis.exceptions.ResponseError):  # it is busy now
                while True:
                    client.ping()
            try:
                yield
            finally:
                client.execute_command("SCRIPT KILL")
                thread.join(PATIENCE_S)


@contextlib.asynccontextmanager
async def _full_disk(server: RedisServer, _: RedisPath) -> AsyncIterator[None]:
    with configured(server, save="3600 1"), server.client() as client:
        shutil.rmtree(server.directory)  # nothing can be written there
        try:
            client.execute_command("BGSAVE")
            while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
                pass
            yield
        finally:
            server.directory.mkdir()


@contextlib.asynccontextmanager
async def _silent(_: RedisServer, path: RedisPath) -> AsyncIterator[None]:
    with path.silent():
        yield


@contextlib.asynccontextmanager
async def _lost(_: RedisServer, path: RedisPath) -> AsyncIterator[None]:
    await path.lose()
    yield


_TO_NOBODY = "REPLICAOF 127.0.0.1 1"
_ALONE = "REPLICAOF NO ONE"
_NO_STALE_DATA = "CONFIG SET replica-serve-stale-data"
TROUBLES: dict[str, Trouble] = {
    "out_of_memory": _settings(maxmemory=1),
    "read_only": _commands(_TO_NOBODY, undo=[_ALONE]),
    "master_down": _commands(
        f"{_NO_STALE_DATA} no", _TO_NOBODY, undo=[_ALONE, f"{_NO_STALE_DATA} yes"]
    ),
    "disk_error": _full_disk,
    "unauthenticated": _settings(requirepass="geheim"),
    "no_permission": _commands(
        "ACL SETUSER default -@scripting", undo=["ACL SETUSER default +@all"]
    ),
    "busy": _busy,
    "no_replicas": _settings(min_replicas_to_write=1),
    "timeout": _silent,
    "unreachable": _lost,
}


@pytest.mark.parametrize("state", TROUBLES)
async def test_a_trouble_is_called_what_it_is(
    state: str, serve: Serve, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with RedisPath(redis_server) as path:
        url = f"{path.url}?socket_timeout=0.1" if state == "timeout" else path.patient_url
        async with serve(redis_url=url) as served:
            await _until_health_is(served, "ok")  # slow, on a machine that stands still
            async with TROUBLES[state](redis_server, path):
                for _ in range(3):
                    refused = await served.http.post("/v1/responses", json=_BODY)
                    assert refused.status_code == 503, refused.text
                    error = refused.json()["error"]
                    assert error["code"] == "session_store_unavailable"
                    assert f"now: {STATES[state]};" in error["message"]
                    assert "retry-after" in refused.headers
                health = await served.http.get("/health")
                assert health.status_code == 200
                told = {"state": state, "message": STATES[state]}
                assert health.json() == {"status": "degraded", "redis": told}
                metrics = (await served.http.get("/metrics")).text
                assert _sample(metrics, "redis_up") == 0.0
                assert _sample(metrics, "redis_state", f'state="{state}"') == 1.0
                assert _sample(metrics, "redis_state", 'state="ok"') == 0.0
                chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
                answer = await served.http.post("/v1/chat/completions", json=chat)
                assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    _check_log(caplog)
    lines = [each for each in _warnings(caplog) if STATES[state] in each]
    assert 1 <= len(lines) <= 4, lines


@pytest.mark.parametrize("is_stream", [True, False])
async def test_who_reads_is_told_that_nothing_can_be_resumed(
    is_stream: bool, serve: Serve, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(redis_url=redis_server.patient_url) as served:
        served.engine.may_speak.clear()
        reading = asyncio.create_task(_read(served, is_stream=is_stream))
        await served.submitted()
        with configured(redis_server, maxmemory=1):
            served.engine.may_speak.set()
            events = await reading
            told = [event["penstock"] for event in events if "penstock" in event]
            assert told == ([{"resumable": False}] if is_stream else [])
            response = events[-1]["response"]
            assert response["penstock"]["resumable"] is False
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == ANSWER
    _check_log(caplog)
    written = [each for each in _warnings(caplog) if "cannot be resumed" in each]
    assert len(written) == 1
    assert written[0].startswith("Redis is out of memory: 1 responses continue without it")


async def test_what_is_not_stored_for_lack_of_redis_is_told(
    serve: Serve, redis_server: RedisServer
) -> None:
    async with (
        RedisPath(redis_server) as path,
        serve(redis_url=path.url, session_storage="optional") as served,
    ):
        await path.lose()
        events = await _read(served, is_stream=True)
        assert len([event for event in events if "penstock" in event]) == 1
        whole = await served.http.post("/v1/responses", json=_BODY)
        assert whole.json()["penstock"]["resumable"] is False
        wanted = await served.http.post("/v1/responses", json={**_BODY, "store": False})
        assert "resumable" not in wanted.json()["penstock"]


@pytest.mark.parametrize("wire", ["sse", "websocket"])
async def test_clients_do_not_resume_what_cannot_be_resumed(
    wire: str, serve: Serve, redis_server: RedisServer
) -> None:
    storage = {"redis_url": redis_server.url, "session_storage": "optional"}
    with configured(redis_server, maxmemory=1):
        async with serve(step_s=0.02, **storage) as served:
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
    serve: Serve,
    app_options: dict[str, Any],
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A round trip takes longer than an entry and a request wait for a Redis nearby."""
    caplog.set_level(logging.INFO, "penstock")
    app_options["log_settings"] = RedisLogSettings(
        ack_timeout_s=0.05, request_timeout_s=0.1, beat_s=0.1
    )
    async with RedisPath(redis_server) as path:
        path.upstream.latency_s = path.downstream.latency_s = 0.06
        async with serve(step_s=0.01, redis_url=path.patient_url) as served:
            await _until_health_is(served, "degraded")
            events = await _read(served, is_stream=True)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert not any("penstock" in event for event in events)
            assert "resumable" not in events[-1]["response"]["penstock"]
            path_of_it = f"/v1/responses/{events[0]['response']['id']}"
            query: dict[str, Any] = {"stream": "true", "starting_after": 4}
            again = await served.http.get(path_of_it, params=query)
            assert _events(again.text) == events[5:]
            health = (await served.http.get("/health")).json()
            assert health["status"] == "degraded"
            assert health["redis"]["state"] == "slow"
            assert health["redis"]["message"].startswith("Redis is slow: a round trip takes 0.")
            metrics = (await served.http.get("/metrics")).text
            assert _sample(metrics, "redis_up") == 1.0
            assert _sample(metrics, "redis_state", 'state="slow"') == 1.0
            assert _sample(metrics, "redis_round_trip_seconds") >= 0.12
    _check_log(caplog)
    assert len([each for each in _warnings(caplog) if "Redis is slow" in each]) == 1
    assert "does not answer" not in caplog.text


async def _until_health_is(served: Served, status: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await served.http.get("/health")).json()["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


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
