"""A gateway that stands still at any point of a stored response, while another takes it over.

Two or three gateways on one Redis, before an engine's real server, scheduler and blocks. Each has
a thread and an event loop of its own: what blocks it there stands for SIGSTOP, for as long as the
test wants, and its wire to Redis says at which point. Who reads at the frozen gateway stays, and
gets every event once.
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
from typing import Any, Self, TypeVar

import httpx
import pytest
import redis
from starlette.applications import Starlette

from penstock.engine.config import ModelConfig
from penstock.engine.protocol import sockets
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.redis_store import RedisLogStore

from ....engine.process.stack import Engine
from ....redis_server import RedisServer
from ....support.stream_server import stream_server
from ....support.tiers import tiered
from ...conftest import listen
from ...fake_engine import INFO
from .conftest import PATIENT
from .records import PATIENCE_S, until, until_found
from .stored import beats, lapse, lease_key, num_deltas, owned, owned_key
from .wire import Wire

pytestmark = pytest.mark.redis
NUM_TOKENS = 200
BODY = {"model": "tiny", "ignore_eos": True, "stream": True, "input": "!"}
BODY |= {"max_output_tokens": NUM_TOKENS, "temperature": 0}
_PATIENT_CLIENT = f"socket_timeout={PATIENCE_S}&socket_connect_timeout={PATIENCE_S}"
_Result = TypeVar("_Result")


class EngineWire:
    """A gateway's way to the engine, at a path of its own."""

    def __init__(self, path: Path, engine_path: str) -> None:
        self.path = str(path)
        self._engine_path = engine_path
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._server = stream_server(self._serve, path)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__(None, None, None)

    async def cut(self) -> None:
        """End the connection, so that the engine takes the gateway for dead; it has noticed."""
        for to_engine, sending in self._sending.items():
            sending.cancel()
            to_engine.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        from_engine, to_engine = await asyncio.open_unix_connection(self._engine_path)
        sending = self._sending[to_engine] = asyncio.create_task(_copy(reader, to_engine))
        try:
            await _copy(from_engine, writer)
        finally:
            self._sending.pop(to_engine).cancel()
            to_engine.close()
            await asyncio.gather(sending, to_engine.wait_closed(), return_exceptions=True)
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    if writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()


class Gateway:
    """A gateway in a thread of its own, which can stand still.

    Attributes:
        wire: its way to Redis.
        engine_wire: its way to the engine.
        is_still: it stands still, or did.
    """

    def __init__(self, config: GatewayConfig, wire: Wire, engine_wire: EngineWire) -> None:
        self.app: Starlette = create_app(config, log_settings=dataclasses.replace(PATIENT))
        self.wire, self.engine_wire = wire, engine_wire
        self.port = 0
        self._config = config
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self.is_still, self._may_wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    @property
    def store(self) -> RedisLogStore:
        store = self.app.state.log_store
        assert isinstance(store, RedisLogStore)
        return store

    @property
    def engine(self) -> EnginePool:
        engine = self.app.state.engine
        assert isinstance(engine, EnginePool)
        return engine

    async def log(self, response_id: str) -> ResponseLog:
        """What its readers would read."""
        return await self.run(self.store.find("default", response_id))

    async def runs(self, response_id: str) -> bool:
        return (await self.log(response_id)).run is not None

    async def leaves(self, response_id: str) -> bool:
        """To another that runs it."""
        return not await self.runs(response_id)

    async def __aenter__(self) -> Self:
        self._thread.start()
        assert await asyncio.to_thread(self._is_ready.wait, PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wake()
        self._is_over.set()
        await asyncio.to_thread(self._thread.join, PATIENCE_S)
        assert not self._thread.is_alive()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Something in its own event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stand_still(self, *, on_waking: Callable[[], None] = lambda: None) -> None:
        """Called in its own thread: until `wake`, once."""
        if not self.is_still.is_set():
            self.is_still.set()
            assert self._may_wake.wait(2 * PATIENCE_S)
            on_waking()

    async def freeze(
        self, client: redis.Redis, *, on_waking: Callable[[], None] = lambda: None
    ) -> None:
        """It stands still, and the others see at once that it has no lease.

        Args:
            on_waking: what it does before anything else.
        """
        self._loop.call_soon_threadsafe(partial(self.stand_still, on_waking=on_waking))
        await until(self.is_still.is_set)
        await lapse(client, self.store)

    def wake(self) -> None:
        self._may_wake.set()
        self.wire.go_on()

    def stop_standing_still(self) -> None:
        """As `wake`, but what its wire holds stays there."""
        self._may_wake.set()

    async def _serve(self) -> None:
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


Make = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def make(
    engine: Engine, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> AsyncIterator[Make]:
    """Starts gateways; takes settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> Gateway:
            wire = await stack.enter_async_context(Wire(redis_server.port))
            path = tmp_path / f"engine-{wire.port}.sock"
            engine_wire = await stack.enter_async_context(EngineWire(path, engine.address))
            config = GatewayConfig(
                engine_address=engine_wire.path,
                served_model_names=("tiny",),
                model=ModelConfig(model=str(model_path)),
                redis_url=f"{wire.url}?{_PATIENT_CLIENT}",
                **settings,
            )
            return await stack.enter_async_context(Gateway(config, wire, engine_wire))

        yield start
        engine.device.set_free()


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

Reached = Callable[[], bool]
Inject = Callable[[Gateway, pytest.MonkeyPatch], Reached]


def _entry(gateway: Gateway, _: pytest.MonkeyPatch, *, is_after: bool) -> Reached:
    return gateway.wire.hold("XADD", "d", is_after=is_after).is_reached.is_set


def _beat(gateway: Gateway, _: pytest.MonkeyPatch, *, is_after: bool) -> Reached:
    return gateway.wire.hold("SET", lease_key(gateway.store), is_after=is_after).is_reached.is_set


def _header(gateway: Gateway, _: pytest.MonkeyPatch) -> Reached:
    return gateway.wire.hold("XADD", "h", is_after=True).is_reached.is_set


def _fence(gateway: Gateway, _: pytest.MonkeyPatch) -> Reached:
    return gateway.wire.hold("XADD", "f", is_after=True).is_reached.is_set


def _submit(gateway: Gateway, patch: pytest.MonkeyPatch) -> Reached:
    call = gateway.engine.submit

    def paused(*args: Any, **options: Any) -> Any:
        gateway.stand_still()
        return call(*args, **options)

    patch.setattr(gateway.engine, "submit", paused)
    return gateway.is_still.is_set


BEFORE_IT_BEGINS: dict[str, Inject] = {
    "before a header's acknowledgement": _header,
    "before it submits": _submit,
}
WHILE_IT_RUNS: dict[str, Inject] = {
    "before an entry is sent": partial(_entry, is_after=False),
    "before its acknowledgement": partial(_entry, is_after=True),
    "before the lease is renewed": partial(_beat, is_after=False),
    "after the lease was renewed": partial(_beat, is_after=True),
}


async def step_until(engine: Engine, condition: Callable[[], object]) -> None:
    """Let the device, which holds, take a step now and then until it is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            engine.device.allow(1)
            await asyncio.sleep(0.02)


async def begin(engine: Engine, client: redis.Redis, reader: Reader) -> asyncio.Task[Reader]:
    """A response of which something is stored; the device holds."""
    engine.device.hold()
    reading = asyncio.create_task(reader.read())
    await until(lambda: reader.events)
    await step_until(engine, lambda: num_deltas(client, reader.response_id, 1))
    return reading


async def taken_over(client: redis.Redis, taker: Gateway, epoch: int = 2) -> str:
    """The response that a gateway runs, as soon as it has taken it over."""
    await until(lambda: list(owned(client, taker.store).values()) == [epoch])
    (response_id,) = owned(client, taker.store)
    return response_id


# Where it stands still, and whether the engine takes it for dead meanwhile.
CASES = [
    (point, is_buried)
    for point in (*WHILE_IT_RUNS, *BEFORE_IT_BEGINS)
    for is_buried in (False, True)
]
REPRESENTATIVES = {
    ("before an entry is sent", True),
    ("before its acknowledgement", False),
    ("before a header's acknowledgement", False),
    ("before it submits", True),
}


@pytest.mark.parametrize(
    ("point", "is_buried"),
    tiered(CASES, first=REPRESENTATIVES),
)
async def test_another_takes_over_what_it_ran(
    point: str,
    engine: Engine,
    make: Make,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_buried: bool,
) -> None:
    first, second = await make(), await make()
    reader = Reader(first.port)
    if point in WHILE_IT_RUNS:
        reading = await begin(engine, client, reader)
        is_reached = WHILE_IT_RUNS[point](first, monkeypatch)
    else:
        is_reached = BEFORE_IT_BEGINS[point](first, monkeypatch)
        engine.device.hold()
        reading = asyncio.create_task(reader.read())
    await step_until(engine, is_reached)
    await first.freeze(client)
    response_id = await taken_over(client, second)
    if is_buried:
        await first.engine_wire.cut()
        engine.device.allow(1)
    else:
        await step_until(engine, lambda: num_deltas(client, response_id, 2))
    first.wake()
    engine.device.set_free()
    await check(reader, reading, second)
    assert not await first.runs(response_id)
    await asyncio.to_thread(engine.wait_for_idle_blocks)


async def test_a_response_that_is_read_at_another_gateway_goes_on(
    engine: Engine, make: Make
) -> None:
    """Its reader left the gateway that runs it, as a client does that hears nothing, and came to
    another before anybody had to take it over."""
    grace_s = 0.1
    first, second = await make(disconnect_grace_s=grace_s), await make(disconnect_grace_s=grace_s)
    engine.device.hold(but=20)
    begun = _events(first.port, "POST", "/v1/responses", json=BODY)
    response_id = (await anext(begun))["response"]["id"]
    path = f"/v1/responses/{response_id}"
    elsewhere = _events(second.port, "GET", path, params={"stream": "true"})
    events = [await anext(elsewhere)]
    await begun.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(5 * grace_s)
    assert await first.runs(response_id)
    engine.device.set_free()
    async with asyncio.timeout(PATIENCE_S):
        events += [event async for event in elsewhere]
    assert events[-1]["type"] == "response.incomplete", events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    await asyncio.to_thread(engine.wait_for_idle_blocks)


async def test_who_waits_for_the_whole_response_gets_it(
    engine: Engine, make: Make, client: redis.Redis
) -> None:
    first, second = await make(), await make()
    held = first.wire.hold("XADD", "d")
    engine.device.hold(but=20)
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {**BODY, "stream": False}
        posting = asyncio.create_task(http.post("/v1/responses", json=body))
        await held.is_reached.wait()
        await first.freeze(client)
        await taken_over(client, second)
        engine.device.set_free()
        first.wake()
        answer = await posting
    assert answer.status_code == 200, answer.text
    undisturbed = await Reader(second.port).read()
    assert answer.json()["output"][0]["content"][0]["text"] == undisturbed.text


SLEEPERS = ("owner", "taker")


@pytest.mark.parametrize(
    ("inject", "wakes_first"),
    tiered(
        [(inject, wakes_first) for inject in (_fence, _submit) for wakes_first in SLEEPERS],
        first=[(_fence, "owner"), (_submit, "taker")],
    ),
)
async def test_who_takes_over_stands_still_too(
    inject: Inject,
    wakes_first: str,
    engine: Engine,
    make: Make,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, taker = await make(), await make()
    reader = Reader(owner.port)
    reading = await begin(engine, client, reader)
    held = owner.wire.hold("XADD", "d")
    is_reached = inject(taker, monkeypatch)
    await step_until(engine, held.is_reached.is_set)
    await owner.freeze(client)
    await until(is_reached)
    await taker.freeze(client)
    last = await make()
    response_id = await taken_over(client, last, epoch=3)
    assert response_id == reader.response_id
    await step_until(engine, lambda: num_deltas(client, response_id, 3))
    for sleeper in (owner, taker) if wakes_first == "owner" else (taker, owner):
        sleeper.wake()
        await beats(client, sleeper.store)
        engine.device.allow(20)
        await until_found(partial(sleeper.leaves, response_id))
    engine.device.set_free()
    await check(reader, reading, last)


async def test_a_late_cancel_reaches_who_runs_it(
    engine: Engine, make: Make, client: redis.Redis
) -> None:
    """The gateway that wakes is told to stop a response before it knows that another has it."""
    first, second = await make(), await make()
    reader = Reader(first.port)
    reading = await begin(engine, client, reader)
    log = await first.log(reader.response_id)
    held = first.wire.hold("XADD", "d")
    await step_until(engine, held.is_reached.is_set)
    await first.freeze(client, on_waking=log.cancel)
    response_id = await taken_over(client, second)
    await step_until(engine, lambda: num_deltas(client, response_id, 2))
    first.wake()
    async with asyncio.timeout(PATIENCE_S):
        await reading
    engine.device.set_free()
    response = reader.events[-1]["response"]
    assert response["status"] == "cancelled"
    assert response["usage"]["output_tokens"] < NUM_TOKENS
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.port}") as http:
        stored = (await http.get(f"/v1/responses/{response_id}")).json()
    assert stored == response, "and not what the first had of it"


async def test_what_it_had_not_begun_is_its_own(
    engine: Engine, make: Make, client: redis.Redis
) -> None:
    """Between the note and the header there is nothing to carry on: the other drops the note. With
    the header it comes again, or the response would not be carried on if this gateway died now."""
    first, second = await make(), await make()
    held = first.wire.hold("XADD", "h")
    engine.device.hold()
    reader = Reader(first.port)
    reading = asyncio.create_task(reader.read())
    await held.is_reached.wait()
    assert client.scard(owned_key(first.store)) == 1
    beat = first.wire.hold("SET", lease_key(first.store))  # it would note what it owns
    await beat.is_reached.wait()
    await first.freeze(client)
    await until(lambda: client.scard(owned_key(first.store)) == 0)
    first.stop_standing_still()
    held.end()
    await taken_over(client, second)
    first.wake()
    engine.device.set_free()
    await check(reader, reading, second)


# -- gateways that leave ------------------------------------------------------------------------


async def _handed_over(
    engine: Engine,
    first: Gateway,
    second: Gateway,
    *,
    http: httpx.AsyncClient,
    client: redis.Redis,
) -> list[asyncio.Task[httpx.Response]]:
    """Who waits at a gateway that has handed its responses over, and reads what another runs: for a
    whole one; for the rest of one, and for what comes much later, which is silence."""
    engine.device.hold()
    whole = asyncio.create_task(http.post("/v1/responses", json={**BODY, "stream": False}))
    background = {**BODY, "stream": False, "background": True}
    begun = (await http.post("/v1/responses", json=background)).json()["id"]
    await until(lambda: len(owned(client, first.store)) == 2)
    response_ids = list(owned(client, first.store))
    await step_until(engine, lambda: all(num_deltas(client, each, 1) >= 3 for each in response_ids))
    resumes = [
        asyncio.create_task(
            http.get(f"/v1/responses/{begun}", params={"stream": "true", "starting_after": after})
        )
        for after in (4, 100)
    ]
    logs = [await first.log(each) for each in response_ids]
    await until(lambda: sum(len(log.readers) for log in logs) == 3)
    await first.run(first.store.hand_over())
    await until(lambda: len(owned(client, second.store)) == 2)

    async def have_moved() -> bool:
        return sum([len((await first.log(each)).readers) for each in response_ids]) == 3

    await until_found(have_moved)
    return [whole, *resumes]


async def test_who_waits_at_a_gateway_that_leaves_gets_the_rest(
    engine: Engine, make: Make, client: redis.Redis
) -> None:
    first, second = await make(), await make()
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        waiting = await _handed_over(engine, first, second, http=http, client=client)
        ending = asyncio.create_task(first.run(first.store.let_readers_end(PATIENCE_S)))
        engine.device.allow(10)
        await asyncio.sleep(0.5)  # some looks at whether they have ended
        assert not any(task.done() for task in (*waiting, ending))
        engine.device.set_free()
        whole, *resumes = await asyncio.gather(*waiting)
        assert whole.status_code == 200, whole.text
        assert whole.json()["status"] == "incomplete"
        for answer in resumes:
            assert "event: response.incomplete" in answer.text, answer.text[-500:]
        await ending
        late = await http.get(f"/v1/responses/{whole.json()['id']}", params={"stream": "true"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "response_moved")


async def test_who_waits_for_too_long_is_told_to_resume(
    engine: Engine, make: Make, client: redis.Redis
) -> None:
    first, second = await make(), await make()
    url = f"http://127.0.0.1:{first.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        waiting = await _handed_over(engine, first, second, http=http, client=client)
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
    await until(lambda: not owned(client, second.store))
