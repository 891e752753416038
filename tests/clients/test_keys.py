"""The Python client and the terminal chat at a server that asks for a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.clients import (
    AuthenticationError,
    Client,
    PenstockError,
    RateLimitError,
    RetryPolicy,
)

from ..system.processes import Served, serve
from .cutting_proxy import CuttingProxy
from .terminal import ASKED, TOLD, Piped

KEY = "sk-right"
KEY_OF_FEW = "sk-few"
KEYS = f"""
[[keys]]
key = "{KEY}"
tenant = "many"

[tenants.many]

[[keys]]
key = "{KEY_OF_FEW}"
tenant = "few"

[tenants.few]
requests_per_minute = 2
"""
COUNT: dict[str, Any] = {"model": "demo", "input": "Count to 5.", "temperature": 0}


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that asks for `KEY`, or for `KEY_OF_FEW`, which it lets in twice a minute."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    flags = ("--dtype", "float32", "--api-keys-file", str(keys))
    with serve(*flags, log=folder / "log") as served:
        yield served


class _WaitError(Exception):
    """Instead of waiting."""


@pytest.mark.exhaustive
def test_a_quota_is_waited_for_as_long_as_the_server_says(keyed_server: Served) -> None:
    waits: list[tuple[PenstockError, float]] = []

    def note(*told: Any) -> None:
        waits.append(told)
        raise _WaitError

    policy = RetryPolicy(on_wait=note)
    one = COUNT | {"max_output_tokens": 1}
    with Client(keyed_server.base_url, api_key=KEY_OF_FEW, retries=policy) as client:
        for _ in range(2):
            client.responses.create(**one)
        with pytest.raises(_WaitError):
            client.responses.create(**one)
    ((error, wait_s),) = waits
    assert isinstance(error, RateLimitError)
    assert wait_s == pytest.approx(float(error.headers["retry-after-ms"]) / 1000)


def test_the_client_says_when_a_key_is_wrong(keyed_server: Served) -> None:
    for key in (None, "sk-wrong"):
        with Client(keyed_server.base_url, api_key=key) as client, client.connect() as socket:
            with pytest.raises(AuthenticationError):
                client.models.list()
            with pytest.raises(AuthenticationError):
                socket.create(**COUNT)


def test_the_chat_says_when_a_key_or_a_model_is_wrong(keyed_server: Served) -> None:
    url = keyed_server.base_url
    assert "refused (HTTP 401)" in Piped(["hi"], url).complaints
    assert "refused (HTTP 401)" in Piped(["hi"], url, api_key="sk-wrong").complaints
    assert "Orlan" in Piped([TOLD], url, api_key=KEY, model="demo").output
    wrong = Piped(["hi"], url, api_key=KEY, model="other")
    assert wrong.exit_code == 1
    assert "does not offer the model 'other' (it offers: demo)" in wrong.complaints


def test_the_chat_says_when_a_conversation_is_lost(
    demo_server: Served, keyed_server: Served
) -> None:
    """The server that answers in the end does not know what another one was told."""
    with CuttingProxy(demo_server.base_url, None) as proxy:

        def lines() -> Iterator[str]:
            yield TOLD
            yield "/branch"
            proxy.upstream_url = keyed_server.base_url
            proxy.cut_all()
            yield ASKED
            yield ASKED

        done = Piped(lines(), proxy.url, api_key=KEY)
    first, outline, last = done.output.splitlines()
    assert "Orlan" in first
    assert outline.startswith("*  1")
    assert "Orlan" not in last
    assert "no longer has this conversation" in done.complaints
