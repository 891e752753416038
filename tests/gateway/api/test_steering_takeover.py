"""Steers at several gateways: any of them takes a steer, and one that takes a steered response over
finds what became of it. Also where the server is stopped, and goes on from its disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import Tokenizer
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.api.responses.successors import Successors
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines import engine_link
from penstock.gateway.storage.conversations.ids import successor_id
from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.response_log.log_store import LogExistsError

from ...redis_server import RedisServer
from ..conftest import ANSWER, PATIENCE_S, Serve, until
from ..fake_engine import FakeEngine
from ..standing_still import Gateway

_NUM_SAID = 4  # tokens before the steer
_CALLED = 'Hi.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


async def _read(http: httpx.AsyncClient, response_id: str) -> list[dict[str, Any]]:
    """A response's events, to the end, from the first to the last."""
    answer = await http.get(f"/v1/responses/{response_id}?stream=true")
    assert answer.status_code == 200, answer.text
    events = _events(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def _check(http: httpx.AsyncClient, first: str, steer_ids: list[str]) -> str:
    """That the steers were committed, once, and that its successor answers; the text before."""
    before = await _read(http, first)
    steers = before[-1]["response"]["penstock"]["steers"]
    assert [steer["id"] for steer in steers] == steer_ids
    assert {(each["status"], each["successor_id"]) for each in steers} == {
        ("committed", successor_id(first))
    }
    accepted = [e for e in before if e["type"] == "response.steer.accepted"]
    assert [event["steer"]["id"] for event in accepted] == steer_ids
    assert before[-1]["type"] == "response.incomplete"
    stored = (await http.get(f"/v1/responses/{first}")).json()
    assert stored["output"] == before[-1]["response"]["output"]
    assert stored["output"][0]["content"][0]["text"] == _text(before)
    after = await _read(http, successor_id(first))
    assert after[-1]["type"] == "response.completed"
    assert _text(after) == ANSWER
    return _text(before)


# -- several gateways ----------------------------------------------------------------------------


class Stage:
    """Two gateways in front of one engine.

    Attributes:
        http: a client of each.
    """

    def __init__(
        self,
        gateways: list[Gateway],
        http: list[httpx.AsyncClient],
        engine: FakeEngine,
        redis: Any,
        tokenizer: Tokenizer,
    ) -> None:
        self.gateways = gateways
        self.http = http
        self.engine = engine
        self._redis = redis
        self._tokenizer = tokenizer

    async def begun(self, num_said: int = _NUM_SAID, **settings: Any) -> str:
        """A response at the first gateway, which has said a bit and then holds its breath."""
        self.engine.holds_in = num_said
        body = {"input": "one", "background": True, **settings}
        response_id: str = (await self.http[0].post("/v1/responses", json=body)).json()["id"]
        await until(lambda: not self.engine.may_speak.is_set())
        return response_id

    async def steer(self, at: int, response_id: str, said: str = "two") -> dict[str, Any]:
        path = f"/v1/responses/{response_id}/steer"
        answer = await self.http[at].post(path, json={"input": said})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def waiting(self) -> tuple[str, dict[str, Any]]:
        """A response that has made a call and been steered, and the request with its result."""
        said = self._tokenizer.encode(_CALLED)
        self.engine.script = [*said, *self._tokenizer.encode(" And so on.")]
        first = await self.begun(len(said), tools=[_TOOL])
        self.engine.script = self._tokenizer.encode(ANSWER)
        await self.steer(0, first)
        *_, pending = await _read(self.http[0], first)
        assert pending["type"] == "response.steer.pending"
        self.engine.may_speak.set()
        result = {**pending["required_input"][0], "output": "3"}
        del result["name"]
        return first, {"input": [result], "previous_response_id": first, "tools": [_TOOL]}

    def prompt_of(self, response_id: str) -> str:
        return self._tokenizer.decode(self.engine.submitted[response_id].prompt_token_ids)

    def lose_first(self) -> None:
        """The lease of the first gateway, which stands still, runs out."""
        self._redis.delete(self.gateways[0].lease)
        self._redis.xadd(self.gateways[1].control, {"look": ""})


@pytest.fixture
async def stage(
    model_path: Path,
    tmp_path: Path,
    tokenizer: Tokenizer,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 50 * PATIENCE_S)
    config = GatewayConfig(
        engine_address=f"{tmp_path}/engine.sock",
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
        redis_url=redis_server.patient_url,
        redis_patience_ms=int(1000 * PATIENCE_S),
        tool_call_parser="hermes",
    )
    async with contextlib.AsyncExitStack() as stack:
        address = config.engine_address
        engine = await stack.enter_async_context(FakeEngine(address, tokenizer.encode(ANSWER)))
        gateways, clients = [Gateway(config) for _ in range(2)], []
        for gateway in gateways:
            await asyncio.to_thread(gateway.__enter__)
            stack.push(gateway)
            client = httpx.AsyncClient(base_url=gateway.base_url, timeout=PATIENCE_S)
            clients.append(await stack.enter_async_context(client))
        redis = stack.enter_context(redis_server.client())
        yield Stage(gateways, clients, engine, redis, tokenizer)


@pytest.mark.redis
async def test_any_gateway_takes_a_steer(stage: Stage) -> None:
    first = await stage.begun()
    told = await stage.steer(1, first)
    stage.engine.may_speak.set()
    said = await _check(stage.http[1], first, [told["id"]])
    assert ANSWER.startswith(said)
    assert said
    assert await _check(stage.http[0], first, [told["id"]]) == said


@pytest.mark.redis
async def test_the_gateway_stands_still_after_it_accepted_a_steer(stage: Stage) -> None:
    """The other one takes the response over, computes no more of it, and begins the successor."""
    first = await stage.begun()
    stage.engine.kill()  # so that the successor has to wait
    told = [await stage.steer(1, first), await stage.steer(0, first, "three")]
    stage.gateways[0].stand_still()
    stage.lose_first()
    stage.engine.may_speak.set()
    stage.engine.restart()
    ids = [each["id"] for each in told]
    said = await _check(stage.http[1], first, ids)
    stage.gateways[0].go_on()
    assert await _check(stage.http[0], first, ids) == said
    known = [name for name in stage.engine.submitted if name == successor_id(first)]
    assert len(known) == 1


@pytest.mark.redis
async def test_the_gateway_stands_still_after_it_began_the_successor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes both over, although it cannot ask at first whether there are two."""
    exists, num_asked = Successors._exists, 0

    async def exists_later(self: Successors, *args: Any) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= 2:
            raise store_unavailable("the store is away")
        return await exists(self, *args)

    monkeypatch.setattr(Successors, "_exists", exists_later)
    original = Successors.begin
    stands_still, may_go_on = threading.Event(), threading.Event()

    async def begin(self: Successors, *args: Any) -> None:
        await original(self, *args)
        if not stands_still.is_set():
            stands_still.set()
            assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr(Successors, "begin", begin)
    first = await stage.begun()
    told = await stage.steer(0, first)
    assert await asyncio.to_thread(stands_still.wait, PATIENCE_S)
    stage.lose_first()
    stage.engine.may_speak.set()
    said = await _check(stage.http[1], first, [told["id"]])
    may_go_on.set()
    assert await _check(stage.http[0], first, [told["id"]]) == said


@pytest.mark.redis
async def test_the_gateway_stands_still_before_it_begins_the_successor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one cannot begin it, and says so: then the first one cannot begin it either."""
    original, plan_successor = ResponseService._begin, Successors.plan
    begin_original = Successors.begin
    stands_still, may_go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    async def begin(self: ResponseService, planned: Any, **options: Any) -> Any:
        if planned.header.response_id != successor_id(first):
            return await original(self, planned, **options)
        stands_still.set()
        assert may_go_on.wait(PATIENCE_S)
        return await original(self, planned, **options)

    async def begin_successor(self: Successors, *args: Any) -> None:
        await begin_original(self, *args)
        went_on.set()

    async def plan(self: Successors, log: Any, *args: Any) -> Any:
        if log.replica.epoch > 1:
            raise InvalidRequestError("no", param="input")
        return await plan_successor(self, log, *args)

    monkeypatch.setattr(ResponseService, "_begin", begin)
    monkeypatch.setattr(Successors, "begin", begin_successor)
    monkeypatch.setattr(Successors, "plan", plan)
    first = ""
    first = await stage.begun()
    told = await stage.steer(0, first)
    assert await asyncio.to_thread(stands_still.wait, PATIENCE_S)
    stage.lose_first()
    stage.engine.may_speak.set()
    *_, ended, failed = await _read(stage.http[1], first)
    assert failed["type"] == "response.steer.failed"
    assert failed["steer"]["id"] == told["id"]
    stored = (await stage.http[1].get(f"/v1/responses/{first}")).json()
    assert stored["penstock"] == ended["response"]["penstock"]
    may_go_on.set()
    assert await asyncio.to_thread(went_on.wait, PATIENCE_S)
    assert (await _read(stage.http[0], first))[-1] == failed
    for http in stage.http:
        assert (await http.get(f"/v1/responses/{successor_id(first)}")).status_code == 404
        path = f"/v1/responses/{successor_id(first)}?stream=true"
        assert (await http.get(path)).status_code == 404
    assert successor_id(first) not in stage.engine.submitted


@pytest.mark.redis
async def test_a_gateway_that_was_frozen_begins_no_second_successor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still when it is about to create the successor's log, which the other one does."""
    original = ResponseService._begin
    stands_still, may_go_on, is_refused = threading.Event(), threading.Event(), threading.Event()

    async def begin(self: ResponseService, planned: Any, **options: Any) -> Any:
        if planned.header.response_id != successor_id(first) or stands_still.is_set():
            return await original(self, planned, **options)
        stands_still.set()
        assert may_go_on.wait(PATIENCE_S)
        try:
            return await original(self, planned, **options)
        except LogExistsError:
            is_refused.set()
            raise

    monkeypatch.setattr(ResponseService, "_begin", begin)
    first = ""
    first = await stage.begun()
    told = await stage.steer(0, first)
    assert await asyncio.to_thread(stands_still.wait, PATIENCE_S)
    stage.lose_first()
    stage.engine.may_speak.set()
    said = await _check(stage.http[1], first, [told["id"]])
    may_go_on.set()
    assert await asyncio.to_thread(is_refused.wait, PATIENCE_S)
    assert await _check(stage.http[0], first, [told["id"]]) == said


@pytest.mark.redis
@pytest.mark.parametrize(
    "stores",
    [
        (False, False),
        pytest.param((True, False), marks=pytest.mark.exhaustive),
        pytest.param((True, True), marks=pytest.mark.exhaustive),
    ],
)
async def test_of_two_requests_at_two_gateways_one_gets_a_pending_steer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, stores: tuple[bool, bool]
) -> None:
    first, answer = await stage.waiting()
    both = threading.Barrier(2)
    begin = ResponseService._begin
    num_begun = 0

    async def begin_together(self: ResponseService, *args: Any, **options: Any) -> Any:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= 2:  # not when one of them begins again, without the steer
            await asyncio.to_thread(both.wait, PATIENCE_S)
        return await begin(self, *args, **options)

    monkeypatch.setattr(ResponseService, "_begin", begin_together)
    posts = [
        http.post("/v1/responses", json={**answer, "store": store})
        for http, store in zip(stage.http, stores, strict=True)
    ]
    made = [each.json() for each in await asyncio.gather(*posts)]
    assert [each["status"] for each in made] == ["completed", "completed"]
    prompts = [stage.prompt_of(each["id"]) for each in made]
    assert sorted("<user>two\n" in prompt for prompt in prompts) == [False, True]
    taker = made["<user>two\n" in prompts[1]]
    assert taker["id"] == successor_id(first)
    stored = (await stage.http[0].get(f"/v1/responses/{first}")).json()
    (told,) = stored["penstock"]["steers"]
    assert (told["status"], told["successor_id"]) == ("committed", taker["id"])
    for each, is_stored in zip(made, stores, strict=True):
        found = await stage.http[1].get(f"/v1/responses/{each['id']}")
        assert found.status_code == (200 if is_stored else 404)


# -- one gateway, which is stopped ---------------------------------------------------------------


@pytest.mark.usefixtures("soon_alarmed")
async def test_what_was_steered_goes_on_from_disk(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    async with serve(data_dir=str(path)) as served:
        served.engine.holds_in = _NUM_SAID
        body = {"input": "one", "background": True}
        first = (await served.http.post("/v1/responses", json=body)).json()["id"]
        await until(lambda: not served.engine.may_speak.is_set())
        served.engine.kill()
        answer = await served.http.post(f"/v1/responses/{first}/steer", json={"input": "two"})
        assert answer.status_code == 200, answer.text
        await served.app.state.log_store.hand_over()
    async with serve(data_dir=str(path)) as served:
        said = await _check(served.http, first, [answer.json()["id"]])
        assert served.prompt_of() == f"<user>one\n<assistant>{said}\n<user>two\n<assistant>"


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.usefixtures("soon_alarmed")
async def test_what_follows_a_takeover_has_what_the_tenant_has(
    serve: Serve, tmp_path: Path, is_known: bool
) -> None:
    """Salt, priority and weight of the first response, also for later successors."""
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    keys = tmp_path / "keys.toml"
    table = (
        "[tenants.{0}]\nweight = 2.0\nmin_priority = -3\nmax_priority = 3\n"
        'allow_cache_salt = true\n[[keys]]\nkey = "sk-{0}-0123456789abcdef"\ntenant = "{0}"\n'
    )
    keys.write_text(table.format("acme"))
    settings: dict[str, Any] = {"data_dir": str(path), "api_keys_file": str(keys)}
    settings["info"] = {"scheduling_policy": "priority"}
    headers = {"Authorization": "Bearer sk-acme-0123456789abcdef"}
    body = {"input": "one", "background": True, "cache_salt": 256 * "x", "priority": 9}
    async with serve(**settings) as served:
        served.engine.holds_in = _NUM_SAID
        made = await served.http.post("/v1/responses", json=body, headers=headers)
        first = made.json()["id"]
        await until(lambda: not served.engine.may_speak.is_set())
        asked = served.engine.submitted[first]
        served.engine.kill()
        steer: dict[str, Any] = {"json": {"input": "two"}, "headers": headers}
        answer = await served.http.post(f"/v1/responses/{first}/steer", **steer)
        assert answer.status_code == 200, answer.text
        await served.app.state.log_store.hand_over()
    keys.write_text(table.format("acme" if is_known else "other"))
    async with serve(**settings) as served:
        second = successor_id(first)
        served.engine.holds_in = _NUM_SAID
        await until(lambda: not served.engine.may_speak.is_set())
        ids = [second]
        if is_known:
            answer = await served.http.post(f"/v1/responses/{second}/steer", **steer)
            assert answer.status_code == 200, answer.text
            ids.append(successor_id(second))
            await until(lambda: ids[1] in served.engine.submitted)
        for each in ids:
            request = served.engine.submitted[each]
            assert request.cache_salt == asked.cache_salt == f"acme\n{256 * 'x'}"
            assert request.priority == asked.priority == 3
            assert request.weight == asked.weight == 2.0
        served.engine.may_speak.set()
