"""The rivals, and penstock among them: how each is started, with which weights, and measured.

An adapter is a `Rival`; `RIVALS` says which are compared. What is measured, and how, is shared with
`penstock bench serve`: dialogues, driver and transports.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop

from penstock.engine.errors import ConfigError
from penstock.load.client.records import StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.launch import answers, free_port, running, tail
from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD, OURS, REPOSITORY, Environment
from penstock.load.peers.workloads import Workload
from penstock.load.workloads.driver import ClosedLoop, RunResult, run

_CELL_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to start a rival. Of several that fit a workload, the fastest counts."""

    name: str = "default"
    flags: tuple[str, ...] = ()  # in process, the options of its library
    env: Mapping[str, str] = field(default_factory=dict)
    workloads: Sequence[str] = ()  # those it is meant for; empty: all

    def fits(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads

    def __str__(self) -> str:
        """As on a command line: what the report says."""
        words = [*(f"{key}={value}" for key, value in self.env.items()), *self.flags]
        return " ".join([f"{self.name}:", *words]) if words else self.name


@dataclass(frozen=True, slots=True)
class Running:
    """A rival that is ready. `measure` raises ConfigError if it ended, or took too long."""

    process: psutil.Process  # the first of its processes
    ready_s: float  # from the start of its process
    measure: Callable[[Workload], RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """
    Attributes:
        name: in the results; of its environment, and perhaps of a variant after a dash.
        distribution: its version is the rival's.
        command: with the `{path}` of its environment, its `{weights}` of the model and the
            model's name; with a `{port}` it is a server, else a library in our worker.
        settings: the ways to start it.
        weights: makes the model in the rival's own form, unless it is there.
        keeps_connections: it does not close them after a stream.
    """

    name: str
    distribution: str
    command: str
    settings: tuple[Setting, ...] = (Setting(),)
    weights: Callable[[str], Path] = models.make
    env: Callable[[Environment], Mapping[str, str]] = lambda _: {}
    keeps_connections: bool = True

    def prepare(self, model: str) -> str:
        """Make its environment and its form of the model; its version. Raises InstallError if it
        cannot be had here."""
        environment = self._environment()
        self.weights(model)
        return environment.version(self.distribution) or self.distribution

    @contextmanager
    def started(self, model: str, setting: Setting) -> Iterator[Running]:
        """Run it during the block. Raises ConfigError if it did not start."""
        environment, log = self._environment(), BUILD / "logs" / f"{self.name}-{model}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        port, weights = free_port(), self.weights(model)
        values = {"path": environment.path, "weights": weights, "model": model}
        command = [word.format(**values, port=port) for word in shlex.split(self.command)]
        env = {**self.env(environment), **setting.env}
        open_rival = self._server if "{port}" in self.command else self._library
        with open_rival([*command, *setting.flags], model, port, env, log) as opened:
            yield opened

    def _environment(self) -> Environment:
        return environments.make(self.name.partition("-")[0])

    @contextmanager
    def _server(
        self, command: Sequence[str], model: str, port: int, env: Mapping[str, str], log: Path
    ) -> Iterator[Running]:
        """An OpenAI-compatible server, ready when `/health` says so."""
        base_url, began_s = f"http://127.0.0.1:{port}", time.perf_counter()

        def is_ready(_: object) -> bool:
            return answers(f"{base_url}/health")

        with running("it", command, is_ready, log=log, env=env) as (process, _):
            ready_s = time.perf_counter() - began_s
            measure = partial(self._ask, process, base_url, model)
            yield Running(psutil.Process(process.pid), ready_s, measure)

    def _ask(
        self, process: subprocess.Popen[str], base_url: str, model: str, workload: Workload
    ) -> RunResult:
        """At real-time priority where permitted."""

        async def measure() -> RunResult:
            kept = self.keeps_connections
            opened = SseTransport(base_url, "completions", keeps_connections=kept)
            async with asyncio.timeout(_CELL_WITHIN_S), opened:
                loop, extra = ClosedLoop(workload.concurrency), {"temperature": 0}
                return await run(
                    opened, workload.dialogues, arrivals=loop, model=model, extra=extra
                )

        if process.poll() is not None:
            raise ConfigError(f"it had ended with {process.returncode}")
        try:
            with real_time():
                return uvloop.run(measure())
        except TimeoutError:
            late = f"{workload.name} took longer than {_CELL_WITHIN_S:g} s"
            raise ConfigError(late) from None

    @contextmanager
    def _library(
        self, command: Sequence[str], _model: str, _port: int, env: Mapping[str, str], log: Path
    ) -> Iterator[Running]:
        """Run and timed by our worker under the library's own Python. Its figures include no
        client, no HTTP and no tokenizer."""
        env, began_s = {**env, "PYTHONPATH": str(REPOSITORY / ".namespace")}, time.perf_counter()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        is_ready = partial(_answer, within_s=0.02)
        with running("it", command, is_ready, log=log, env=env, pipes=pipes) as (process, _ready):
            ready_s = time.perf_counter() - began_s

            def measure(workload: Workload) -> RunResult:
                turns = [(turn.text, turn.max_tokens) for turn in workload.turns]
                asked = {"concurrency": workload.concurrency, "turns": turns}
                assert process.stdin is not None
                try:
                    print(json.dumps(asked), file=process.stdin, flush=True)
                except BrokenPipeError:
                    raise ConfigError(f"it had ended: {tail(log)}") from None
                answer = _answer(process, within_s=_CELL_WITHIN_S)
                if answer is None:
                    raise ConfigError(f"it ended, or took too long: {tail(log)}")
                return _result(answer, workload)

            yield Running(psutil.Process(process.pid), ready_s, measure)


@contextmanager
def real_time() -> Iterator[bool]:
    """Run the block under SCHED_RR; yield whether that is permitted.

    On few cores a server that spins would keep the client waiting, and its figures would suffer.
    """
    try:
        # Reset on fork: child processes must not get real-time priority.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except (PermissionError, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _answer(process: subprocess.Popen[str], *, within_s: float) -> dict[str, Any] | None:
    """A worker's next line; it is written at once, so that its start says that all of it comes."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], within_s)
    line = process.stdout.readline() if readable else ""
    answer: dict[str, Any] | None = json.loads(line) if line else None
    return answer


def _result(answer: Mapping[str, Any], workload: Workload) -> RunResult:
    records = []
    for fields in answer["records"]:
        num_tokens = sum(fields["event_tokens"])
        record = StreamRecord(**fields, sent_s=fields["scheduled_s"], output_tokens=num_tokens)
        expected = workload.turns[record.dialogue].max_tokens
        record.expected_tokens, record.finish_reason = expected, "length"
        records.append(record)
    return RunResult(
        records=records, began_s=answer["began_s"], ended_s=answer["ended_s"], client_cpu_s=0.0
    )


# -- weights --------------------------------------------------------------------------------------


def _converted(source: Path, suffix: str, rival: str, command: str, **values: object) -> Path:
    """A rival's form of a model, made unless it is there by a command with the `{path}` of the
    rival's environment, a `{source}` and a `{target}`."""
    target, unfinished = source.with_suffix(suffix), source.with_suffix(f"{suffix}.part")
    if not target.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        environment = environments.make(rival)
        values = {**values, "path": environment.path, "source": source, "target": unfinished}
        environment.run(*(word.format(**values) for word in shlex.split(command)))
        unfinished.rename(target)
    return target


def _gguf(model: str) -> Path:
    """The model as a GGUF file, by llama.cpp's converter."""
    command = (
        "{path}/bin/python -m penstock.load.peers.workers.llamacpp_converter {llama_cpp} "
        "MOSTLY_BF16 {source} {target}"
    )
    source = models.make(model)
    llama_cpp = "" if source.is_file() else environments.llama_cpp_source()
    return _converted(source, ".gguf", OURS, command, llama_cpp=llama_cpp)


def _quantized_gguf(kind: str, model: str) -> Path:
    """The same, by llama.cpp's own tool."""
    command = f"{{path}}/llama.cpp/bin/llama-quantize {{source}} {{target}} {kind}"
    return _converted(_gguf(model), f".{kind}.gguf", "llamacpp", command)


def _exported(model: str, kind: str = "fp16") -> Path:
    """The model in OpenVINO's form. Its documentation recommends fp16; the CPU plugin computes in
    bf16 where it can."""
    suffix = ".openvino" if kind == "fp16" else f".{kind}.openvino"
    command = (
        "{path}/bin/optimum-cli export openvino --model {source} --task text-generation-with-past "
        f"--weight-format {kind} --disable-convert-tokenizer {{target}}"
    )
    return _converted(models.make(model), suffix, "openvino", command)


# -- each of them ---------------------------------------------------------------------------------

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_VLLM_FLAGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "128"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
_VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "4"}
# llama.cpp's slots, as many as streams in flight: the tokens of each slot, and their workloads.
_SLOTS: Mapping[int, tuple[int, tuple[str, ...]]] = {
    1: (2560, ("single", "prefill")),
    8: (1536, ("c8",)),
    32: (768, ("c32",)),
    128: (256, ("front128",)),
}


def preload(environment: Environment) -> str:
    """What vLLM wants in LD_PRELOAD: a faster allocator, and Intel's OpenMP."""
    allocator = next(environment.path.glob("system/usr/lib/*/libtcmalloc_minimal.so.4"))
    return f"{allocator}:{environment.path / 'lib' / 'libiomp5.so'}"


def _llamacpp_settings() -> Iterator[Setting]:
    threads = str(psutil.cpu_count() or 1)
    for num_slots, (num_tokens, workloads) in _SLOTS.items():
        slots = ("-t", threads, "-np", str(num_slots), "-c", str(num_slots * num_tokens))
        flags = (*slots, "-fa", "on", "--cache-ram", "0", "--no-kv-unified")
        yield Setting(name=f"split-{num_slots}", flags=flags, workloads=workloads)


_PENSTOCK = Rival(  # as for a user who sets nothing else
    name=OURS,
    distribution="penstock-llm",
    command="{path}/bin/penstock serve {weights} --served-model-name {model} --port {port}",
)
_VLLM = Rival(
    name="vllm",
    distribution="vllm-cpu",
    command="{path}/bin/python {path}/bin/vllm serve {weights} --served-model-name {model} "
    "--host 127.0.0.1 --port {port}",
    settings=(
        Setting(
            name="bound", flags=_VLLM_FLAGS, env={**_VLLM_ENV, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        ),
        Setting(name="unbound", flags=_VLLM_FLAGS, env=_VLLM_ENV),
    ),
    env=lambda environment: {**OFFLINE, "LD_PRELOAD": preload(environment)},
)
_LLAMACPP = Rival(
    name="llamacpp",
    distribution=f"of llama-cpp-python {environments.LLAMA_CPP_PYTHON}",  # none is installed
    command="{path}/llama.cpp/bin/llama-server -m {weights} --host 127.0.0.1 --port {port} "
    "--no-webui",
    settings=tuple(_llamacpp_settings()),
    weights=_gguf,
    keeps_connections=False,  # although it promises to
)
_OPENVINO = Rival(
    name="openvino",
    distribution="openvino-genai",
    command="{path}/bin/python -m penstock.load.peers.workers.openvino {weights}",
    settings=(
        Setting(flags=("{}",)),
        Setting(name="kv-bf16", flags=(json.dumps({"KV_CACHE_PRECISION": "bf16"}),)),
    ),
    weights=_exported,
)


def _penstock_in(kind: str) -> Rival:
    return replace(_PENSTOCK, settings=(Setting(flags=("--quantization", kind)),))


def _llamacpp_in(kind: str) -> Rival:
    name = f"llamacpp-{kind.lower()}"
    return replace(_LLAMACPP, name=name, weights=partial(_quantized_gguf, kind))


def _openvino_in(kind: str) -> Rival:
    return replace(_OPENVINO, name=f"openvino-{kind}", weights=partial(_exported, kind=kind))


# By what is compared: the kind of weights, or files; ours first. Weights with fewer
# bits are each made by the rival's own tool.
RIVALS: Mapping[str, tuple[Rival, ...]] = {
    "bf16": (_PENSTOCK, _VLLM, _LLAMACPP, _OPENVINO),
    "gguf": (_PENSTOCK, _LLAMACPP),  # the same files
    "int8": (_penstock_in("int8"), _llamacpp_in("Q8_0"), _openvino_in("int8")),
    "int4": (_penstock_in("int4"), *map(_llamacpp_in, ("Q4_0", "Q4_K_M")), _openvino_in("int4")),
}
