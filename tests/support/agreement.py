"""Does our harness say what an independent one says? `vllm bench serve` beside ours.

Both measure the synthetic server, whose latency is known, with the same number of requests in
flight, in turns. Throughput must agree within 5 %, the medians of TTFT and ITL within 10 %.

    python -m tests.support.agreement
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.load.machine import commit, machine
from penstock.load.peers import environments, models
from penstock.load.peers.rivals import OFFLINE, preload
from penstock.load.report.tables import table, write_report

from .synthetic.server import serve
from .synthetic.settings import SyntheticSettings

_TTFT_MS, _ITL_MS, _IN_FLIGHT = 50.0, 10.0, 32
_NUM_REQUESTS = 320
# In and out. Answers of one length would end, and the next begin, all in the same millisecond:
# then each harness is measured by how fast it sends 32 requests.
_SHORTEST, _LONGEST = 64, 192
_MEAN, _LENGTHS = (_SHORTEST + _LONGEST) // 2, f"{_SHORTEST}-{_LONGEST}"
# A figure, by its name in each harness' result, and how far the medians may lie apart.
_FIGURES = {
    "output tokens/s": ("output_throughput", ("output_tokens_per_s",), 0.05),
    "TTFT p50 ms": ("median_ttft_ms", ("ttft_ms", "p50"), 0.10),
    "ITL p50 ms": ("median_itl_ms", ("itl_ms", "p50"), 0.10),
}
Figures = Mapping[str, float]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agreement", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("load/results"), help="a folder")
    parsed = parser.parse_args(words)
    pairs: list[dict[str, Figures]] = []
    with serve(SyntheticSettings(ttft_ms=_TTFT_MS, itl_ms=_ITL_MS)) as server:
        for _ in range(parsed.pairs):
            pairs.append({"vllm": _vllm(server.base_url), "penstock": _penstock(server.base_url)})
            print(pairs[-1], flush=True)
    distances = {name: _distance(pairs, name) for name in _FIGURES}
    agrees = all(distances[name] <= bound for name, (_, _, bound) in _FIGURES.items())
    markdown = _markdown(pairs, distances, agrees=agrees)
    print(markdown)
    data = {
        "machine": machine(),
        "commit": commit(),
        "pairs": pairs,
        "distances": distances,
        "agrees": agrees,
    }
    name = f"{time.strftime('%Y-%m-%d')}-agreement"
    write_report(parsed.out, name, markdown=markdown, data=data)
    return 0 if agrees else 1


def _vllm(base_url: str) -> Figures:
    environment = environments.make("vllm")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(environment.python, environment.path / "bin" / "vllm", "bench", "serve"),
            *("--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions"),
            *("--model", "synthetic", "--tokenizer", models.make("S"), "--ignore-eos"),
            *("--dataset-name", "random", "--num-prompts", _NUM_REQUESTS, "--disable-tqdm"),
            *("--random-input-len", _MEAN, "--random-output-len", _MEAN),
            *("--random-range-ratio", (_LONGEST - _SHORTEST) / (2 * _MEAN)),
            *("--max-concurrency", _IN_FLIGHT, "--save-result", "--result-dir", folder),
            *("--result-filename", "result.json"),
        ]
        _run(command, {**OFFLINE, "LD_PRELOAD": preload(environment)})
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["failed"]:
        raise RuntimeError(f"vllm bench serve: {result['failed']} requests failed")
    return {name: result[key] for name, (key, _, _) in _FIGURES.items()}


def _penstock(base_url: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(Path(sys.executable).with_name("penstock"), "bench", "serve"),
            *("--base-url", base_url, "--endpoint", "completions", "--dataset", "random"),
            *("--input-len", _LENGTHS, "--output-len", _LENGTHS),
            *("--num-prompts", _NUM_REQUESTS, "--max-concurrency", _IN_FLIGHT),
            *("--label", "result", "--out", folder),
        ]
        _run(command, {})
        (path,) = Path(folder).glob("*.json")
        summary = json.loads(path.read_text())["runs"][0]["summary"]
    figures = {}
    for name, (_, keys, _) in _FIGURES.items():
        value = summary
        for key in keys:
            value = value[key]
        figures[name] = value
    return figures


def _run(command: Sequence[object], env: Mapping[str, str]) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} failed: {done.stderr[-2000:]}")


def _median(pairs: Sequence[Mapping[str, Figures]], harness: str, name: str) -> float:
    return statistics.median(pair[harness][name] for pair in pairs)


def _distance(pairs: Sequence[Mapping[str, Figures]], name: str) -> float:
    """Of the medians, relative to vLLM's."""
    theirs, ours = (_median(pairs, harness, name) for harness in ("vllm", "penstock"))
    return abs(ours - theirs) / theirs


def _markdown(
    pairs: Sequence[Mapping[str, Figures]], distances: Mapping[str, float], *, agrees: bool
) -> str:
    rows = [
        [
            f"{harness}, pair {number}",
            *(f"{pair[harness][name]:,.1f}" for name in _FIGURES),
        ]
        for number, pair in enumerate(pairs, 1)
        for harness in ("vllm", "penstock")
    ]
    for harness in ("vllm", "penstock"):
        medians = (f"**{_median(pairs, harness, name):,.1f}**" for name in _FIGURES)
        rows.append([f"**{harness}, median**", *medians])
    rows.append(["apart", *(f"{distances[name]:.1%}" for name in _FIGURES)])
    rows.append(["may be", *(f"{bound:.0%}" for _, _, bound in _FIGURES.values())])
    return "\n\n".join(
        [
            "# Our harness beside `vllm bench serve`",
            f"Both against the synthetic server (first token after {_TTFT_MS:g} ms, then one each "
            f"{_ITL_MS:g} ms), {_NUM_REQUESTS} requests of {_SHORTEST} to {_LONGEST} tokens "
            f"in and out, {_IN_FLIGHT} in flight, in turns.",
            table(["harness", *_FIGURES], rows),
            "They agree." if agrees else "**They do not agree.**",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
