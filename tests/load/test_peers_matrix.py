"""The matrix itself: a real server of ours, and rivals that stand in for the real ones."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.load.client.records import Dialogue, StreamRecord, Turn
from penstock.load.peers import environments, matrix, models, workloads
from penstock.load.peers.environments import Environment, InstallError
from penstock.load.peers.matrix import Matrix
from penstock.load.peers.report import counts
from penstock.load.peers.rivals import RIVALS, Rival, Running, Setting
from penstock.load.peers.workloads import Workload
from penstock.load.workloads.driver import RunResult

from ..engine.model_files.gguf.written import convert
from ..system.processes import wait_gone


@pytest.fixture(autouse=True)
def _own_build(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests goes to the build folder of the checkout."""
    build = tmp_path_factory.getbasetemp() / "peers"
    monkeypatch.setattr(environments, "BUILD", build)
    monkeypatch.setattr(models, "MODELS", build / "models")
    monkeypatch.setattr("penstock.load.peers.rivals.BUILD", build)


class Scripted:
    """A rival whose speeds are given: tokens per second by setting, for each round."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = speeds
        self.settings = [Setting(name=name) for name in speeds]
        self.log: list[str] = []

    def prepare(self, model: str) -> str:
        if not self.speeds:
            raise InstallError("no such wheel")
        return "0"

    @contextlib.contextmanager
    def started(self, model: str, setting: Setting) -> Iterator[Running]:
        self.log.append(setting.name)
        if not self.speeds[setting.name]:
            raise ConfigError("it ended with 1")
        yield Running(psutil.Process(), 0.1, self.measure)
        self.log.append("stop")

    def measure(self, workload: Workload) -> RunResult:
        took_s = sum(turn.max_tokens for turn in workload.turns) / self.speeds[self.log[-1]]
        records = [
            StreamRecord(dialogue=index, scheduled_s=0.0, sent_s=0.0, ended_s=took_s)
            for index in range(len(workload.dialogues))
        ]
        for record, dialogue in zip(records, workload.dialogues, strict=True):
            record.event_times_s = [took_s / 2, took_s]
            record.output_tokens = dialogue.turns[0].max_tokens
        return RunResult(records=records, began_s=0.0, ended_s=took_s, client_cpu_s=0.0)


def run(rivals: Mapping[str, Any], out: Path, *, repeats: int = 1) -> dict[str, Any]:
    running = Matrix.begin("bf16", rivals, out)
    running.prepare(["T"])
    running.run("T", ["single"], repeats)
    return running.data


def test_rounds_alternate_and_keep_the_setting_that_was_best(tmp_path: Path) -> None:
    rival = Scripted(slow=40.0, fast=80.0, broken=0)
    data = run({"penstock": Scripted(default=100.0), "vllm": rival}, tmp_path, repeats=2)
    seen = [(each["system"], each["setting"], each["round"]) for each in data["observations"]]
    assert seen == [
        ("penstock", "default", 0), ("vllm", "slow", 0), ("vllm", "fast", 0),
        ("penstock", "default", 1), ("vllm", "fast", 1),
    ]  # fmt: skip
    assert rival.log.count("stop") == 3
    assert [failure["reason"] for failure in data["failures"]] == ["it ended with 1"]
    data = json.loads(next(tmp_path.glob("*-peers.json")).read_text("utf-8"))
    ratios = {cell["system"]: cell["ratio_to_penstock"] for cell in data["cells"]}
    assert ratios == {"penstock": 1.0, "vllm": pytest.approx(0.8)}


def test_who_cannot_be_installed_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    data = run({"penstock": Scripted(default=100.0), "hf": Scripted()}, tmp_path)
    assert data["unavailable"] == {"hf": "no such wheel"}
    assert [each["system"] for each in data["observations"]] == ["penstock"]


@pytest.mark.exhaustive
def test_our_server_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Workload("single", 1, (Dialogue(turns=(Turn(text=(500, 501), max_tokens=8),)),))
    monkeypatch.setattr(workloads, "make", lambda *_: tiny)
    [single] = run({"penstock": RIVALS["bf16"][0]}, tmp_path)["observations"]
    assert counts(single)
    assert single["idle_memory_bytes"] > 1 << 20
    assert {"penstock-engine", "penstock-gateway"} <= single["cpu_s_per_1k_tokens"].keys()


def rival_of(code: str) -> Rival:
    """A server that is a program of ours; it gets its port."""
    program = shlex.join([sys.executable, "-c", code])
    return Rival(name="penstock", distribution="penstock-llm", command=f"{program} {{port}}")


def test_a_server_that_ends_is_reported_with_its_last_words() -> None:
    rival = rival_of("print('out of luck'); raise SystemExit(3)")
    with (
        pytest.raises(ConfigError, match=r"(?s)ended with 3.*out of luck"),
        rival.started("T", Setting()),
    ):
        pytest.fail("it started")


def test_a_server_is_stopped_with_its_children() -> None:
    rival = rival_of(
        "import http.server, subprocess, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    with rival.started("T", Setting()) as running:
        [child] = running.process.children()
    assert not running.process.is_running()
    wait_gone([child])


def test_a_failed_step_of_an_installation_says_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "BUILD", tmp_path)
    code = "print('wheel not found'); raise SystemExit(1)"
    with pytest.raises(InstallError, match="wheel not found"):
        Environment("x").run(sys.executable, "-c", code, cwd=tmp_path)


def test_flags_choose_systems_and_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--systems", "nobody"])
    assert "nobody" in capsys.readouterr().err


@pytest.fixture
def _signals() -> Iterator[None]:
    """What `main` does to them ends with the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_signals")
def test_files_are_served_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's tokens count where it is what takes the time."""
    file = tmp_path / "demo.Q8_0.gguf"
    convert(DEMO_MODEL_PATH, file, lambda _: "Q8_0")
    monkeypatch.setattr(models, "_IDS_OF_FILES", range(500, 1000))
    arguments = ["--systems", "penstock", "--workloads", "single", "prefill", "--repeats", "1"]
    assert matrix.main(["--files", str(file), *arguments, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.glob("*-peers-gguf.json")
    single, prefill = json.loads(path.read_text("utf-8"))["observations"]
    assert single["model"] == file.name
    assert counts(single)
    assert prefill["output_tokens_per_s"] > 1000 / prefill["ttft_ms_p50"]


def test_files_have_not_all_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--files", str(tmp_path / "x.gguf"), "--workloads", "front128"])
    assert "--workloads: files have none of front128" in capsys.readouterr().err
