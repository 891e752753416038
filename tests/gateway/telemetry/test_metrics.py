"""Metrics of one gateway and of several, and the dashboard that shows them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import websockets
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.storage.usage.ledger import Counts
from penstock.gateway.telemetry.metrics import _MAX_TENANTS, Metrics, StreamMeter
from penstock.gateway.telemetry.worker_metrics import Workers

from ...support import metrics_document
from ...support.stream_server import stream_server
from ..conftest import PATIENCE_S, Serve, Served
from ..fake_engine import FakeEngine

_ROOT = Path(__file__).parents[3]
_DASHBOARD = _ROOT / "gateway" / "telemetry" / "grafana.json"
_NAME = re.compile(r"\b(?:penstock:|process_)[a-z0-9_]+")

_Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _parsed(text: str) -> _Values:
    """Values by name and labels; whatever is there twice is an error."""
    values: _Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            key = (sample.name, frozenset(labels.items()))
            assert key not in values
            values[key] = sample.value
    return values


def _key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"penstock:{name}", frozenset(labels.items())


def _value(values: _Values, name: str, **labels: str) -> float:
    return values[_key(name, **labels)]


async def _metrics(served: Served) -> _Values:
    return _parsed((await served.http.get("/metrics")).text)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers is waited for, however slow the machine."""
    monkeypatch.setattr("penstock.gateway.telemetry.worker_metrics._TIMEOUT_S", PATIENCE_S)


async def test_requests_and_refusals(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[tenants.acme]\nrequests_per_minute = 1\n[[keys]]\nkey = "sk-acme-0123456789abcdef"\n'
        'tenant = "acme"\nadmin = true\n'
    )
    async with serve(api_keys_file=str(keys)) as served:
        key = {"Authorization": "Bearer sk-acme-0123456789abcdef"}
        served.http.headers.update(key)
        ask = {"prompt": [1, 2, 3], "max_tokens": 5}
        for status in (200, 429):
            answer = await served.http.post("/v1/completions", json=ask)
            assert answer.status_code == status
        async with served.connect(additional_headers=key) as websocket:
            await websocket.send('{"type": "response.create", "input": "x"}')
            assert json.loads(await websocket.recv())["status"] == 429
        ended = {"status": "101", "method": "WEBSOCKET", "route": "/v1/responses"}
        async with asyncio.timeout(PATIENCE_S):  # it is counted soon after it closed
            while _key("http_requests_total", **ended) not in (found := await _metrics(served)):
                pass
    assert _value(found, "refusals_total", code="rate_limit_exceeded") == 2
    asked = {"method": "POST", "route": "/v1/completions"}
    assert _value(found, "http_requests_total", status="200", **asked) == 1
    assert _value(found, "http_requests_total", status="429", **asked) == 1
    assert _value(found, "http_requests_total", **ended) == 1
    assert _value(found, "tenant_prompt_tokens_total", tenant="acme") == 3
    assert _value(found, "tenant_generation_tokens_total", tenant="acme") == 5
    assert _value(found, "generation_tokens_total") == 5
    assert _value(found, "admission_queue_requests") == 0
    assert _value(found, "engine_up") == 1
    assert not any(name.endswith("_created") for name, _ in found)


@pytest.mark.usefixtures("soon_alarmed")
async def test_the_time_since_the_engines_last_step_grows_while_it_has_work(served: Served) -> None:
    name = "engine_seconds_since_last_step"
    assert _value(await _metrics(served), name) == 0
    served.engine.since_step_s = 40.0
    async with asyncio.timeout(PATIENCE_S):
        while (first := _value(await _metrics(served), name)) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert first >= 40
    served.engine.fall_silent()  # between heartbeats, as when it cannot send any
    value = _value(await _metrics(served), name)
    await asyncio.sleep(0.1)
    assert _value(await _metrics(served), name) >= value + 0.1
    served.engine.kill()
    async with asyncio.timeout(PATIENCE_S):
        while _value(await _metrics(served), "engine_up"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert _value(await _metrics(served), name) == 0


async def test_sessions_turns_and_resumes(served: Served) -> None:
    first = await served.client.responses.create(model="tiny", input="x", max_output_tokens=2)
    second = await served.client.responses.create(
        model="tiny", input="y", max_output_tokens=2, previous_response_id=first.id
    )
    await served.client.responses.create(model="tiny", input="z", max_output_tokens=2, store=False)
    await served.http.get(f"/v1/responses/{second.id}?stream=true&starting_after=3")
    found = await _metrics(served)
    assert _value(found, "sessions_total") == 1
    assert _value(found, "turns_total") == 2
    assert _value(found, "resumes_total") == 1
    assert _value(found, "response_logs_live") == 0


async def test_what_runs_is_counted(serve: Serve) -> None:
    async with serve() as served:
        served.engine.may_speak.clear()
        await served.http.post("/v1/responses", json={"input": "x", "background": True})
        await served.submitted()
        assert _value(await _metrics(served), "response_logs_live") == 1


async def test_routes_that_are_none_share_one_series(served: Served) -> None:
    for path in ("/v1/a", "/v1/b"):
        await served.http.get(path)
    unknown = {"method": "GET", "route": "unknown", "status": "404"}
    assert _value(await _metrics(served), "http_requests_total", **unknown) == 2


def _own_metrics(workers: Workers | None = None) -> Metrics:
    client = EnginePool("unused")
    return Metrics(client, "tiny", workers)


async def test_tenants_beyond_the_limit_share_one_series() -> None:
    metrics = _own_metrics()
    for number in range(_MAX_TENANTS + 5):
        StreamMeter(metrics, f"t{number}").output(0, num_tokens=1, num_prompt_tokens=2)
    found = _parsed((await metrics.render()).decode())
    assert _value(found, "tenant_generation_tokens_total", tenant="(others)") == 5
    assert _value(found, "generation_tokens_total") == _MAX_TENANTS + 5
    names = [name for name, _ in found if name == "penstock:tenant_generation_tokens_total"]
    assert len(names) == _MAX_TENANTS + 1


@asynccontextmanager
async def _workers(directory: Path, num: int) -> AsyncIterator[list[Metrics]]:
    address = f"{directory}/engine.sock"
    all_metrics = [_own_metrics(Workers(address, index=i, num=num)) for i in range(num)]
    for metrics in all_metrics:
        await metrics.start()
    yield all_metrics
    for metrics in all_metrics:
        await metrics.close()


async def test_any_worker_tells_of_all(tmp_path: Path) -> None:
    async with _workers(tmp_path, 3) as workers:
        for number, metrics in enumerate(workers):
            for _ in range(number + 1):
                meter = StreamMeter(metrics)
                meter.output(0, num_tokens=4, num_prompt_tokens=7)
                meter.finished("stop", Counts())
        told = [_parsed((await metrics.render()).decode()) for metrics in workers]
    assert told[0].keys() == told[1].keys() == told[2].keys()
    for found in told:
        assert _value(found, "gateway_workers") == 3
        for number in range(3):
            worker = {"worker": str(number)}
            assert _value(found, "generation_tokens_total", **worker) == 4 * (number + 1)
            assert _value(found, "time_to_first_token_seconds_count", **worker) == number + 1
            infinite = {"le": "+Inf", **worker}
            assert _value(found, "e2e_request_latency_seconds_bucket", **infinite) == number + 1
        assert _value(found, "num_requests_running") == 0  # the engine's: once


async def test_a_worker_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    async with _workers(tmp_path, 3) as workers:
        await workers[1].close()
        found = _parsed((await workers[0].render()).decode())
        assert _value(found, "gateway_workers") == 2
        seen = {dict(labels).get("worker") for name, labels in found}
        assert seen == {"0", "2", None}
        await workers[1].start()  # again, on the same path
        assert _value(_parsed((await workers[0].render()).decode()), "gateway_workers") == 3


async def test_tenants_are_named_to_admins_only(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "[tenants.acme]\n[tenants.ops]\n"
        '[[keys]]\nkey = "of-acme"\ntenant = "acme"\n'
        '[[keys]]\nkey = "of-ops"\ntenant = "ops"\nadmin = true\n'
    )
    async with serve(api_keys=("of-admin",), api_keys_file=str(keys)) as served:
        for key in ("of-acme", "of-ops"):
            header = {"Authorization": f"Bearer {key}"}
            ask = {"prompt": [1, 2, 3], "max_tokens": 5}
            assert (await served.http.post("/v1/completions", json=ask, headers=header)).is_success
        del served.http.headers["Authorization"]
        for key, is_admin in (
            ("of-admin", True), ("of-ops", True), ("of-acme", False), ("of-nobody", False),
            (None, False),
        ):  # fmt: skip
            header = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = await served.http.get("/metrics", headers=header)
            assert answer.status_code == 200
            assert _value(_parsed(answer.text), "prompt_tokens_total") == 6
            assert ("acme" in answer.text) is is_admin, key
            assert ("tenant" in answer.text) is is_admin, key
            if key not in (None, "of-nobody"):
                url = f"ws://127.0.0.1:{served.port}/v1/stats"
                async with websockets.connect(url, additional_headers=header) as socket:
                    assert ("acme" in str(await socket.recv())) is is_admin, key


async def test_tenants_of_all_workers_are_left_out(tmp_path: Path) -> None:
    async with _workers(tmp_path, 2) as workers:
        StreamMeter(workers[1], "acme").output(0, num_tokens=4, num_prompt_tokens=7)
        assert b"acme" in await workers[0].render()
        text = (await workers[0].render(names_tenants=False)).decode()
        assert "acme" not in text
        assert _value(_parsed(text), "prompt_tokens_total", worker="1") == 7


async def test_a_gateway_is_ready_when_all_have_an_engine(tmp_path: Path) -> None:
    async with FakeEngine(f"{tmp_path}/engine.sock", [1]) as engine:
        address = engine.address
        clients = [EnginePool(address), EnginePool(address)]
        both = [
            Metrics(client, "tiny", Workers(address, index=index, num=2))
            for index, client in enumerate(clients)
        ]
        assert not await both[0].have_engine()
        clients[0].start()
        await clients[0].wait_ready()
        assert await both[0].have_engine()  # the other does not listen yet, so it gets no requests
        for metrics in both:
            await metrics.start()
        assert not await both[0].have_engine()
        clients[1].start()
        await clients[1].wait_ready()
        assert await both[0].have_engine()
        for metrics in both:
            await metrics.close()
        for client in clients:
            await client.close()


async def test_a_worker_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.telemetry.worker_metrics._TIMEOUT_S", 0.05)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with stream_server(hang, tmp_path / "gateway-1.sock"):
        metrics = _own_metrics(Workers(f"{tmp_path}/engine.sock", index=0, num=2))
        found = _parsed((await metrics.render()).decode())
        assert _value(found, "gateway_workers") == 1


# -- what is written about them --------------------------------------------------------------------


@pytest.fixture
async def names(serve: Serve, tmp_path: Path) -> set[str]:
    """Every name that a gateway of several with Redis can export, without a histogram's endings."""
    async with _workers(tmp_path, 2) as workers:
        workers[0].probe("redis_up", "As in the application.", _yes)
        workers[0].gauge("redis_round_trip_seconds", "As in the application.", lambda: 0.4)
        workers[0].states("redis_state", "As in the application.", ("ok", "slow"), lambda: "slow")
        joined = (await workers[0].render()).decode()
    async with serve() as served:
        text = (await served.http.get("/metrics")).text
    return {line.split()[2] for line in (joined + text).splitlines() if line.startswith("# TYPE")}


async def _yes() -> bool:
    return True


def _queries(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for value in node.values():
            yield from _queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from _queries(value)


def _family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


async def test_the_dashboard_asks_for_what_there_is(names: set[str]) -> None:
    dashboard = json.loads(_DASHBOARD.read_text())
    asked = {_family(name) for query in _queries(dashboard) for name in _NAME.findall(query)}
    assert len(asked) > 15
    assert asked <= names


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads(_DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["id"] is None  # of the Grafana that takes it
    [source] = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        cells |= taken
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == f"${{{source['name']}}}"
            assert panel["targets"]


async def test_the_document_is_made_of_the_declarations() -> None:
    written = await metrics_document.written()
    assert metrics_document.PAGE.read_text("utf-8") == written, "run `make documents`"


async def test_the_document_names_every_metric(names: set[str]) -> None:
    written = await metrics_document.written()
    told = set(re.findall(r"^\| `([a-z0-9_:]+)`", written, re.MULTILINE))
    assert {name for name in names if name.startswith("penstock:")} == told
