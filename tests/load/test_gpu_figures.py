"""The GPU bench's arithmetic against numbers worked out by hand, and what is said of them."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.models.loader import load_model
from penstock.engine.transport.messages import EngineInfo
from penstock.load.gpu import bench as gpu_bench
from penstock.load.gpu import report
from penstock.load.gpu.bench import Bench, Timer, full_sizes
from penstock.load.gpu.decode_step import roofline_s
from penstock.load.gpu.end_to_end import run_static
from penstock.load.gpu.model import (
    Job,
    batches,
    by_output,
    by_prompt,
    checkpoint,
    kv_shape,
    make_jobs,
    num_weights_read,
)
from penstock.load.gpu.report import BARS, Results
from penstock.load.workloads.lengths import TraceSpec

from ..support.gpu_small import small_sizes

ABOUT = {
    "is_measurement": True, "device": "NVIDIA H200", "date": "2026-11-22", "commit": "abc",
    "torch": "2.11", "triton": "3.6",
}  # fmt: skip


def results(*paths: Path) -> Results:
    return Results(about=ABOUT, paths=paths)


def bench(**changes: Any) -> Bench:
    device = torch.device("cpu")
    return Bench(device=device, sizes=small_sizes(), results=results(), **changes)


# -- figures ----------------------------------------------------------------------------------


def test_a_figure_is_the_worst_of_its_cells():
    share, ratio = BARS["decode_attention_of_copy"], BARS["paged_over_contiguous"]
    assert share.worst([0.9, 0.86, 1.0]) == 0.86
    assert ratio.worst([1.01, 1.04, 0.99]) == 1.04


def test_bars_are_those_of_the_design():
    bounds = {name: (bar.bound, bar.is_upper) for name, bar in BARS.items()}
    assert bounds == {
        "decode_attention_of_copy": (0.85, False),
        "paged_over_contiguous": (1.05, True),
        "prefill_attention_of_matmul": (0.5, False),
        "decode_step_of_roofline": (0.75, False),
        "swap_of_pinned_copy": (0.85, False),
        "speedup_over_hf_generate": (24.0, False),
    }
    assert BARS["paged_over_contiguous"].is_met(1.05)
    assert not BARS["paged_over_contiguous"].is_met(1.06)
    assert BARS["swap_of_pinned_copy"].is_met(0.85)
    assert not BARS["swap_of_pinned_copy"].is_met(0.84)


def test_a_figure_of_only_some_of_its_cells_is_none():
    here = bench()
    here.conclude("swap_of_pinned_copy", [0.9, 0.95], num_cells=3)
    assert here.results.figures["swap_of_pinned_copy"] is None
    here.conclude("swap_of_pinned_copy", [0.9, 0.95], num_cells=2)
    assert here.results.figures["swap_of_pinned_copy"] == 0.9


def test_nan_is_a_wrong_result_and_still_json(tmp_path):
    path = tmp_path / "made" / "run.json"
    found = results(path)
    assert found.add_check("near", error=0.1, bound=0.1)
    assert not found.add_check("far", error=0.2, bound=0.1)
    assert not found.add_check("unwritten", error=math.nan, bound=0.1)
    assert not found.add_check("too large", error=math.inf, bound=0.1)
    checks = json.loads(path.read_text())["checks"]
    assert [check["is_right"] for check in checks.values()] == [True, False, False, False]
    assert checks["unwritten"]["error"] is None
    (row,) = [
        line
        for line in report.details(found.as_json()).splitlines()
        if line.startswith("| unwritten ")
    ]
    assert "not finite" in row


def test_what_was_added_is_on_disk_at_once(tmp_path):
    path = tmp_path / "run.json"
    found = results(path)
    found.add_ceiling("copy_bytes_per_s", 4e12)
    found.add_figure("decode_attention_of_copy", 0.9)
    found.add_row("attention", {"batch": 32})
    found.add_note("attention", "a note")
    data = json.loads(path.read_text())
    assert data["ceilings"] == {"copy_bytes_per_s": 4e12}
    assert data["figures"]["decode_attention_of_copy"] == 0.9
    assert data["figures"]["swap_of_pinned_copy"] is None
    assert data["bars"]["decode_attention_of_copy"] == {"at_least": 0.85, "is_met": True}
    assert data["bars"]["paged_over_contiguous"] == {"at_most": 1.05, "is_met": None}
    assert data["sections"] == {"attention": {"rows": [{"batch": 32}], "notes": ["a note"]}}
    assert data["is_complete"] is False
    assert {**ABOUT, **data} == data
    found.end()
    assert json.loads(path.read_text())["is_complete"] is True


# -- their arithmetic -------------------------------------------------------------------------


def test_a_step_reads_all_weights_but_the_embedding():
    with checkpoint(small_sizes()) as config:
        decoder = load_model(config, Path(config.model), torch.device("cpu"))
        num_weights = num_weights_read(Path(config.model))
    read = [weight.numel() for name, weight in decoder.named_parameters() if "embed" not in name]
    assert num_weights == sum(read)


def test_the_roofline_of_an_8b_llama(tmp_path):
    sizes, path = full_sizes(), tmp_path
    (path / "config.json").write_text(json.dumps(sizes.model))
    # 32 layers of 4096 × (2 × 4096 + 2 × 1024) + 3 × 4096 × 14336 and two norms; norm and head.
    weights = 32 * (4096 * 10240 + 3 * 4096 * 14336 + 8192) + 4096 * (1 + 128256)
    assert num_weights_read(path) == weights == 7_504_924_672
    shape = kv_shape(sizes, dtype=torch.bfloat16)
    assert shape.bytes_per_block == 16 * 131_072  # 128 KiB a token
    info = EngineInfo(
        model="", model_path=str(path), max_model_len=1, vocab_size=1, num_blocks=1,
        block_size=16, num_host_blocks=0, max_num_seqs=1, scheduling_policy="fcfs",
        dtype="bfloat16", device="cuda", eos_token_ids=(), pid=1,
        bytes_per_block=shape.bytes_per_block,
    )  # fmt: skip
    seconds = roofline_s(info, batch=64, context=1056.0, bytes_per_s=4e12)
    assert seconds == pytest.approx((2 * weights + 64 * 1056 * 131_072) / 4e12)


def test_kv_bytes_of_attention_count_once_for_each_kv_head():
    assert full_sizes().attention.kv_bytes_per_token == 2 * 8 * 128 * 2


# -- time -------------------------------------------------------------------------------------


def test_the_timer_gives_the_median_of_warm_calls(monkeypatch):
    clock, durations_s = [0.0], iter([0.2, 0.02, 0.001, 0.03])  # the first only warms up

    def call() -> None:
        clock[0] += next(durations_s)

    monkeypatch.setattr(gpu_bench.time, "perf_counter", lambda: clock[0])
    timer = Timer(torch.device("cpu"), flush_bytes=1024, num_repeats=3)
    assert timer.median_s(call) == pytest.approx(0.02)


def test_cells_end_with_the_time():
    here = bench(deadline_s=time.perf_counter() + 60)
    done = []
    for cell in here.in_time("swap", ["a", "b", "c"]):
        done.append(cell)
        if cell == "b":
            here.deadline_s = time.perf_counter()
    assert done == ["a", "b"]
    assert here.results.sections["swap"]["notes"] == ["no time left for c"]


# -- the workload -----------------------------------------------------------------------------


def test_batches_are_neighbours_and_hold_every_job_once():
    jobs = make_jobs(TraceSpec(num_requests=10), vocab_size=50, seed=1)
    for order, length in (
        (by_prompt, lambda job: len(job.prompt)),
        (by_output, lambda job: job.num_output_tokens),
    ):
        chosen = list(batches(order(jobs), 4))
        assert sorted(map(len, chosen)) == [2, 4, 4]
        assert sorted(job.index for batch in chosen for job in batch) == list(range(10))
        spans = sorted((min(map(length, batch)), max(map(length, batch))) for batch in chosen)
        assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(spans))


def test_other_seeds_give_other_tokens_of_the_same_lengths():
    spec = TraceSpec(num_requests=5)
    first, second = (make_jobs(spec, vocab_size=1000, seed=seed) for seed in (0, 1))
    assert [len(job.prompt) for job in first] == [len(job.prompt) for job in second]
    assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))


# -- the rival --------------------------------------------------------------------------------


class StubModel:
    """Generates sevens, for at most two sequences at once."""

    device = torch.device("cpu")

    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any) -> Tensor:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError
        assert attention_mask[:, -1].all()  # padded on the left
        assert torch.equal(attention_mask, (input_ids > 0).long())
        sevens = torch.full((len(input_ids), generation_config.max_new_tokens), 7)
        return torch.cat([input_ids, sevens], dim=1)


def test_a_batch_that_does_not_fit_is_halved_and_only_wanted_tokens_count():
    jobs = [
        Job(index, prompt=(1,) * (index + 1), num_output_tokens=2 * index + 1) for index in range(5)
    ]
    done = run_static(StubModel(), jobs, batch_size=5, limit_s=60.0)
    assert done.batch_size == 2
    assert done.outputs == {job.index: [7] * job.num_output_tokens for job in jobs}
    assert done.num_tokens == 1 + 3 + 5 + 7 + 9
    assert done.tokens_per_s == done.num_tokens / done.seconds


def test_one_batch_at_least_stands_for_all():
    jobs = [Job(index, prompt=(1,), num_output_tokens=3) for index in range(5)]
    done = run_static(StubModel(), jobs, batch_size=2, limit_s=0.0)
    assert len(done.outputs) in (1, 2)
    assert done.num_tokens == 3 * len(done.outputs)


# -- what is said of it -----------------------------------------------------------------------


def finished() -> dict[str, Any]:
    found = results()
    found.add_ceiling("copy_bytes_per_s", 4.312e12)
    found.add_ceiling("matmul_flop_per_s", 7.88e14)
    found.add_figure("decode_attention_of_copy", 0.871)
    found.add_figure("paged_over_contiguous", 1.2)
    found.add_check("rms_norm", error=1e-3, bound=4e-3)
    found.add_row("swap", {"direction": "out", "bytes_per_s": 5.1e10, "of_pinned_copy": 0.93})
    found.end()
    return found.as_json()


def test_the_summary_tells_figures_bars_and_ceilings():
    lines = report.summary(finished()).splitlines()
    assert report.details(finished()).endswith("\n".join(lines))
    assert lines[0] == "NVIDIA H200, 2026-11-22; commit abc; torch 2.11; triton 3.6."
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0]: row[1:] for row in cells if len(row) > 1}
    assert rows[BARS["decode_attention_of_copy"].meaning] == ["0.871", "≥ 0.85", "yes"]
    assert rows[BARS["paged_over_contiguous"].meaning] == ["1.200", "≤ 1.05", "**no**"]
    assert rows[BARS["swap_of_pinned_copy"].meaning] == ["not measured", "≥ 0.85", "–"]
    assert rows["copy in device memory, bytes read + written"] == ["4,312.0", "GB/s"]
    assert rows["bf16 matrix product"] == ["788.0", "TFLOP/s"]


def test_details_tell_every_cell_and_check():
    text = report.details(finished())
    assert "| out       |             51.0 |          0.930 |" in text
    assert "| rms_norm              | 1.0e-03 | 4.0e-03 |   yes |" in text


def test_no_run_is_said_to_be_none():
    assert "No figure of a GPU has been measured" in report.summary(None)


def test_the_newest_run_counts(tmp_path):
    assert report.newest(tmp_path) is None
    for name, date in (("b", "2026-11-20"), ("a", "2026-11-22"), ("c", "2026-11-21")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**finished(), "date": date}))
    newest = report.newest(tmp_path)
    assert newest is not None
    assert newest.name == "a.json"


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {report.NAME} -->\nold\n<!-- end of {report.NAME} -->\nafter\n")
    report.update(page, "new\n\ntext")
    assert report.shown(page) == "new\n\ntext"
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_the_docs_say_what_is_committed():
    """`python -m penstock.load.gpu.report --update` writes them."""
    assert report.shown(report.DOCS) == report.summary(report.read(report.newest()))


def test_committed_runs_are_whole_measurements():
    for path in report.RESULTS.glob("*.json"):
        data = json.loads(path.read_text("utf-8"))
        assert data["is_measurement"], path
        assert set(data["figures"]) == set(BARS), path


@pytest.mark.parametrize("sizes", [small_sizes(), full_sizes()], ids=["small", "full"])
def test_the_bars_speak_of_cells_that_are_measured(sizes):
    assert sizes.attention.long_context in sizes.attention.contexts
    assert sizes.attention.bar_prefill in sizes.attention.prefills


def test_a_card_is_measured_on_what_its_bars_speak_of():
    sizes = full_sizes()
    assert sizes.copy_bytes >= 4 << 30
    assert sizes.attention.batches == (32, 64, 128)
    assert sizes.attention.contexts == (1024, 4096, 16384)
    assert (sizes.attention.long_context, sizes.attention.bar_prefill) == (4096, 8192)
    assert sizes.decode.batches == (1, 4, 16, 64)
    assert sizes.end_to_end.hf_batches == (1, 8, 32, 128)
