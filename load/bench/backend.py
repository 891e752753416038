"""`penstock bench backend`: a model through transformers, beside our own code and beside Hugging
Face's `generate`.

One stream of greedy tokens, in turns in this process, `generate` on all cores or on one, whichever
is faster; then servers, started in turns until they are ready.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, get_args

import torch
import transformers

from penstock.engine.config import DTYPES, DeviceConfig, ModelImpl
from penstock.engine.errors import ConfigError
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.load.engine_runs import Lengths, build_engine, greedy_request, run_requests
from penstock.load.launch import server
from penstock.load.machine import frozen_garbage
from penstock.load.report.options import add_out, positive
from penstock.load.report.tables import publish, table

_IMPLS = [each for each in get_args(ModelImpl) if each != "auto"]  # native, transformers
_NATIVE, _BACKEND, _THEIRS = *_IMPLS, "generate"
_NAMES = {_NATIVE: "natively", _BACKEND: "through transformers", _THEIRS: "Hugging Face's generate"}
_BAR_NATIVE, _BAR_THEIRS, _BAR_READY = 0.5, 2.5, 1.5
_IMPORT = """\
import time
import penstock.engine.server
import penstock.engine.models.loader
began_s = time.perf_counter()
import penstock.engine.models.transformers_backend
print(time.perf_counter() - began_s)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a directory or a Hub id, of a native family")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of all")
    add("--prompt-tokens", type=positive, default=128, help="prompt tokens of each run")
    add("--output-tokens", type=positive, default=128, help="output tokens of each run")
    add("--repeats", type=positive, default=5, help="runs of each, in turn")
    add("--starts", type=int, default=3, help="servers started of each; 0: none")
    add("--seed", type=int, default=0, help="seed of the prompts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the tables."""
    if parsed.starts < 0 or parsed.output_tokens < 2:
        raise ConfigError("--starts must be at least 0, --output-tokens 2")
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    rates = _rates(parsed, lengths)
    gc.collect()
    ready: dict[str, list[float]] = {impl: [] for impl in _IMPLS if parsed.starts}
    import_s = [_import_s() for _ in range(parsed.starts)]
    for _ in range(parsed.starts):
        for impl, seconds in ready.items():
            with server(parsed.model, ["--dtype", parsed.dtype, "--model-impl", impl]) as started:
                seconds.append(started.ready_s)
    figures: dict[str, Any] = {
        "model": parsed.model.rstrip("/").rpartition("/")[2],
        "dtype": parsed.dtype,
        "num_threads": num_usable_cores(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **asdict(lengths),
        "output_tokens_per_s": rates,
        "ready_s": ready,
        "import_s": import_s,
        "ratios": ratios(rates, ready, import_s),
    }
    publish(parsed.out, "backend", "Models through transformers", markdown(figures), figures)
    return 0


def _rates(parsed: argparse.Namespace, lengths: Lengths) -> dict[str, list[float]]:
    """Output tokens per second of each run, the prompt's time included."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[list[int]], None]] = {}
        parsed.num_seqs = [1]
        for impl in _IMPLS:
            core, info = build_engine(parsed, "none", DeviceConfig(device="cpu"), model_impl=impl)
            stack.callback(core.close)

            def generate(prompt: list[int], core: Any = core) -> None:
                run_requests(core, [greedy_request(0, prompt, lengths.output_tokens)], lengths)

            sides[impl] = generate
        dtype = getattr(torch, info.dtype)
        other: Any = transformers.AutoModelForCausalLM.from_pretrained(info.model_path, dtype=dtype)
        sides[_THEIRS] = _generate(other.eval(), lengths)
        rng = random.Random(parsed.seed)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        stack.enter_context(frozen_garbage())
        for number in range(1 + parsed.repeats):
            for name, side in sides.items():
                prompt = rng.choices(range(info.vocab_size), k=lengths.prompt_tokens)
                began_s = time.perf_counter()
                side(prompt)
                if number:  # the first is slow
                    rates[name].append(lengths.output_tokens / (time.perf_counter() - began_s))
        return rates


def _generate(model: Any, lengths: Lengths) -> Callable[[list[int]], None]:
    options = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=lengths.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    @torch.inference_mode()
    def generate(prompt: list[int], chosen: int = 0) -> None:
        num_threads = torch.get_num_threads()  # one, beside the engine's
        torch.set_num_threads(chosen or fastest)
        try:
            ids = torch.tensor([prompt])
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=options
            )
        finally:
            torch.set_num_threads(num_threads)
        assert found.shape[1] == len(prompt) + lengths.output_tokens

    def seconds(num_threads: int) -> float:
        generate([0], num_threads)
        began_s = time.perf_counter()
        generate([0], num_threads)
        return time.perf_counter() - began_s

    # On a machine that does other things too, torch's threads wait for each other.
    fastest = min((num_usable_cores(), 1), key=seconds)
    return generate


def _import_s() -> float:
    """Seconds that the import of transformers takes an engine."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


# -- what is said of it -------------------------------------------------------------------------


def ratios(
    rates: Mapping[str, Sequence[float]],
    ready: Mapping[str, Sequence[float]],
    import_s: Sequence[float],
) -> dict[str, float]:
    """Medians of ratios of neighbours: the backend's speed to each of the others', and its seconds
    to ready, without the import, to those of the native path."""

    def median(pairs: Sequence[tuple[float, float]]) -> float:
        return statistics.median(one / other for one, other in pairs)

    found = {
        f"speed to {name}": median(list(zip(rates[_BACKEND], rates[name], strict=True)))
        for name in (_NATIVE, _THEIRS)
    }
    if ready:
        rests = [s - statistics.median(import_s) for s in ready[_BACKEND]]
        found["ready without the import"] = median(list(zip(rests, ready[_NATIVE], strict=True)))
    return found


def markdown(figures: Mapping[str, Any]) -> str:
    rates, ready, found = (figures[name] for name in ("output_tokens_per_s", "ready_s", "ratios"))
    rows = []
    for name, each in rates.items():
        starts = ready.get(name)
        shown = f"{statistics.median(starts):.2f}" if starts else "–"
        span = f"{min(each):,.0f}–{max(each):,.0f}"
        rows.append([_NAMES[name], f"{statistics.median(each):,.0f}", span, shown])
    lines = [
        f"Through transformers, one stream is {found[f'speed to {_NATIVE}']:.2f} times as fast as "
        f"natively (bar: {_BAR_NATIVE}), and {found[f'speed to {_THEIRS}']:.2f} times as fast as "
        f"generate (bar: {_BAR_THEIRS}). Medians of the ratios of neighbours."
    ]
    if ready:
        lines.append(
            f"Importing transformers takes {statistics.median(figures['import_s']):.2f} s; without "
            f"that, a server is ready in {found['ready without the import']:.2f} times the seconds "
            f"of the native path (bar: at most {_BAR_READY})."
        )
    title = (
        f"{figures['model']}, {figures['dtype']} on a CPU, {figures['num_threads']} threads: "
        f"{figures['prompt_tokens']} tokens in, {figures['output_tokens']} out, one stream"
    )
    header = ["", "tok/s", "min–max", "seconds to ready"]
    return "\n\n".join([title, table(header, rows), *lines])
