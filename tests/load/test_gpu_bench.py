"""The GPU bench end to end, on a CPU with tiny shapes: the same code.

In processes of their own: an interpreter of kernels has to be chosen before triton is imported, and
the script may not import what a GPU machine lacks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.load.gpu.command import main
from penstock.load.gpu.report import BARS, RESULTS, details

# The interpreter takes long, and on a busy machine many times as long.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
# Of what `penstock serve` needs, this is not on the machines that lend a GPU.
ABSENT = ("httptools", "msgpack", "orjson", "redis", "setproctitle", "starlette", "uvicorn",
          "websockets")  # fmt: skip
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
{{patch}}
from tests.support.gpu_small import main
sys.exit(main(sys.argv[1:]))
"""
SECTIONS = ("decode_attention", "prefill_attention", "block_sizes", "swap", "operations",
            "decode_step", "end_to_end")  # fmt: skip
CEILINGS = ("copy_bytes_per_s", "matmul_flop_per_s", "host_to_device_bytes_per_s",
            "device_to_host_bytes_per_s")  # fmt: skip


# The longest of the checks, which one run has done in full.
QUICK = """
from penstock.load.gpu import checks
checks.attention_checks = checks._quantized_products = checks._sampling = lambda bench: iter(())
"""


def command(*arguments: str, patch: str = "") -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(patch=patch), *arguments]


def run(*arguments: str, patch: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, patch=patch),
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )


def only_json(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a whole small run printed and wrote."""
    out, copies = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("copies")
    before = sorted(RESULTS.glob("*"))
    done = run("--budget-s", "1e6", "--out", str(out), OUT=str(copies))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(RESULTS.glob("*")) == before
    assert only_json(out) == only_json(copies)
    return done.stdout, only_json(out)


@pytest.mark.exhaustive
def test_every_kernel_is_checked_first(small):
    printed, data = small
    assert all(check["is_right"] for check in data["checks"].values())
    words = " ".join(data["checks"])
    for operation in ("decode attention", "prefill attention", "rotary_store_kv", "copy_blocks",
                      "gather_blocks", "scatter_blocks", "rms_norm", "activate_and_mul",
                      "sample_tokens", "linear, int4", "embedding, fp8"):  # fmt: skip
        assert operation in words
    assert printed.index("checks") < printed.index("ceilings") < printed.index("swap:")


@pytest.mark.exhaustive
def test_every_section_measures_every_cell(small):
    _, data = small
    assert set(data["ceilings"]) == set(CEILINGS)
    assert min(data["ceilings"].values()) > 0
    assert tuple(data["sections"]) == SECTIONS
    for section in data["sections"].values():
        assert section["rows"]
        assert section["notes"] == []
        assert section["seconds"] >= 0
    assert set(data["figures"]) == set(BARS)
    assert all(value > 0 for value in data["figures"].values())
    assert {judged["is_met"] for judged in data["bars"].values()} <= {True, False}


@pytest.mark.exhaustive
def test_a_small_run_says_that_it_measures_nothing(small):
    printed, data = small
    assert data["is_measurement"] is False
    assert data["is_complete"] is True
    assert "no measurement" in printed
    assert details(data) in printed
    assert {"device", "commit", "torch", "triton", "date"} <= data.keys()


@pytest.mark.exhaustive
def test_engine_and_hugging_face_give_the_same_tokens(small):
    rows = small[1]["sections"]["end_to_end"]["rows"]
    systems = [row["system"] for row in rows]
    assert systems == ["penstock", "generate, batch 1", "generate, batch 2", "generate, batch 4",
                       systems[4], "continuous batching"]  # fmt: skip
    assert "output lengths known" in systems[4]
    assert all(row["jobs"] == 4 and row["equal_outputs"] == 1.0 for row in rows)
    assert rows[0]["speedup"] == 1.0


@pytest.mark.exhaustive
def test_without_time_nothing_is_measured_and_that_is_said(tmp_path):
    done = run("--only", "decode_step,decode_attention", "--budget-s", "0",
               "--out", str(tmp_path), patch=QUICK)  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = only_json(tmp_path)
    assert list(data["sections"]) == ["decode_attention", "decode_step"]
    for section in data["sections"].values():
        assert section["rows"] == []
        assert "no time left for" in section["notes"][0]
    assert data["figures"]["decode_attention_of_copy"] is None
    assert data["bars"]["decode_attention_of_copy"]["is_met"] is None
    assert "not measured" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_a_killed_run_leaves_what_it_has_measured(tmp_path):
    process = subprocess.Popen(
        command("--out", str(tmp_path), patch=QUICK),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        data: dict[str, Any] = {}
        deadline_s = time.monotonic() + 240
        while len(data.get("ceilings", ())) < len(CEILINGS):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.01)
            # Whole at every moment, or not there yet.
            data = next((json.loads(path.read_text()) for path in tmp_path.glob("*.json")), {})
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    data = only_json(tmp_path)
    assert data["is_complete"] is False
    assert data["checks"]
    assert "the run did not end" in details(data)


WRONG = (
    """
from penstock.kernels import gpu_operations
found = gpu_operations.gpu_operation
def broken(name, module=None):
    launcher = found(name, module)
    return (lambda *args: 1.01 * launcher(*args)) if name == "rms_norm" else launcher
gpu_operations.gpu_operation = broken
"""
    + QUICK
)


@pytest.mark.exhaustive
def test_a_wrong_kernel_ends_it_before_anything_is_timed(tmp_path):
    done = run("--out", str(tmp_path), patch=WRONG)
    assert done.returncode == 1
    assert "nothing was timed" in done.stderr
    data = only_json(tmp_path)
    assert not all(check["is_right"] for check in data["checks"].values())
    assert data["ceilings"] == {}
    assert set(data["figures"].values()) == {None}


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sections_have_names(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "swap,nothing"])
    assert "nothing is none of decode_attention, prefill_attention" in capsys.readouterr().err
