"""The GPU bench end to end, on a CPU with tiny shapes: the same code.

In processes of their own: an interpreter of kernels has to be chosen before triton is imported, and
the script may not import what a GPU machine lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.protocol.messages import EngineInfo
from penstock.kernels.gpu import measuring
from penstock.kernels.gpu.measuring import Timer
from penstock.load.gpu.__main__ import main
from penstock.load.gpu.bench import BARS, Bench, full_sizes
from penstock.load.gpu.sections import causal_flop, roofline_s

from ..support.gpu_small import small_sizes

# The interpreter takes long, and on a busy machine many times as long.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
# Of what `penstock serve` needs, this is not on the machines that lend a GPU.
ABSENT = ("httptools", "msgpack", "orjson", "redis", "setproctitle", "starlette", "uvicorn",
          "websockets")  # fmt: skip
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
from tests.support.gpu_small import main
sys.exit(main(sys.argv[1:]))
"""
SECTIONS = ("decode_attention", "prefill_attention", "swap", "decode_step")
CEILINGS = ("copy_bytes_per_s", "matmul_flop_per_s", "host_to_device_bytes_per_s",
            "device_to_host_bytes_per_s")  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *arguments]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
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
    done = run("--out", str(out), OUT=str(copies))
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_json(out) == only_json(copies)
    return done.stdout, only_json(out)


@pytest.mark.exhaustive
def test_every_section_measures_every_cell(small):
    printed, data = small
    assert set(data["ceilings"]) == set(CEILINGS)
    assert min(data["ceilings"].values()) > 0
    assert tuple(data["rows"]) == SECTIONS
    assert data["notes"] == []
    assert set(data["figures"]) == set(BARS)
    assert all(value > 0 for value in data["figures"].values())
    assert (data["is_measurement"], data["is_complete"]) == (False, True)
    assert all(bar.meaning in printed for bar in BARS.values())
    assert {"device", "commit", "torch", "triton", "date"} <= data.keys()


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sections_have_names(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "swap", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


# -- figures --------------------------------------------------------------------------------------


def bench(path: Path | None = None, **changes: Any) -> Bench:
    about = {"device": "H200"}
    paths = [path] if path else ()
    device = torch.device("cpu")
    return Bench(device=device, sizes=small_sizes(), about=about, paths=paths, **changes)


def test_a_figure_is_the_worst_of_all_its_cells(tmp_path):
    path = tmp_path / "made" / "run.json"
    results = bench(path)
    results.conclude("swap_of_pinned_copy", [0.9, 0.84, 0.95])
    results.conclude("paged_over_contiguous", [1.01, 1.04, 0.99])
    results.add_ceiling("copy_bytes_per_s", 4e12)
    results.add_row("swap", {"direction": "out", "bytes_per_s": 5.1e10})
    data = json.loads(path.read_text())  # on disk at once
    assert data["figures"]["swap_of_pinned_copy"] == 0.84
    assert data["figures"]["paged_over_contiguous"] == 1.04
    assert data["rows"] == {"swap": [{"direction": "out", "bytes_per_s": 5.1e10}]}
    text = results.markdown()
    assert "the run did not end" in text
    assert "4,000.0 GB/s" in text
    assert "51.0 GB/s" in text
    (missed,) = [line for line in text.splitlines() if line.startswith("| swap, bytes/s")]
    assert [cell.strip() for cell in missed.split("|")[2:5]] == ["0.840", "≥ 0.85", "**no**"]


def test_bars_are_those_of_the_design():
    bounds = {name: (bar.bound, bar.is_upper) for name, bar in BARS.items()}
    assert bounds == {
        "decode_attention_of_copy": (0.85, False),
        "paged_over_contiguous": (1.05, True),
        "prefill_attention_of_matmul": (0.5, False),
        "decode_step_of_roofline": (0.75, False),
        "swap_of_pinned_copy": (0.85, False),
    }
    sizes = full_sizes()  # a card is measured on what its bars speak of
    assert sizes.attention.batches == (32, 64, 128)
    assert sizes.attention.contexts == (1024, 4096, 16384)
    assert (sizes.attention.long_context, sizes.attention.bar_prefill) == (4096, 8192)
    assert sizes.decode.batches == (1, 4, 16, 64)


def test_the_roofline_of_an_8b_llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(full_sizes().model))
    # 32 layers of 4096 × (2 × 4096 + 2 × 1024) + 3 × 4096 × 14336, and the head.
    weights = 32 * (4096 * 10240 + 3 * 4096 * 14336) + 4096 * 128256
    assert weights == 7_504_658_432
    info = EngineInfo(
        model="", model_path=str(tmp_path), max_model_len=1, vocab_size=1, num_blocks=1,
        block_size=16, num_host_blocks=0, max_num_seqs=1, scheduling_policy="fcfs",
        dtype="bfloat16", device="cuda", eos_token_ids=(), pid=1, bytes_per_block=16 * 131_072,
    )  # fmt: skip
    seconds = roofline_s(info, batch=64, context=1056.0, bytes_per_s=4e12)
    assert seconds == pytest.approx((2 * weights + 64 * 1056 * 131_072) / 4e12)
    assert full_sizes().attention.kv_bytes_per_token == 2 * 8 * 128 * 2
    assert causal_flop(full_sizes().attention, 3) == 4 * 32 * 128 * 6


def test_the_timer_gives_the_median_of_warm_calls(monkeypatch):
    clock, durations_s = [0.0], iter([0.2, 0.02, 0.001, 0.03])  # the first only warms up

    def call() -> None:
        clock[0] += next(durations_s)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    timer = Timer(torch.device("cpu"), flush_bytes=1024, num_repeats=3)
    assert timer.median_s(call) == pytest.approx(0.02)
