"""kill -9 of the engine and of the gateway while a model that has thought writes a tool's call: the
tool runs once, no event is lost or repeated, the log tells the same. Greedy, fp32.

Nothing else is as much under way then: ids are told, and half of the arguments. All other kinds of
events, and Redis: `tests/gateway/api/test_tool_loop.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.redis_server import RedisServer

from ..support.tool_loop import ToolLoop
from .paced_engine import Pace
from .processes import Served, children, serve, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.process_kills]

_BODY: dict[str, Any] = {"model": "demo", "reasoning": {"effort": "low"}, "temperature": 0}
_AMID = ("response.function_call_arguments.delta", "function_call")
_NUM_LEFT = 3  # tokens of the call that are not written when something is killed: its end


class Stack:
    """A server, whose processes can be killed."""

    def __init__(self, served: Served, pace: Pace) -> None:
        self._served = served
        self.pace = pace

    def loop(self) -> ToolLoop:
        return ToolLoop(self._served.base_url, _BODY)

    async def kill(self, name: str) -> None:
        """Kill a process, and wait for its successor."""
        killed = self._served.child(name)
        killed.kill()
        self.pace.set_free()
        await asyncio.to_thread(self._wait_for_successor, killed, name)

    def _wait_for_successor(self, killed: psutil.Process, name: str) -> None:
        wait_until(lambda: killed not in children(self._served.process, name))
        wait_until(lambda: bool(children(self._served.process, name)))
        wait_until(self._served.is_ready)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("tools")
    # What is killed, and not the machine, loses nothing by it.
    with RedisServer(path / "redis", options={"appendfsync": "no"}) as redis:
        flags = ("--dtype", "float32", "--redis-url", redis.url, "--redis-patience-ms", "20000")
        pace = Pace(path / "pace")
        with serve(*flags, log=path / "log", command=pace.command) as served:
            yield Stack(served, pace)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> ToolLoop:
    loop = stack.loop()
    asyncio.run(loop.run())
    asyncio.run(loop.check())
    return loop


@pytest.mark.parametrize("name", ["penstock-engine", "penstock-gateway"])
@pytest.mark.exhaustive
async def test_a_process_is_killed(stack: Stack, undisturbed: ToolLoop, name: str) -> None:
    num_tokens = undisturbed.outcome[0]["usage"]["output_tokens"]
    stack.pace.allow(num_tokens - _NUM_LEFT)
    loop = stack.loop()
    await loop.run(_AMID, lambda: stack.kill(name))
    assert loop.outcome == undisturbed.outcome
    await loop.check()
