"""Gateways that can stand still, to whom looks at them as if they were dead."""

from __future__ import annotations

import asyncio
import threading

from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from .conftest import PATIENCE_S, listen, patient_log_settings


class Gateway:
    """A gateway in a thread of its own, which can stand still: who looks at it finds it dead."""

    def __init__(self, config: GatewayConfig) -> None:
        self._app = create_app(config, log_settings=patient_log_settings())
        self._config = config
        self._port = 0
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self._is_still, self._may_go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def lease(self) -> str:
        """Its key in Redis, which is there while it lives."""
        return f"penstock:lease:{self._app.state.log_store.gateway_id}"

    @property
    def control(self) -> str:
        """The stream of what it is told."""
        return f"penstock:control:{self._app.state.log_store.gateway_id}"

    def __enter__(self) -> Gateway:
        self._thread.start()
        assert self._is_ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_go_on.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def stand_still(self) -> None:
        self._is_still.clear()
        self._may_go_on.clear()
        self._loop.call_soon_threadsafe(self._stand_still)
        assert self._is_still.wait(PATIENCE_S)

    def go_on(self) -> None:
        self._may_go_on.set()

    def _stand_still(self) -> None:
        self._is_still.set()
        assert self._may_go_on.wait(2 * PATIENCE_S)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with listen(self._app, self._config) as self._port:
            self._is_ready.set()
            while not self._is_over.is_set():  # noqa: ASYNC110  (another thread's)
                await asyncio.sleep(0.01)
