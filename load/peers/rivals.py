"""The rivals, and penstock among them: how each is prepared, started, measured and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from tokenizers import Tokenizer

from penstock.load.client.records import Endpoint, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import Transport
from penstock.load.launch import end, free_port
from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD, OURS, REPOSITORY, Environment
from penstock.load.peers.workloads import Workload, token_turns
from penstock.load.workloads.driver import ClosedLoop, RunResult, run


class RivalError(Exception):
    """A rival did not start, or ended while it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to start a rival. Of several that fit a workload, the fastest counts."""

    name: str
    flags: tuple[str, ...] = ()  # in process, the options of its library
    env: Mapping[str, str] = field(default_factory=dict)
    workloads: frozenset[str] = frozenset()  # those it is meant for; empty: all

    def fits(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads

    def __str__(self) -> str:
        """As on a command line: what the report says."""
        words = [*(f"{key}={value}" for key, value in self.env.items()), *self.flags]
        return " ".join([f"{self.name}:", *words]) if words else self.name


def cpu_s(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by the processes' names; equal names are added up.

    A process that has given itself no name is `main`.
    """
    found: dict[str, float] = {}
    for process in processes:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        name = "main" if name.startswith("python") else name
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """What they hold together: a page that several share counts once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


_READY_WITHIN_S, _CELL_WITHIN_S = 240.0, 300.0
_TAIL_BYTES = 600


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


class Running:
    """A rival that is ready, started by a command, its output in a log; `pipes` may replace its
    standard input and output.

    Attributes:
        ready_s: from the start of its process.
        process: the first of its processes.
    """

    stop_within_s = 20.0  # then it is killed

    def __init__(
        self, command: Sequence[object], *, env: Mapping[str, str], log: Path, **pipes: int
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        with log.open("wb") as file:
            self._popen = subprocess.Popen(  # noqa: S603  (a command of ours)
                [str(word) for word in command],
                env={"PENSTOCK_DATA_DIR": "none", **os.environ, **env},
                stdin=pipes.get("stdin", subprocess.DEVNULL),
                stdout=pipes.get("stdout", file),
                stderr=file,
                process_group=0,
            )
        self.process = psutil.Process(self._popen.pid)
        try:
            self._await_ready(began_s + _READY_WITHIN_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - began_s

    def measure(self, workload: Workload) -> RunResult:
        """Raises RivalError if it ended, or took too long."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all its processes, by force if it must be."""
        end(self.process, within_s=self.stop_within_s)
        self._popen.communicate()

    def _await_ready(self, until_s: float) -> None:
        raise NotImplementedError


class HttpServer(Running):
    """An OpenAI-compatible server, ready when `/health` says so."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        port: int,
        model: str,
        env: Mapping[str, str],
        log: Path,
        transport: Callable[[str, Endpoint], Transport] = SseTransport,
    ) -> None:
        self._transport = transport
        self._base_url = f"http://127.0.0.1:{port}"
        self._model = model
        super().__init__(command, env=env, log=log)

    def measure(self, workload: Workload) -> RunResult:
        """At real-time priority where permitted."""
        if self._popen.poll() is not None:
            raise RivalError(f"it had ended with {self._popen.returncode}")
        try:
            with real_time():
                return uvloop.run(self._run(workload))
        except TimeoutError:
            late = f"{workload.name} took longer than {_CELL_WITHIN_S:g} s"
            raise RivalError(late) from None

    async def _run(self, workload: Workload) -> RunResult:
        async with (
            asyncio.timeout(_CELL_WITHIN_S),
            self._transport(self._base_url, workload.endpoint) as opened,
        ):
            return await run(
                opened,
                workload.dialogues,
                arrivals=ClosedLoop(workload.concurrency),
                model=self._model,
                extra={"temperature": 0},
            )

    def _await_ready(self, until_s: float) -> None:
        while time.perf_counter() < until_s:
            if self._popen.poll() is not None:
                raise RivalError(f"it ended with {self._popen.returncode}: {tail(self._log)}")
            try:
                with urllib.request.urlopen(self._base_url + "/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RivalError(f"it was not ready within {_READY_WITHIN_S:g} s: {tail(self._log)}")


class InProcess(Running):
    """A library, run and timed by our worker under the library's own Python. Its figures include no
    client, no HTTP and no tokenizer."""

    stop_within_s = 5.0

    def __init__(
        self, command: Sequence[object], *, model: str, env: Mapping[str, str], log: Path
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(models.MODELS / model / "tokenizer.json"))
        env = {**env, "PYTHONPATH": str(REPOSITORY / ".namespace")}
        super().__init__(command, env=env, log=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self, workload: Workload) -> RunResult:
        asked = {
            "concurrency": workload.concurrency,
            "dialogues": [token_turns(each, self._tokenizer) for each in workload.dialogues],
        }
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(asked).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise RivalError(f"it had ended: {tail(self._log)}") from None
        return _result(self._answer(_CELL_WITHIN_S), workload)

    def _await_ready(self, until_s: float) -> None:
        self._answer(until_s - time.perf_counter())

    def _answer(self, within_s: float) -> dict[str, Any]:
        """One line; it is written at once, so that its start says that all of it comes."""
        assert self._popen.stdout is not None
        readable, _, _ = select.select([self._popen.stdout], [], [], within_s)
        line = self._popen.stdout.readline() if readable else b""
        if not line:
            how = "it ended" if readable else f"nothing came for {within_s:.0f} s"
            raise RivalError(f"{how}: {tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    text = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())


def _result(answer: Mapping[str, Any], workload: Workload) -> RunResult:
    records = []
    for fields in answer["records"]:
        num_tokens = sum(fields["event_tokens"])
        record = StreamRecord(**fields, sent_s=fields["scheduled_s"], output_tokens=num_tokens)
        expected = workload.dialogues[record.dialogue].turns[record.turn].max_tokens
        record.expected_tokens = expected
        record.finish_reason = "length"
        records.append(record)
    records.sort(key=lambda record: (record.dialogue, record.turn))
    return RunResult(
        records=records, began_s=answer["began_s"], ended_s=answer["ended_s"], client_cpu_s=0.0
    )


# -- each of them -----------------------------------------------------------------------------

OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_VLLM_FLAGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "128"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
_VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "4"}
# llama.cpp's slots, as many as streams in flight: their workloads, and the tokens of each slot.
_SLOTS = {
    1: (frozenset({"single", "turns1", "echo", "novel", "prefill"}), 2560),
    8: (frozenset({"c8", "turns8"}), 1536),
    32: (frozenset({"c32"}), 768),
    128: (frozenset({"front128"}), 256),
}
# On a CPU Hugging Face cannot tell how much memory to take.
_HF_BLOCKS = {"page_size": 64, "num_blocks": 1024, "max_batch_tokens": 2048}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """
    Attributes:
        name: in the results; of its environment, and perhaps of a variant after a dash.
        title: for people.
        distribution: its version is the rival's.
        options: the ways to start it.
        convert: makes the model in the rival's own form, unless it is there.
        serve: the command of its server, by environment, converted model, model and port; None for
            a library, which the worker of the rival's name runs.
    """

    name: str
    title: str
    distribution: str
    options: tuple[Setting, ...]
    convert: Callable[[str], Path] = models.make
    serve: Callable[[Environment, Path, str, int], list[object]] | None = None
    env: Callable[[Environment], Mapping[str, str]] = lambda _: {}
    transport: Callable[[str, Endpoint], Transport] = SseTransport

    def prepare(self, model: str) -> str:
        """Make its environment and its form of the model; its version. Raises InstallError if it
        cannot be had here."""
        environment = environments.make(self._family)
        self.convert(model)
        return environment.version(self.distribution) or self.distribution

    @property
    def _family(self) -> str:
        return self.name.partition("-")[0]

    def start(self, model: str, setting: Setting) -> Running:
        """Raises RivalError if it did not start."""
        environment, form, port = environments.make(self._family), self.convert(model), free_port()
        env = {**self.env(environment), **setting.env}
        log = BUILD / "logs" / f"{self.name}-{model}-{setting.name}.log"
        if self.serve is None:
            worker = f"penstock.load.peers.workers.{self._family}"
            library = [environment.python, "-m", worker, form, *setting.flags]
            return InProcess(library, model=model, env=env, log=log)
        command = [*self.serve(environment, form, model, port), *setting.flags]
        return HttpServer(
            command, port=port, model=model, env=env, log=log, transport=self.transport
        )


def preload(environment: Environment) -> str:
    """What vLLM wants in LD_PRELOAD: a faster allocator, and Intel's OpenMP."""
    allocator = next(environment.path.glob("system/usr/lib/*/libtcmalloc_minimal.so.4"))
    return f"{allocator}:{environment.path / 'lib' / 'libiomp5.so'}"


def _serve_penstock(environment: Environment, form: Path, model: str, port: int) -> list[object]:
    program = (environment.path / "bin" / "penstock", "serve", form)
    return [*program, "--served-model-name", model, "--port", port]


def _serve_penstock_draft(
    environment: Environment, form: Path, model: str, port: int
) -> list[object]:
    draft = {"model": str(models.make(models.draft_of(model)))}
    command = _serve_penstock(environment, form, model, port)
    return [*command, "--speculative-config", json.dumps(draft)]


def _serve_vllm(environment: Environment, form: Path, model: str, port: int) -> list[object]:
    program = (environment.python, environment.path / "bin" / "vllm", "serve", form)
    return [*program, "--served-model-name", model, "--host", "127.0.0.1", "--port", port]


def _serve_llamacpp(environment: Environment, form: Path, _: str, port: int) -> list[object]:
    program = environment.path / "llama.cpp" / "bin" / "llama-server"
    return [program, "-m", form, "--host", "127.0.0.1", "--port", port, "--no-webui"]


def _llamacpp_settings() -> Iterator[Setting]:
    threads = str(psutil.cpu_count() or 1)
    for num_slots, (workloads, num_tokens) in _SLOTS.items():
        slots = ("-t", threads, "-np", str(num_slots), "-c", str(num_slots * num_tokens))
        for kind, flag in {"split": "--no-kv-unified", "unified": "--kv-unified"}.items():
            if kind == "split" or num_slots > 1:
                flags = (*slots, "-fa", "on", "--cache-ram", "0", flag)
                yield Setting(name=f"{kind}-{num_slots}", flags=flags, workloads=workloads)


def _serve_llamacpp_draft(
    environment: Environment, form: Path, model: str, port: int
) -> list[object]:
    draft = _gguf(models.draft_of(model))
    return [*_serve_llamacpp(environment, form, model, port), "--spec-draft-model", draft]


def _gguf(model: str) -> Path:
    """The model as a GGUF file, by llama.cpp's converter."""
    program = ("-m", "penstock.load.peers.workers.llamacpp_converter")
    return _converted(
        OURS,
        model,
        ".gguf",
        lambda ours, source: (
            *(ours.python, *program, environments.llama_cpp_source(), "MOSTLY_BF16", source),
        ),
    )


def _quantized_gguf(kind: str, model: str) -> Path:
    """The same, by llama.cpp's own tool."""
    source = _gguf(model)
    tool = environments.make("llamacpp").path / "llama.cpp" / "bin" / "llama-quantize"
    return _converted("llamacpp", model, f".{kind}.gguf", lambda *_: (tool, source), after=(kind,))


def _exported(model: str, kind: str = "fp16") -> Path:
    """The model in OpenVINO's form. Its documentation recommends fp16; the CPU plugin computes in
    bf16 where it can."""
    return _converted(
        "openvino",
        model,
        ".openvino" if kind == "fp16" else f".{kind}.openvino",
        lambda its, source: (
            *(its.path / "bin" / "optimum-cli", "export", "openvino", "--model", source),
            *("--task", "text-generation-with-past", "--weight-format", kind),
            "--disable-convert-tokenizer",
        ),
    )


def _converted(
    rival: str,
    model: str,
    suffix: str,
    command: Callable[[Environment, Path], tuple[str | Path, ...]],
    after: tuple[str, ...] = (),
) -> Path:
    """A rival's form of the model, made unless it is there by a command that takes the target, and
    then `after`, last."""
    source = models.make(model)
    target, unfinished = source.with_suffix(suffix), source.with_suffix(f"{suffix}.part")
    if not target.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        environment = environments.make(rival)
        environment.run(*command(environment, source), unfinished, *after)
        unfinished.rename(target)
    return target


_PENSTOCK = Rival(
    name=OURS,
    title="penstock",
    distribution="penstock-llm",
    options=(Setting(name="default"),),  # as for a user who sets nothing else
    serve=_serve_penstock,
)
_VLLM = Rival(
    name="vllm",
    title="vLLM CPU server",
    distribution="vllm-cpu",
    options=(
        Setting(
            name="bound",
            flags=_VLLM_FLAGS,
            env={**_VLLM_ENV, "VLLM_CPU_OMP_THREADS_BIND": "0-1"},
        ),
        Setting(name="unbound", flags=_VLLM_FLAGS, env=_VLLM_ENV),
    ),
    serve=_serve_vllm,
    env=lambda environment: {**OFFLINE, "LD_PRELOAD": preload(environment)},
)
_LLAMACPP = Rival(
    name="llamacpp",
    title="llama.cpp server",
    distribution=f"of llama-cpp-python {environments.LLAMA_CPP_PYTHON}",  # none is installed
    options=tuple(_llamacpp_settings()),
    convert=_gguf,
    serve=_serve_llamacpp,
    # It closes after each stream, although it promises to keep the connection.
    transport=partial(SseTransport, keeps_connections=False),
)
_OPENVINO = Rival(
    name="openvino",
    title="OpenVINO GenAI, in process",
    distribution="openvino-genai",
    options=(
        Setting(name="default", flags=("{}",)),
        Setting(name="kv-bf16", flags=(json.dumps({"KV_CACHE_PRECISION": "bf16"}),)),
    ),
    convert=_exported,
)
_HF = Rival(
    name="hf",
    title="Hugging Face transformers, in process",
    distribution="transformers",
    options=(
        Setting(name="static", flags=("static", "{}")),
        Setting(name="continuous", flags=("continuous", json.dumps(_HF_BLOCKS))),
    ),
    env=lambda _: {"HF_HUB_OFFLINE": "1"},
)


def _penstock_with(*flags: str) -> Rival:
    return replace(_PENSTOCK, options=(Setting(name="default", flags=flags),))


def _llamacpp_in(kind: str) -> Rival:
    return replace(
        _LLAMACPP,
        name=f"llamacpp-{kind.lower()}",
        title=f"llama.cpp server, {kind}",
        convert=partial(_quantized_gguf, kind),
    )


def _openvino_in(kind: str) -> Rival:
    return replace(
        _OPENVINO,
        name=f"openvino-{kind}",
        title=f"OpenVINO GenAI, in process, {kind}",
        convert=partial(_exported, kind=kind),
    )


# Each system's own speculation, with its usual settings and those nearest to ours: up to 7 drafts,
# copied from where the newest 3 tokens occurred before. llama.cpp with a single slot.
_NGRAM = {"method": "ngram", "num_speculative_tokens": 7}
_VLLM_NGRAM = {**_NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
_LOOKUP = {"num_assistant_tokens": 7, "max_ngram_size": 3}
_LLAMACPP_NGRAM = {
    "usual": ("--spec-default",),
    "simple": ("--spec-type", "ngram-simple"),
    "like-ours": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", "7"),
    ),
}
_LLAMACPP_DRAFT = {
    f"drafts-{number}": ("--spec-type", "draft-simple", "--spec-draft-n-max", str(number))
    for number in (3, 7)
}


def _llamacpp_with(kinds: Mapping[str, tuple[str, ...]]) -> tuple[Setting, ...]:
    single = next(_llamacpp_settings())
    return tuple(
        replace(single, name=name, flags=(*single.flags, *flags)) for name, flags in kinds.items()
    )


_SPECULATING = (
    _penstock_with("--speculative-config", json.dumps(_NGRAM)),
    replace(
        _PENSTOCK,
        name="penstock-draft",
        title="penstock, draft model",
        serve=_serve_penstock_draft,
    ),
    replace(_PENSTOCK, name="penstock-plain", title="penstock without speculation"),
    _VLLM,
    replace(
        _VLLM,
        name="vllm-ngram",
        title="vLLM CPU server, n-grams",
        options=tuple(
            replace(each, flags=(*each.flags, "--speculative-config", json.dumps(_VLLM_NGRAM)))
            for each in _VLLM.options
        ),
    ),
    _LLAMACPP,
    replace(
        _LLAMACPP,
        name="llamacpp-ngram",
        title="llama.cpp server, n-grams",
        options=_llamacpp_with(_LLAMACPP_NGRAM),
    ),
    replace(
        _LLAMACPP,
        name="llamacpp-draft",
        title="llama.cpp server, draft model",
        options=_llamacpp_with(_LLAMACPP_DRAFT),
        serve=_serve_llamacpp_draft,
    ),
    _OPENVINO,
    replace(
        _OPENVINO,
        name="openvino-lookup",
        title="OpenVINO GenAI, in process, prompt lookup",
        options=(Setting(name="lookup", flags=('{"prompt_lookup": true}', json.dumps(_LOOKUP))),),
    ),
)

# By what is compared: the kind of weights, files, or speculation; ours first. Weights with fewer
# bits are each made by the rival's own tool.
RIVALS: Mapping[str, tuple[Rival, ...]] = {
    "bf16": (_PENSTOCK, _VLLM, _LLAMACPP, _OPENVINO, _HF),
    "gguf": (_PENSTOCK, _LLAMACPP),  # the same files
    "int8": (
        _penstock_with("--quantization", "int8"),
        _llamacpp_in("Q8_0"),
        _openvino_in("int8"),
    ),
    "int4": (
        _penstock_with("--quantization", "int4"),
        _llamacpp_in("Q4_0"),
        _llamacpp_in("Q4_K_M"),
        _openvino_in("int4"),
    ),
    "speculation": _SPECULATING,
}
