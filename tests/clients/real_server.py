"""The real server with the demo model, one for all tests of the clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..system.processes import Served, serve

KEY = "sk-right"
KEY_OF_FEW = "sk-few"
KEYS = f"""
[[keys]]
key = "{KEY}"
tenant = "limited"

[tenants.limited]
requests_per_minute = 60

[[keys]]
key = "{KEY_OF_FEW}"
tenant = "few"

[tenants.few]
requests_per_minute = 20
"""


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serve("--dtype", "float32", log=log) as served:
        yield served


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that wants `KEY`, and lets it in sixty times a minute, or `KEY_OF_FEW`, and twenty."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.toml").write_text(KEYS)
    keys = str(folder / "keys.toml")
    with serve("--dtype", "float32", "--api-keys-file", keys, log=folder / "log") as served:
        yield served
