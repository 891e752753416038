"""What the tests of the clients share: a stub server."""

from collections.abc import Iterator

import pytest

from .real_server import keyed_server, real_server  # noqa: F401 (fixtures)
from .stub_server import StubServer, running


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running(StubServer()) as server:
        yield server


@pytest.fixture
def keyed_stub() -> Iterator[StubServer]:
    with running(StubServer(api_key="sk-right")) as server:
        yield server
