"""An engine's end of the wire, and who connects to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.protocol import sockets

from .stack import INFO, Connect, Engine, Gateway

BEAT_S = 0.05
# That a gateway may let pass: here none sends any, and a slow machine takes its time.
NUM_SILENT_BEATS = 10_000


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(sockets, "HEARTBEAT_INTERVAL_S", BEAT_S)
    monkeypatch.setattr(sockets, "MAX_SILENT_BEATS", NUM_SILENT_BEATS)
    with Engine(f"{tmp_path}/e.sock") as running:
        yield running


@pytest.fixture
def connect(engine: Engine) -> Iterator[Connect]:
    """Makes gateways, and closes their sockets at the end."""
    gateways: list[Gateway] = []

    def make(*, says_hello: bool = True) -> Gateway:
        gateways.append(Gateway(engine.address))
        if says_hello:
            assert gateways[-1].hello() == INFO
        return gateways[-1]

    yield make
    for gateway in gateways:
        gateway.socket.close()
