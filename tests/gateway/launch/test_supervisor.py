"""What the supervisor says: its ready line, and why it cannot listen."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import SECTIONS
from penstock.engine.errors import ConfigError
from penstock.engine.settings.declaration import others_of, settings_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch import ray_engines
from penstock.gateway.launch.child import Child
from penstock.gateway.launch.ray_engines import environment_of
from penstock.gateway.launch.settings import engine_config, resolve_settings
from penstock.gateway.launch.supervisor import Supervisor, _listen, _listen_fault


@pytest.fixture
def settings() -> dict[str, Any]:
    return resolve_settings({"port": 0}, {})


def test_the_ready_line_names_page_api_and_dashboard(settings: dict[str, Any]) -> None:
    supervisor = Supervisor(settings, engine_config(settings))
    supervisor._children = [Child("the engine", "module", {}, ready={"device": "cpu"})]
    supervisor._children.append(
        Child("a gateway", "module", {}, ready={"formats": "calls <c>…", "place": "in /me"})
    )
    with _listen(settings) as listener:
        line = supervisor._ready_line(listener, 2.0)
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert re.search(r"https?://\S+", line)[0] == base_url  # type: ignore[index]
    assert line.startswith(f"penstock is ready at {base_url}  (chat page)")
    assert f"API: {base_url}/v1" in line
    assert f"dashboard: {base_url}/dashboard" in line
    assert "calls <c>…, chats are kept in /me, " in line
    assert "\n" not in line


def test_a_port_in_use_is_said_without_a_number_of_the_system(settings: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            _listen({**settings, "port": port})
    assert str(error.value) == (
        f"cannot listen on 127.0.0.1:{port}: port {port} is in use; try --port 0"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EACCES, "port 80 needs privileges; try one above 1023"),
        (errno.EADDRNOTAVAIL, "this machine has no address 192.0.2.1; try --host"),
        (errno.EMFILE, "many open files"),
    ],
)
def test_other_reasons(code: int, text: str) -> None:
    problem = OSError(code, "many open files")
    assert text in _listen_fault(problem, "192.0.2.1", 80)


def test_a_host_that_is_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot listen on no such host:0: ") as error:
        _listen({**settings, "host": "no such host"})
    assert "Errno" not in str(error.value)


def test_each_process_gets_what_it_needs(settings: dict[str, Any], tmp_path: Path) -> None:
    supervisor = Supervisor(settings, engine_config(settings))
    with _listen(settings) as listener:
        engine, gateway = supervisor._plan(tmp_path, listener)
    own = {each.key for each in settings_of(GatewayConfig)}
    assert set(gateway.values) == own | {*others_of(GatewayConfig)}
    assert set(engine.values["engine"]) == set(SECTIONS)
    for section, values in engine.values["engine"].items():
        assert set(values) == {item.name for item in fields(SECTIONS[section])}


def test_what_starts_engines_on_ray_gets_the_engines_settings(tmp_path: Path) -> None:
    given = {"port": 0, "ray_address": "auto", "discover": True, "redis_url": "redis://host",
             "max_num_seqs": 3, "max_replicas": 4, "api_key": ["secret"],
             "tls_cert": "c", "tls_key": "k", "tls_ca": "a"}  # fmt: skip
    settings = resolve_settings(given, {})
    with _listen(settings) as listener:
        ray, _ = Supervisor(settings, engine_config(settings))._plan(tmp_path, listener)
    assert environment_of(ray.values)["PENSTOCK_MAX_NUM_SEQS"] == "3"
    names = re.findall(r'settings\["(\w+)"\]', Path(ray_engines.__file__).read_text("utf-8"))
    assert set(names) <= set(ray.values)
    assert "api_key" not in ray.values
