"""An event loop whose time a test moves: silence without waiting, on a machine of any speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.load.client import integrity, sse, websocket


class ManualLoop(asyncio.SelectorEventLoop):
    """Sockets are real, time stands still."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


async def until(condition: Callable[[], object]) -> None:
    """For what needs no time."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def play(
    monkeypatch: pytest.MonkeyPatch, test: Callable[[ManualLoop], Coroutine[Any, Any, None]]
) -> None:
    """Run a test on such a loop, by whose time the client goes too."""
    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ManualLoop)
        for module in (integrity, sse, websocket):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=loop.time))
        runner.run(test(loop))
