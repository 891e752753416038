"""The manifest for Kubernetes against what the command line, the server and its metrics have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import ENGINE_SETTINGS, SERVE_SETTINGS, resolve_settings
from penstock.gateway.telemetry.engine_metrics import EngineCollector

_PAGE = Path(__file__).parents[3] / "gateway" / "kubernetes.yaml"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], Object]:
    found = list(yaml.safe_load_all(_PAGE.read_text("utf-8")))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def _pod(objects: dict[tuple[str, str], Object], name: str) -> tuple[Object, Object]:
    """The pod's specification, and its container's."""
    pod = objects["Deployment", name]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def _settings(container: Object) -> dict[str, Any]:
    """What the command line says that its pod runs."""
    assert container["command"] == ["penstock"]
    parsed = vars(_parser().parse_args(container["args"]))
    flags = ENGINE_SETTINGS if container["args"][0] == "engine" else SERVE_SETTINGS
    environment = {"PENSTOCK_REDIS_URL": "redis://redis", "PENSTOCK_API_KEY": "k"}
    return resolve_settings(parsed, environment, settings=flags)


def test_gateways_and_engines_find_each_other(objects: dict[tuple[str, str], Object]) -> None:
    _, engine = _pod(objects, "penstock-engine")
    _, gateway = _pod(objects, "penstock-gateway")
    its, theirs = _settings(engine), _settings(gateway)
    service = objects["Service", "penstock-engines"]["spec"]
    assert service["clusterIP"] == "None"
    (port,) = service["ports"]
    (open_port,) = engine["ports"]
    assert port["targetPort"] == open_port["name"]
    assert its["listen"].rpartition(":")[2] == str(open_port["containerPort"])
    assert theirs["engine"] == [f"penstock-engines:{port['port']}"]
    assert theirs["tls_server_name"] == "penstock-engines"
    assert its["model"] == theirs["model"]
    assert its["served_model_name"] == theirs["served_model_name"]
    (open_port,) = gateway["ports"]
    (port,) = objects["Service", "penstock"]["spec"]["ports"]
    assert theirs["port"] == open_port["containerPort"]
    assert port["targetPort"] == open_port["name"]


def test_selectors_volumes_and_secrets_fit(objects: dict[tuple[str, str], Object]) -> None:
    for (kind, name), each in objects.items():
        if kind == "Deployment":
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels
            pod, container = _pod(objects, name)
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
            settings = _settings(container)
            for key in ("tls_cert", "tls_key", "tls_ca"):
                assert str(Path(settings[key]).parent) == mounts["tls"]
            assert settings["model"].startswith(mounts["models"])
        elif kind == "Service":
            selected = objects["Deployment", each["spec"]["selector"]["app"]]
            assert selected["spec"]["selector"]["matchLabels"] == each["spec"]["selector"]


def test_pods_have_time_to_hand_their_streams_over(objects: dict[tuple[str, str], Object]) -> None:
    for name, times in (("penstock-engine", 1), ("penstock-gateway", 2)):
        pod, container = _pod(objects, name)
        grace_s = _settings(container)["shutdown_grace_s"]
        assert pod["terminationGracePeriodSeconds"] > times * grace_s + 8


def test_probes_ask_what_there_is(objects: dict[tuple[str, str], Object]) -> None:
    from penstock.gateway.api.status import routes

    _, gateway = _pod(objects, "penstock-gateway")
    annotations = objects["Deployment", "penstock-gateway"]["spec"]["template"]["metadata"]
    asked = {
        gateway["readinessProbe"]["httpGet"]["path"],
        annotations["annotations"]["prometheus.io/path"],
    }
    there = set(re.findall(r'"GET (/\w+)"', Path(routes.__file__).read_text("utf-8")))
    assert asked <= there
    port = annotations["annotations"]["prometheus.io/port"]
    assert port == str(gateway["ports"][0]["containerPort"])


def _queries(scaled: Object) -> Iterator[str]:
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert float(trigger["metadata"]["threshold"]) > 0
        yield trigger["metadata"]["query"]


def test_engines_are_scaled_by_metrics_that_there_are(
    objects: dict[tuple[str, str], Object],
) -> None:
    scaled = objects["ScaledObject", "penstock-engine"]
    assert ("Deployment", scaled["spec"]["scaleTargetRef"]["name"]) in objects
    client = EnginePool("/a", "/b")
    samples = [
        sample for family in EngineCollector(client, "m").collect() for sample in family.samples
    ]
    labels = {sample.name: set(sample.labels) for sample in samples}
    for query in _queries(scaled):
        (name,) = re.findall(r"penstock:\w+", query)
        (by,) = re.findall(r"by \((\w+)\)", query)
        assert by in labels[name]
