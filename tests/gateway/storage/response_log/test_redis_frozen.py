"""A gateway that stands still at any point of a stored response, while another takes it over.

Two or three gateways on one Redis, before an engine's real server, scheduler and blocks. Each has
a thread and an event loop of its own: what blocks it there stands for SIGSTOP at that very point,
for as long as the test wants. Who reads at the frozen gateway stays, and gets every event once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from penstock.engine.config import ModelConfig
from penstock.engine.transport import sockets
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines.engine_client import EngineClient
from penstock.gateway.storage.response_log import redis_ownership, redis_store, redis_writer
from penstock.gateway.storage.response_log.redis_ownership import Claim
from penstock.gateway.storage.response_log.redis_store import RedisLogSettings, RedisLogStore

from ....engine.server.stack import Engine
from ....redis_server import RedisServer
from ...conftest import listen
from ...fake_engine import INFO
from .records import PATIENCE_S, until

pytestmark = pytest.mark.redis
LEASE_S = 1.0
NUM_TOKENS = 300
BODY = {"model": "tiny", "ignore_eos": True, "stream": True, "input": "!"}
BODY |= {"max_output_tokens": NUM_TOKENS, "temperature": 0}


class Pause:
    """A point at which a gateway is to stand still, once."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self._is_over = threading.Event()

    def here(self) -> None:
        if not self.is_reached.is_set():
            self.is_reached.set()
            assert self._is_over.wait(2 * PATIENCE_S)

    def end(self) -> None:
        self._is_over.set()


class Gateway:
    """A gateway in a thread of its own."""

    def __init__(self, config: GatewayConfig) -> None:
        self.app: Starlette = create_app(config)
        self.port = 0
        self._config = config
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def store(self) -> RedisLogStore:
        store = self.app.state.log_store
        assert isinstance(store, RedisLogStore)
        return store

    @property
    def engine(self) -> EngineClient:
        engine = self.app.state.engine
        assert isinstance(engine, EngineClient)
        return engine

    def runs(self, response_id: str) -> bool:
        return response_id in self.store._live

    def __enter__(self) -> Gateway:
        self._thread.start()
        assert self._is_ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Something in its own event loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with listen(self.app, self._config) as self.port:
            self._is_ready.set()
            while not self._is_over.is_set():  # noqa: ASYNC110  (another thread's)
                await asyncio.sleep(0.01)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(sockets, "MAX_SILENT_BEATS", 1000)  # it buries whom a test wants buried
    with Engine(f"{tmp_path}/engine.sock", INFO) as engine:
        yield engine
    assert engine.error is None


@pytest.fixture
def make(
    engine: Engine,
    model_path: Path,
    shared_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways; takes settings."""
    settings = partial(
        RedisLogSettings,
        ack_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
        lease_s=LEASE_S,
    )
    monkeypatch.setattr(redis_store, "RedisLogSettings", settings)
    config = GatewayConfig(
        engine_address=engine.address,
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
        redis_url=shared_server.patient_url,
    )
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            Gateway(dataclasses.replace(config, **settings))
        )
        engine.device.set_free()


def bury(engine: Engine, gateway_number: int) -> None:
    """The engine takes a gateway for dead."""
    wired = engine.server._transport._gateways[gateway_number]
    wired.num_silent_beats = 10_000


@dataclasses.dataclass
class Reader:
    """Reads one response where it began, to its end."""

    port: int
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def response_id(self) -> str:
        return str(self.events[0]["response"]["id"])

    async def read(self) -> Reader:
        async for event in _events(self.port, "POST", "/v1/responses", json=BODY):
            self.events.append(event)
        assert [event["sequence_number"] for event in self.events] == list(range(len(self.events)))
        assert self.events[-1]["type"] == "response.incomplete", self.events[-1]
        return self

    @property
    def text(self) -> str:
        deltas = (each for each in self.events if each["type"] == "response.output_text.delta")
        return "".join(each["delta"] for each in deltas)


async def _events(port: int, method: str, path: str, **options: Any) -> AsyncIterator[Any]:
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
        client.stream(method, path, **options) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def check(reader: Reader, reading: asyncio.Task[Reader], other: Gateway) -> None:
    """Who stayed has it whole; so has the log, and the turn that is stored."""
    async with asyncio.timeout(PATIENCE_S):
        await reading
    undisturbed = await Reader(other.port).read()
    assert reader.text == undisturbed.text
    path = f"/v1/responses/{reader.response_id}"
    replayed = _events(other.port, "GET", path, params={"stream": "true"})
    assert [event async for event in replayed] == reader.events
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}") as client:
        stored = (await client.get(path)).json()
    assert stored["status"] == "incomplete"
    assert stored["output"][0]["content"][0]["text"] == reader.text


# -- where it stands still ----------------------------------------------------------------------

Inject = Callable[[Gateway, Pause, pytest.MonkeyPatch], None]


def _around(
    module: Any, name: str, pause: Pause, *, of: object, when: Callable[..., bool], after: bool
) -> Callable[..., Awaitable[Any]]:
    call = getattr(module, name)

    async def paused(client: object, commands: Any, **options: Any) -> Any:
        commands = list(commands)
        is_here = client is of and when(commands)
        if is_here and not after:
            pause.here()
        replies = await call(client, commands, **options)
        if is_here and after:
            pause.here()
        return replies

    return paused


def _entry(gateway: Gateway, pause: Pause, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    def is_due(commands: list[Any]) -> bool:
        return any(b"d" in command for command in commands) and num_seen(gateway) >= 3

    patched = _around(
        redis_writer,
        "lean_round_trip",
        pause,
        of=gateway.store._redis,
        when=is_due,
        after=after,
    )
    patch.setattr(redis_writer, "lean_round_trip", patched)


def num_seen(gateway: Gateway) -> int:
    return max((log.num_published for log in gateway.store._live.values()), default=0)


def _header(gateway: Gateway, pause: Pause, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    patched = _around(
        redis_writer,
        "round_trip",
        pause,
        of=gateway.store._redis,
        when=lambda commands: any(b"h" in command for command in commands),
        after=after,
    )
    patch.setattr(redis_writer, "round_trip", patched)


def _beat(gateway: Gateway, pause: Pause, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    ownership = gateway.store._ownership
    call = ownership._beat

    async def paused() -> None:
        is_due = num_seen(gateway) >= 3
        if is_due and not after:
            pause.here()
        await call()
        if is_due and after:
            pause.here()

    patch.setattr(ownership, "_beat", paused)


def _submit(gateway: Gateway, pause: Pause, patch: pytest.MonkeyPatch) -> None:
    call = gateway.engine.submit

    def paused(*args: Any, **options: Any) -> Any:
        pause.here()
        return call(*args, **options)

    patch.setattr(gateway.engine, "submit", paused)


POINTS: dict[str, Inject] = {
    "before an entry is sent": partial(_entry, after=False),
    "before its acknowledgement": partial(_entry, after=True),
    "before the lease is renewed": partial(_beat, after=False),
    "after the lease was renewed": partial(_beat, after=True),
    "before a header's acknowledgement": partial(_header, after=True),
    "before it submits": _submit,
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("is_buried", [False, True], ids=["known", "buried"])
async def test_another_takes_over_what_it_ran(
    point: str,
    engine: Engine,
    make: Callable[[], Gateway],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_buried: bool,
) -> None:
    first, second = make(), make()
    pause = Pause()
    POINTS[point](first, pause, monkeypatch)
    engine.device.hold(but=20)
    reader = Reader(first.port)
    reading = asyncio.create_task(reader.read())
    await until(pause.is_reached.is_set)
    await until(lambda: second.store._live)
    if is_buried:
        bury(engine, 1)
        await until(lambda: 1 not in engine.server._transport._gateways)
        engine.device.allow(1)
    else:
        engine.device.allow(20)
        await until(lambda: num_seen(second) >= 3)
    pause.end()
    engine.device.set_free()
    await check(reader, reading, second)
    assert not first.store._live
    engine.wait_for_idle_blocks()


async def test_a_response_that_is_read_at_another_gateway_goes_on(
    engine: Engine, make: Callable[..., Gateway]
) -> None:
    """Its reader left the gateway that runs it, as a client does that hears nothing, and came to
    another before anybody had to take it over."""
    grace_s = 0.3
    first, second = (make(disconnect_grace_s=grace_s) for _ in range(2))
    engine.device.hold(but=20)
    begun = _events(first.port, "POST", "/v1/responses", json=BODY)
    response_id = (await anext(begun))["response"]["id"]
    path = f"/v1/responses/{response_id}"
    elsewhere = _events(second.port, "GET", path, params={"stream": "true"})
    events = [await anext(elsewhere)]
    await begun.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(5 * grace_s)
    assert first.runs(response_id)
    engine.device.set_free()
    async with asyncio.timeout(PATIENCE_S):
        events += [event async for event in elsewhere]
    assert events[-1]["type"] == "response.incomplete", events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    engine.wait_for_idle_blocks()


async def test_who_waits_for_the_whole_response_gets_it(
    engine: Engine, make: Callable[[], Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(), make()
    pause = Pause()
    _entry(first, pause, monkeypatch, after=False)
    engine.device.hold(but=20)
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        body = {**BODY, "stream": False}
        posting = asyncio.create_task(client.post("/v1/responses", json=body))
        await until(pause.is_reached.is_set)
        await until(lambda: second.store._live)
        engine.device.set_free()
        pause.end()
        answer = await posting
    assert answer.status_code == 200, answer.text
    undisturbed = await Reader(second.port).read()
    assert answer.json()["output"][0]["content"][0]["text"] == undisturbed.text


def _claim(gateway: Gateway, pause: Pause, patch: pytest.MonkeyPatch) -> None:
    ownership = gateway.store._ownership
    call = ownership._adopt

    async def paused(claim: Claim) -> None:
        pause.here()
        await call(claim)

    patch.setattr(ownership, "_adopt", paused)


@pytest.mark.parametrize("inject", [_claim, _submit], ids=["after the fence", "before it submits"])
@pytest.mark.parametrize("wakes_first", ["owner", "taker"])
async def test_who_takes_over_stands_still_too(
    inject: Inject,
    wakes_first: str,
    engine: Engine,
    make: Callable[[], Gateway],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, taker = make(), make()
    pauses = [Pause(), Pause()]
    _entry(owner, pauses[0], monkeypatch, after=False)
    inject(taker, pauses[1], monkeypatch)
    engine.device.hold(but=20)
    reader = Reader(owner.port)
    reading = asyncio.create_task(reader.read())
    await until(pauses[0].is_reached.is_set)
    await until(pauses[1].is_reached.is_set)
    last = make()
    await until(lambda: last.store._live)
    assert [log.epoch for log in last.store._live.values()] == [3]
    engine.device.allow(20)
    await until(lambda: num_seen(last) >= 3)
    first, second = pauses if wakes_first == "owner" else pauses[::-1]
    first.end()
    await until(lambda: not (owner if wakes_first == "owner" else taker).store._live)
    second.end()
    engine.device.allow(20)
    await until(lambda: not (owner.store._live or taker.store._live))
    engine.device.set_free()
    await check(reader, reading, last)


async def test_a_late_cancel_reaches_who_runs_it(
    engine: Engine, make: Callable[[], Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that wakes is told to stop a response before it knows that another has it."""
    first, second = make(), make()
    pause = Pause()

    class Cancelling(Pause):
        def here(self) -> None:
            if not pause.is_reached.is_set():
                pause.here()
                for log in first.store._live.values():
                    log.cancel()

    _entry(first, Cancelling(), monkeypatch, after=False)
    engine.device.hold(but=20)
    reader = Reader(first.port)
    reading = asyncio.create_task(reader.read())
    await until(pause.is_reached.is_set)
    await until(lambda: second.store._live)
    engine.device.allow(20)
    await until(lambda: num_seen(second) > num_seen(first))
    pause.end()
    async with asyncio.timeout(PATIENCE_S):
        await reading
    engine.device.set_free()
    response = reader.events[-1]["response"]
    assert response["status"] == "cancelled"
    assert response["usage"]["output_tokens"] < NUM_TOKENS
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.port}") as client:
        stored = (await client.get(f"/v1/responses/{reader.response_id}")).json()
    assert stored == response, "and not what the first had of it"


async def test_what_it_had_not_begun_is_its_own(
    engine: Engine,
    make: Callable[[], Gateway],
    shared_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the note and the header there is nothing to carry on: the other drops the note. With
    the header it comes again: were this gateway to die now, the response must be carried on."""
    first, second = make(), make()
    pause = Pause()
    _header(first, pause, monkeypatch, after=False)
    engine.device.hold(but=5)
    reader = Reader(first.port)
    reading = asyncio.create_task(reader.read())
    await until(pause.is_reached.is_set)
    with shared_server.client() as redis:
        notes = f"penstock:owned:{first.store.gateway_id}"
        assert redis.scard(notes) == 1
        await until(lambda: redis.scard(notes) == 0)
        # It would note what it owns.
        monkeypatch.setattr(first.store._ownership, "_on_beat", _nothing)
        pause.end()
        await until(lambda: num_seen(first) >= 1)
        assert redis.scard(notes) == 1
    engine.device.set_free()
    await check(reader, reading, second)


async def _nothing(_: object) -> None:
    pass


async def _handed_over(
    first: Gateway, client: httpx.AsyncClient, num: int
) -> list[asyncio.Task[httpx.Response]]:
    """Who waits at a gateway that hands its responses over: for a whole one; for the rest of one,
    and for what comes much later, which is silence."""
    whole = asyncio.create_task(client.post("/v1/responses", json={**BODY, "stream": False}))
    background = {**BODY, "stream": False, "background": True}
    begun = (await client.post("/v1/responses", json=background)).json()["id"]
    await until(lambda: len(first.store._live) == 2 and num_seen(first) >= num)
    resumes = [
        asyncio.create_task(
            client.get(f"/v1/responses/{begun}", params={"stream": "true", "starting_after": after})
        )
        for after in (4, 100)
    ]
    await until(lambda: sum(len(log.readers) for log in first.store._live.values()) == 3)
    await first.run(first.store.hand_over())
    return [whole, *resumes]


async def test_who_waits_at_a_gateway_that_leaves_gets_the_rest(
    engine: Engine, make: Callable[[], Gateway]
) -> None:
    first, second = make(), make()
    engine.device.hold(but=20)
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        waiting = await _handed_over(first, client, 3)
        ending = asyncio.create_task(first.run(first.store.let_readers_end(PATIENCE_S)))
        await until(lambda: len(second.store._live) == 2)
        engine.device.allow(10)
        await asyncio.sleep(2.5)  # longer than connections get to close
        assert not any(task.done() for task in (*waiting, ending))
        engine.device.set_free()
        whole, *resumes = await asyncio.gather(*waiting)
        assert whole.status_code == 200, whole.text
        assert whole.json()["status"] == "incomplete"
        for answer in resumes:
            assert "event: response.incomplete" in answer.text, answer.text[-500:]
        await ending
        late = await client.get(f"/v1/responses/{whole.json()['id']}", params={"stream": "true"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "response_moved")


async def test_who_waits_for_too_long_is_told_to_resume(
    engine: Engine, make: Callable[[], Gateway]
) -> None:
    first, second = make(), make()
    engine.device.hold(but=20)
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        waiting = await _handed_over(first, client, 3)
        await until(lambda: len(second.store._live) == 2)
        await first.run(first.store.let_readers_end(0.0))
        whole, heard, silent = await asyncio.gather(*waiting)
        for answer in (whole, silent):
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "response_moved"
            assert "resume" in answer.json()["error"]["message"]
            assert "retry-after" in answer.headers
        assert heard.status_code == 200
        assert '"code":"response_moved"' in heard.text.rstrip().splitlines()[-1]
    engine.device.set_free()
    await until(lambda: not second.store._live)


async def test_a_gateway_without_an_engine_leaves_responses_to_others(
    engine: Engine, make: Callable[[], Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(), make()
    engine.device.hold(but=20)
    second.store._ownership.can_run = lambda: False
    posting = asyncio.create_task(Reader(first.port).read())
    await until(lambda: num_seen(first) >= 3)
    await first.run(first.store.hand_over())
    await asyncio.sleep(2 * LEASE_S)
    assert not second.store._live
    third = make()
    await until(lambda: third.store._live)
    assert not second.store._live
    monkeypatch.setattr(redis_ownership, "_LEASES_WITHOUT_ENGINE", 0.0)  # nobody has taken them
    await third.run(third.store.hand_over())
    await until(lambda: second.store._live)
    engine.device.set_free()
    await posting
