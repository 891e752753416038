"""A loop that thinks, calls a tool and answers is disturbed at every kind of event: the tool runs
once, no event is lost or repeated, the log tells the same.

An undisturbed loop says after how many steps of the engine each kind was read. In each other loop
the engine says so much and waits: the answer is not over when the disturbance comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines import engine_link

from ...clients.cutting_proxy import CuttingProxy
from ...redis_server import RedisServer
from ...support.tool_loop import CALLED, Kind, ToolLoop
from ..conftest import PATIENCE_S, Serve, until
from ..fake_engine import FakeEngine
from ..standing_still import Gateway

pytestmark = pytest.mark.redis

_FORMATS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
_CALL = (
    "<think>\nTo add.\n</think>\n\nLet me see.\n<tool_call>\n"
    f'{{"name": "calculator", "arguments": {{"expression": "{CALLED}"}}}}\n</tool_call>'
)
_ANSWER = "<think>\nSo.\n</think>\n\nIt is 4711."
_STEP_S = 0.004  # of the undisturbed loop, so that its kinds come apart
_NUM_KINDS = 20  # of events, of thoughts, a message and a call

Disturb = Callable[[], Awaitable[None]]


@dataclass
class Stage:
    """Where loops run: what leads to a gateway, and the engine behind it.

    Attributes:
        num_steps: of the engine, until each kind was read in an undisturbed loop.
    """

    base_url: str
    engine: FakeEngine
    tokenizer: Tokenizer
    num_steps: dict[Kind, int] = field(default_factory=dict)

    def loop(self) -> ToolLoop:
        self.engine.script = self.tokenizer.encode(_CALL)

        def answer() -> None:
            self.engine.script = self.tokenizer.encode(_ANSWER)

        return ToolLoop(self.base_url, {"model": "tiny"}, on_call=answer)

    async def undisturbed(self) -> ToolLoop:
        loop, num_before = self.loop(), self._num_said

        def note(kind: Kind) -> None:
            self.num_steps[kind] = self._num_said - num_before

        self.engine.step_s = _STEP_S
        await loop.run(on_kind=note)
        self.engine.step_s = 0.0
        await loop.check()
        assert len(loop.kinds) == _NUM_KINDS
        return loop

    async def disturbed(self, kind: Kind, disturb: Disturb) -> ToolLoop:
        loop, speak = self.loop(), self.engine.may_speak
        self.engine.holds_in = self.num_steps[kind]
        if not self.num_steps[kind]:
            speak.clear()

        async def disturb_and_speak() -> None:
            self.engine.holds_in = None
            speak.clear()  # it still speaks if the undisturbed loop was read late, and counted more
            await disturb()
            speak.set()

        async with asyncio.timeout(PATIENCE_S):
            await loop.run(kind, disturb_and_speak)
            await loop.check()
        await until(lambda: not self.engine.num_running)
        return loop

    @property
    def _num_said(self) -> int:
        return sum(self.engine.num_steps.values())


async def _disturb_at_every_kind(stage: Stage, disturb: Disturb) -> None:
    undisturbed = await stage.undisturbed()
    for kind in undisturbed.kinds:
        loop = await stage.disturbed(kind, disturb)
        assert loop.outcome == undisturbed.outcome, kind


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own. What is killed, and not the machine, loses nothing by it."""
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        yield server


@contextlib.asynccontextmanager
async def _one_gateway(serve: Serve, redis: RedisServer) -> AsyncIterator[Stage]:
    patient = {"redis_url": redis.patient_url, "redis_patience_ms": 1000 * PATIENCE_S}
    async with serve(**_FORMATS, **patient) as served:
        yield Stage(f"http://127.0.0.1:{served.port}", served.engine, served.tokenizer)


async def test_the_engine_dies(
    serve: Serve, redis: RedisServer, patient_logs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 50 * PATIENCE_S)
    async with _one_gateway(serve, redis) as stage:

        async def kill() -> None:
            stage.engine.kill()
            stage.engine.restart()

        await _disturb_at_every_kind(stage, kill)
        assert stage.engine.num_deaths == _NUM_KINDS


@pytest.mark.exhaustive
async def test_redis_loses_its_connections(
    serve: Serve, redis: RedisServer, patient_logs: object
) -> None:
    async with _one_gateway(serve, redis) as stage:

        async def cut() -> None:
            with redis.client() as client:
                assert client.execute_command("CLIENT KILL TYPE normal") > 0

        await _disturb_at_every_kind(stage, cut)


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_redis_is_killed(serve: Serve, redis: RedisServer, patient_logs: object) -> None:
    async with _one_gateway(serve, redis) as stage:

        async def kill() -> None:
            redis.kill()
            await asyncio.to_thread(redis.start)

        await _disturb_at_every_kind(stage, kill)


# -- a gateway is gone, and another goes on ------------------------------------------------------


@pytest.fixture
def config(model_path: Path, redis: RedisServer, tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(
        engine_address=f"{tmp_path}/engine.sock",
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
        redis_url=redis.patient_url,
        redis_patience_ms=1000 * PATIENCE_S,
        **_FORMATS,
    )


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.exhaustive
async def test_a_gateway_is_gone_and_another_goes_on(
    config: GatewayConfig,
    redis: RedisServer,
    tokenizer: Tokenizer,
    stack: contextlib.ExitStack,
) -> None:
    """Its clients lose their connections, its lease runs out, and it comes back when the other one
    has brought the loop to its end: then it is the other one's turn to be gone."""
    async with FakeEngine(config.engine_address, tokenizer.encode(_CALL)) as engine:
        gateways = [Gateway(config) for _ in range(2)]
        for gateway in gateways:
            await asyncio.to_thread(stack.enter_context, gateway)
        proxy = stack.enter_context(CuttingProxy(gateways[0].base_url, None))
        client = stack.enter_context(redis.client())
        stage = Stage(proxy.url, engine, tokenizer)
        undisturbed = await stage.undisturbed()

        def look(gateway: Gateway) -> None:
            """Have it renew its lease, and look at those of others, now."""
            client.xadd(gateway.control, {"look": ""})

        async def lose() -> None:
            gone, other = gateways
            gone.stand_still()
            proxy.upstream_url = other.base_url
            proxy.cut_all()
            client.delete(gone.lease)
            look(other)

        for kind in undisturbed.kinds:
            loop = await stage.disturbed(kind, lose)
            assert loop.outcome == undisturbed.outcome, kind
            gone = gateways[0]
            gone.go_on()
            look(gone)
            await until(lambda gone=gone: client.exists(gone.lease))  # type: ignore[misc]
            gateways.reverse()
