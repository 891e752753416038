"""A server whose Python, and whose kernels, have nothing that only Linux has."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.kernels.cpu.build import build_library, find_compiler
from penstock.kernels.cpu.isa import select_isa

from .processes import END_S, Served, serve, wait_gone

_WITHOUT = Path(__file__).parents[1] / "support" / "without_linux"
_QUESTION = {
    "model": "demo",
    "prompt": "What is paged attention?",
    "max_tokens": 24,
    "temperature": 0,
}


def _answer(served: Served) -> str:
    response = httpx.post(f"{served.base_url}/v1/completions", json=_QUESTION, timeout=END_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_it_answers_and_leaves_no_process_behind(
    demo_server: Served,
    long_model: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = _answer(demo_server)
    monkeypatch.setenv("PYTHONPATH", str(_WITHOUT))
    monkeypatch.setenv("CC", shlex.join((*find_compiler(), "-DWITHOUT_FUTEX")))
    library = build_library(select_isa(), ("DTYPE=f32",))
    options = ("--dtype", "float32", "--tensor-parallel-size", "2", "--num-threads", "2")
    with serve(*long_model, *options, log=tmp_path / "log") as served:
        assert [_answer(served) for _ in range(2)] == [expected] * 2
        names = [process.name() for process in served.family]
        assert {"penstock-engine", "penstock-rank 1"} <= {*names}
        assert "penstock-template" not in names  # which the supervisor could not adopt
        engine = served.child("penstock-engine")
        mapped = {each.path for each in engine.memory_maps()}
        assert str(library) in mapped
        assert not [path for path in mapped if "memfd:penstock" in path]
        psutil.Process(served.process.pid).send_signal(signal.SIGKILL)
        wait_gone(served.family)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "WARNING" not in log
